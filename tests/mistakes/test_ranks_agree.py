"""Ranks that use other parameters in a step, or keep other buffers: averaged right, or named."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from accel_callbacks import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
)
from tests.support.bound import BOUND, patience
from tests.support.rounding import assert_reordered
from tests.support.sharded import whole

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


def accelerator(
    layout: str,
    handler: dict[str, Any] | None = None,
    plugin: dict[str, Any] | None = None,
    timeout: timedelta = BOUND,
    **options: Any,
) -> Accelerator:
    if layout == "hsdp":
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    if layout != "ddp":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(**(plugin or {}))
    handlers = [DistributedDataParallelKwargs(**handler)] if handler else []
    return Accelerator(cpu=True, timeout=timeout, kwargs_handlers=handlers, **options)


# --- buffers ------------------------------------------------------------------------------------


class Counted(torch.nn.Module):
    """A model with buffers of several types that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.last = torch.nn.Linear(6, 1)
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("phases", torch.zeros(2, dtype=torch.complex64), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.flags |= inputs.mean() > 0.5
            self.phases += inputs.mean()
        return self.last(self.norm(self.first(inputs)))

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)))


def batch_of(accel: Accelerator, number: int = 0) -> torch.Tensor:
    """Return a batch of this rank, whose mean is that of no other."""
    generator = torch.Generator().manual_seed(10 * number + accel.process_index)
    return torch.randn(8, 5, generator=generator) + accel.process_index


