"""Ranks that use other parameters in a step, or keep other buffers: averaged right, or named."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
)
from tests.distributed.conftest import Pool, make_pool

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two processes."""
    yield from make_pool(2, tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def pool_of_4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four processes."""
    yield from make_pool(4, tmp_path_factory.mktemp("pool"))


def accelerator(layout: str, handler: dict[str, Any] | None = None, **options: Any) -> Accelerator:
    if layout == "hsdp":
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    if layout != "ddp":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    handlers = [DistributedDataParallelKwargs(**handler)] if handler else []
    timeout = timedelta(seconds=20)
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