def trained(layout: str, handler: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    """Return the buffers after some steps, before and after a forward of evaluation."""
    accel = accelerator(layout, handler, **options)
    model: Any = Counted()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(3):
        accel.backward(model(batch_of(accel, number)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    inner = accel.unwrap_model(model)
    before = inner.norm.running_mean.tolist()
    with accel.evaluate(model), torch.no_grad():
        outputs = model(torch.ones(2, 5)).flatten().tolist()
        names = ("running_mean", "running_var", "num_batches_tracked")
        buffers = [getattr(inner.norm, name).tolist() for name in names]
        return [before, outputs, buffers, inner.flags.tolist(), str(inner.phases.tolist())]


@pytest.mark.parametrize("compiled", [False, True])
def test_buffers_of_shards_are_those_of_rank_0_as_under_ddp(pool, compiled):
    plugin = {"dynamo_plugin": TorchDynamoPlugin(backend="eager")} if compiled else {}
    first, second = pool.run(trained_with, "fsdp", None, plugin)
    ddp = pool.run(trained, "ddp")[0]
    assert first[1:4] == second[1:4]  # what ranks see in their evaluation
    assert first[2][0] == pytest.approx(ddp[2][0], abs=1e-5)
    assert first[3] == ddp[3]
    assert second[0] != first[0]  # of its own last batch


def trained_with(layout: str, handler: dict[str, Any] | None, options: dict[str, Any]) -> list[Any]:
    return trained(layout, handler, **options)


def test_replicas_of_shards_have_the_buffers_of_rank_0(pool_of_4):
    results = pool_of_4.run(trained, "hsdp")
    assert all(result[1:4] == results[0][1:4] for result in results)


def test_ranks_keep_buffers_of_their_own_where_they_are_told_to(pool):
    first, second = pool.run(trained, "fsdp", {"broadcast_buffers": False})
    assert first[2][0] != second[2][0]


class Scaled(torch.nn.Module):
    """A model whose backward needs a buffer that its next forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.linear(inputs) * self.scale).tanh()


def called_twice() -> float:
    accel = accelerator("fsdp")
    model: Any = accel.prepare(Scaled())
    first, second = model(batch_of(accel)), model(batch_of(accel, 1))
    accel.backward((first - second).square().mean())
    return model.scale.item()


def test_two_forwards_before_one_backward_train(pool):
    assert pool.run(called_twice) == [1.0, 1.0]


def called_by_a_method() -> list[float]:
    accel = accelerator("fsdp")
    model: Any = accel.prepare(Counted(), forward_methods=["score"])
    accel.backward(model(batch_of(accel)).mean())
    with torch.no_grad():
        model.eval().score(torch.ones(2, 5))
    return model.norm.running_mean.tolist()


def test_a_forward_method_finds_the_buffers_of_rank_0(pool):
    first, second = pool.run(called_by_a_method)
    assert first == second


class Positions(torch.nn.Module):
    """A model with a buffer that is as long as sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(16.0).view(1, 16, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.table


def parts_of_a_table(layout: str) -> list[float]:
    accel = accelerator(layout, parallelism_config=ParallelismConfig(cp_size=2))
    model: Any = accel.prepare(Positions())
    table, inputs = accel.unwrap_model(model).table, torch.ones(1, 16, 4)
    with accel.maybe_context_parallel([inputs, table], [1, 1], {inputs}):
        model(inputs)
        return table.flatten().tolist()


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_ranks_that_share_sequences_keep_their_parts_of_a_buffer(pool, layout):
    first, second = pool.run(parts_of_a_table, layout)
    assert sorted(first + second) == list(range(16))


# --- parameters that are used on some ranks -------------------------------------------------------


class Heads(torch.nn.Module):
    """A model of which a batch uses the heads that it names; `spare` is used by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(5, 6)
        self.a = torch.nn.Linear(6, 6)
        self.b = torch.nn.Linear(6, 6)
        self.spare = torch.nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor, heads: str) -> torch.Tensor:
        hidden = self.body(inputs).tanh()
        return sum(getattr(self, head)(hidden) for head in heads)


UNUSED = {"find_unused_parameters": True}


def trained_heads(
    layout: str,
    used: list[list[str]],
    handler: Any = None,
    window: int = 1,
    timeout: timedelta = BOUND,
) -> Any:
    """Train with the heads that each rank uses in each step; return weights and who has states."""
    accel = accelerator(layout, handler, timeout=timeout, gradient_accumulation_steps=window)
    model: Any = Heads()
    # Weight decay moves a weight whose gradient is zero, and not one that has none.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    model, optimizer = accel.prepare(model, optimizer)
    for number, heads in enumerate(used):
        with accel.accumulate(model):
            own = heads[accel.process_index % len(heads)]
            accel.backward(model(batch_of(accel, number), own).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    inner = accel.unwrap_model(model)
    return {name: whole(weight).tolist() for name, weight in inner.named_parameters()}


STEPS = [["a", "b"], ["ab", "b"], ["a", "a"], ["b", "a"], ["ab", "ab"], ["b", "b"]]


@pytest.mark.parametrize("window", [1, 2])
def test_shards_average_absent_gradients_as_zeros_as_ddp_does(pool, window):
    first, second = pool.run(trained_heads, "fsdp", STEPS, UNUSED, window)
    expected = pool.run(trained_heads, "ddp", STEPS, UNUSED, window)[0]
    assert first == second
    assert_reordered(first, expected)
    assert first["spare.bias"] == Heads().spare.bias.tolist()  # that no rank has used


@pytest.mark.parametrize("window", [1, 2])
def test_replicas_of_shards_average_absent_gradients_as_ddp_does(pool_of_4, window):
    results = pool_of_4.run(trained_heads, "hsdp", STEPS, UNUSED, window)
    assert_reordered(results[3], pool_of_4.run(trained_heads, "ddp", STEPS, UNUSED, window)[0])


@pytest.mark.parametrize(
    ("steps", "name", "has", "lacks"),
    [
        ([["a", "b"]], "a.weight", 0, 1),
        ([["ab", "a"]], "b.weight", 0, 1),
        ([["a", "a"], ["b", "ab"]], "a.weight", 1, 0),
    ],
)
def test_ranks_that_use_other_parameters_are_told_which(pool, steps, name, has, lacks):
    for kind, text in pool.outcomes(trained_heads, "fsdp", steps):
        assert kind == "RuntimeError"
        assert f"{name!r} has a gradient on rank {has} and none on rank {lacks}" in text
        assert "find_unused_parameters=True" in text


def test_one_rank_that_changes_what_it_uses_says_so_before_the_timeout(fresh_pool):
    steps = [["a"], ["a"], ["a", "ab"]]
    timeout = timedelta(seconds=patience(20))
    (one, text), (other, cause) = fresh_pool.outcomes(
        trained_heads, "fsdp", steps, None, 1, timeout
    )
    assert (one, other) == ("RemoteError", "RuntimeError")
    told = "'b.weight' has a gradient on rank 1, where it had none before"
    assert told in text
    assert told in cause


def test_ranks_that_use_the_same_parameters_may_change_them(pool):
    alike = [["a"], ["b"], ["a"], ["ab"], ["ab"]]
    first, second = pool.run(trained_heads, "fsdp", alike)
    assert first == second
    assert_reordered(first, pool.run(trained_heads, "ddp", alike, UNUSED)[0])


class Experts(torch.nn.Module):
    """A model whose blocks, which FSDP gathers one by one, are called as they are named."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 6)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(3)
        )

    def forward(self, inputs: torch.Tensor, called: str, used: str = "") -> torch.Tensor:
        hidden = self.first(inputs)
        outputs = {name: self.experts[int(name)](hidden) for name in called}
        return hidden + sum(outputs[name] for name in used or called)


def trained_experts(layout: str, steps: list[list[Any]], plugin: Any = None) -> Any:
    """Train with the experts that each rank calls and uses in each step."""
    accel = accelerator(layout, UNUSED if layout == "ddp" else None, plugin)
    model: Any = Experts()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, experts in enumerate(steps):
        called = experts[accel.process_index % len(experts)]
        accel.backward(model(batch_of(accel, number), *called).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    inner = accel.unwrap_model(model)
    return {name: whole(weight).tolist() for name, weight in inner.named_parameters()}


ROUTED = [[["0"], ["1"]], [["2"], ["02"]], [["012"]]]


@pytest.mark.parametrize(
    ("steps", "texts"),
    [
        (ROUTED, ["rank 0 came to the forward of 'experts.0', and rank 1 ", "'experts.1'"]),
        ([[["01"], ["0"]]], ["rank 0 came to the forward of 'experts.1', and rank 1 "]),
        ([[["01", "0"], ["01", "1"]]], ["the backward of 'experts.0'", "of 'experts.1'"]),
        ([[["01", "01"], ["01", "1"]]], ["the backward of 'experts.0'"]),
    ],
)
def test_ranks_that_call_other_units_are_told_which(pool, steps, texts):
    for kind, text in pool.outcomes(trained_experts, "fsdp", steps):
        assert kind == "RuntimeError"
        assert all(part in text for part in texts)
        assert "ignored_modules" in text


def test_experts_that_are_kept_whole_are_averaged_as_ddp_does(pool):
    results = pool.run(trained_experts, "fsdp", ROUTED, {"ignored_modules": "experts"})
    assert_reordered(results[1], pool.run(trained_experts, "ddp", ROUTED)[0])


def test_ranks_may_skip_the_same_units(pool):
    steps = [[["0"]], [["12"]], [["012"]], [["1"]]]
    results = pool.run(trained_experts, "fsdp", steps)
    assert_reordered(results[1], pool.run(trained_experts, "ddp", steps)[0])


class Loops(torch.nn.Module):
    """A model that computes its block twice, and again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 6)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in (*self.blocks, self.blocks[1]):
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden


def rounds_of(loop: str) -> list[int]:
    """Count how often ranks have compared what they do, after each pass of a loop."""
    accel = accelerator("fsdp")
    model, critic = accel.prepare(Loops(), torch.nn.Linear(6, 1))
    rounds = []
    for number in range(4):
        inputs = batch_of(accel, number)
        if loop == "GAN":
            accel.backward(critic(model(inputs).detach()).mean())
            critic.requires_grad_(False)
        accel.backward(critic(model(inputs)).mean())
        critic.requires_grad_(True)
        if loop == "rollout":
            with torch.no_grad():
                model(model(inputs)[:, :5])
        rounds.append(accel.strategy.gradients._units._rounds)
    return rounds


@pytest.mark.parametrize("loop", ["plain", "GAN", "rollout"])
def test_a_loop_that_repeats_itself_compares_nothing_from_its_third_pass_on(pool, loop):
    first, second = pool.run(rounds_of, loop)
    assert first == second
    assert first[0] > 0
    assert first[1] == first[3]
