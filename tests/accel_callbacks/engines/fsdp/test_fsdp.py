"""Sharded models on two real processes: any order of prepare, windows, options, refusals."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_callbacks import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    LocalSGD,
    TorchDynamoPlugin,
)
from accel_callbacks.callbacks import EMA, Freeze, GradientNorm, NonFinite, summarize
from accel_callbacks.gradients import local_part
from accel_callbacks.tuning import find_batch_size, find_learning_rate
from tests.support.rounding import ABSOLUTE, reordered
from tests.support.sharded import Block, Network, accelerator, data, flat, loader, whole

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

Plugin = FullyShardedDataParallelPlugin


def step(accel: Any, model: Any, optimizer: Any, inputs: Any, targets: Any) -> None:
    accel.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()


def batch(accel: Any, number: int = 0, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a global batch."""
    inputs, targets = (t[number * size : (number + 1) * size] for t in data(64).tensors)
    share = size // accel.num_processes
    part = slice(accel.process_index * share, (accel.process_index + 1) * share)
    return inputs[part], targets[part]


# --- any order of prepare -----------------------------------------------------------------------


def weights_of_order(order: str, kind: str = "AdamW", layout: str = "fsdp") -> list[float]:
    accel = accelerator(layout)
    model = Network()
    kinds = {"AdamW": (torch.optim.AdamW, {}), "SGD": (torch.optim.SGD, {"momentum": 0.9})}
    make, options = kinds[kind]
    optimizer = make(model.parameters(), lr=0.01, **options)
    if order == "trained before":  # which gives the optimizer a state
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    if order == "optimizer first":
        optimizer = accel.prepare(optimizer)
        model = accel.prepare(model)
    elif order == "optimizer later":
        model = accel.prepare(model)
        optimizer = accel.prepare(optimizer)
    elif order == "made later":
        model = accel.prepare(model)
        optimizer = accel.prepare(make(model.parameters(), lr=0.01, **options))
    else:
        optimizer, model = accel.prepare(optimizer, model)
    for number in range(3):
        step(accel, model, optimizer, *batch(accel, number))
    return flat(accel.unwrap_model(model))


@pytest.mark.first
@pytest.mark.parametrize("order", ["together", "optimizer first", "optimizer later", "made later"])
def test_an_optimizer_trains_the_shards_whenever_it_is_prepared(pool, order):
    expected = weights_of_order("together", layout="ddp")
    for weights in pool.run(weights_of_order, order):
        assert weights == reordered(expected)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_state_from_before_prepare_is_sharded_and_used(pool, kind):
    expected = weights_of_order("trained before", kind, layout="ddp")
    for weights in pool.run(weights_of_order, "trained before", kind):
        assert weights == reordered(expected)


class Remembers(torch.optim.SGD):
    """An optimizer with references of its own, as many published ones have."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(list(parameters), lr=lr)
        held = self.param_groups[0]["params"]
        self.listed = [list(held)]
        self.scales = {parameter: index for index, parameter in enumerate(held)}

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.listed[0]:
                assert parameter in self.scales
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


def train_with_references(layout: str = "fsdp") -> list[float]:
    accel, model = accelerator(layout), Network()
    model, optimizer = accel.prepare(model, Remembers(model.parameters(), 0.1))
    step(accel, model, optimizer, *batch(accel))
    return flat(accel.unwrap_model(model))


def test_lists_and_dicts_of_an_optimizer_get_the_shards_too(pool):
    expected = train_with_references("ddp")
    for weights in pool.run(train_with_references):
        assert weights == reordered(expected)


def stale_optimizer() -> None:
    accel = accelerator()
    model = accel.prepare(Network())
    optimizer = accel.prepare(torch.optim.SGD(Network().parameters(), lr=0.1))
    step(accel, model, optimizer, *batch(accel))


def test_an_optimizer_of_another_copy_of_the_model_is_an_error(pool):
    for kind, text in pool.outcomes(stale_optimizer):
        assert kind == "RuntimeError"
        assert "holds no parameter of a sharded model" in text


def several_models(layout: str = "fsdp") -> list[float]:
    accel, first, second = accelerator(layout), Network(1), Network(2)
    one = torch.optim.AdamW(first.parameters(), lr=0.01)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)
    first, second, one, both = accel.prepare(first, second, one, both)
    for number in range(2):
        inputs, targets = batch(accel, number)
        accel.backward(torch.nn.functional.mse_loss(first(inputs) + second(inputs), targets))
        both.step()
        one.step()
        both.zero_grad()
    return flat(accel.unwrap_model(first), accel.unwrap_model(second))


def test_several_models_and_optimizers_train_together(pool):
    expected = several_models("ddp")
    for weights in pool.run(several_models):
        assert weights == reordered(expected)


def sharded_by_hand(layout: str = "fsdp", loaded: bool = False) -> list[float]:
    accel, model = accelerator(layout), Network()
    if layout == "fsdp":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        for module in model.modules() if loaded else ():
            for name, old in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(old.detach().clone()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = accel.prepare(model, optimizer)
    step(accel, *first, *batch(accel))
    # Another Accelerator in the same process takes what this one has prepared.
    other = accelerator(layout)
    second = other.prepare(*first)
    step(other, *second, *batch(other, 1))
    return flat(other.unwrap_model(second[0]))


@pytest.mark.parametrize("loaded", [False, True])
def test_a_model_that_is_sharded_already_is_taken_as_it_is(pool, loaded):
    """With the parameters that were cut, or with those that a load has put in their places."""
    expected = sharded_by_hand("ddp")
    for weights in pool.run(sharded_by_hand, "fsdp", loaded):
        assert weights == reordered(expected)


def freed() -> tuple[int, float]:
    accel, model = accelerator(), Network()
    kept = list(model.parameters())
    optimizer = torch.optim.SGD(kept, lr=0.1)
    model = accel.prepare(model)
    elements = sum(parameter.numel() for parameter in kept)
    accel.prepare(optimizer)
    accel.backward(model(batch(accel)[0]).sum())
    by_old = accel.clip_grad_norm_(kept, 1e9)
    by_new = accel.clip_grad_norm_(model.parameters(), 1e9)
    assert type(by_old) is torch.Tensor
    return elements, float(by_old - by_new)


def test_old_parameters_hold_no_weights_and_still_name_their_shards(pool):
    for elements, difference in pool.run(freed):
        assert elements == 0
        assert difference == 0


def unseeded() -> list[float]:
    accel = accelerator()
    return flat(accel.prepare(Network(seed=accel.process_index)))


def test_all_ranks_take_the_weights_of_rank_0(pool):
    expected = flat(Network(seed=0))
    assert pool.run(unseeded) == [expected, expected]


# --- gradients of windows -----------------------------------------------------------------------


def abandoned(plugin: Any, layout: str = "fsdp") -> tuple[list[float], bool]:
    """Leave a window with huge gradients, and train a whole one."""
    accel = accelerator(layout, plugin, gradient_accumulation_steps=4)
    model = Network()
    model, optimizer, batches = accel.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader(accel, 32)
    )
    held = False
    for rounds, scale in enumerate((1000, 1)):
        for number, (inputs, targets) in enumerate(batches):
            with accel.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accel.backward(loss * scale)
                optimizer.step()
                optimizer.zero_grad()
            if rounds == 0 and number == 1:
                held = accel.strategy.gradients.has_gradients(optimizer.optimizer)
                break
    return flat(accel.unwrap_model(model)), held


@pytest.mark.parametrize("no_sync", [False, True])
def test_gradients_of_an_abandoned_window_do_not_reach_the_next(pool, no_sync):
    expected, _ = abandoned(None, "ddp")
    for weights, held in pool.run(abandoned, Plugin(no_sync=no_sync)):
        assert held
        assert weights == reordered(expected)


def test_nor_do_those_that_replicas_have_not_exchanged(pool_of_4):
    expected, _ = abandoned(None, "ddp")
    for weights, held in pool_of_4.run(abandoned, None, "hsdp"):
        assert held
        assert weights == reordered(expected)


def reduced_in_between(plugin: Any, layout: str, interrupt: bool) -> tuple[int, list[float]]:
    """Bring the gradients of an open window into ``.grad``, as a save does."""
    accel = accelerator(layout, plugin, gradient_accumulation_steps=4)
    model = Network()
    model, optimizer, batches = accel.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader(accel, 32)
    )
    there = 0
    for number, (inputs, targets) in enumerate(batches):
        with accel.accumulate(model):
            accel.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            if number == 1 and interrupt:
                accel.strategy.gradients.reduce_gradients()
                shared, _ = accel.training_state.capture()
                there = len(shared["window"]["gradients"])
            optimizer.zero_grad()
    return there, flat(accel.unwrap_model(model))


@pytest.mark.parametrize("no_sync", [False, True])
def test_a_save_inside_of_a_window_has_its_gradients(pool, no_sync):
    expected = reduced_in_between(None, "ddp", False)[1]
    for there, weights in pool.run(reduced_in_between, Plugin(no_sync=no_sync), "fsdp", True):
        assert there == len(list(Network().parameters()))
        assert weights == reordered(expected)


def test_and_those_that_replicas_have_not_exchanged(pool_of_4):
    expected = reduced_in_between(None, "ddp", False)[1]
    for there, weights in pool_of_4.run(reduced_in_between, None, "hsdp", True):
        assert there == len(list(Network().parameters()))
        assert weights == reordered(expected)


def left_by_a_load(path: str) -> list[bool]:
    """Load inside of a window; whether there are gradients before and after it."""
    accel = accelerator("fsdp", Plugin(no_sync=True), gradient_accumulation_steps=2)
    model = Network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accel.save_state(path)
    with accel.accumulate(model):
        accel.backward(model(batch(accel)[0]).sum())
    seen = [accel.strategy.gradients.has_gradients(optimizer.optimizer)]
    accel.load_state(path)
    return [*seen, accel.strategy.gradients.has_gradients(optimizer.optimizer)]


def test_a_load_leaves_no_gradients_of_the_window_before(pool, tmp_path):
    assert pool.run(left_by_a_load, str(tmp_path / "c")) == [[True, False]] * 2


def mixed_losses() -> None:
    accel = accelerator("fsdp", Plugin(no_sync=True), gradient_accumulation_steps=2)
    model = Network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for normalizer in (None, 4):
        with accel.accumulate(model):
            accel.backward(model(batch(accel)[0]).sum(), normalizer=normalizer)
            optimizer.step()


def test_losses_with_and_without_a_normalizer_are_found_in_one_window(pool):
    for kind, text in pool.outcomes(mixed_losses):
        assert kind == "ValueError"
        assert "a window has losses with a normalizer and without" in text


def accumulated_by_hand(layout: str = "fsdp") -> tuple[list[bool], list[float]]:
    accel, model = accelerator(layout), Network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    with accel.no_sync(model):
        first = model(batch(accel, 0)[0]).square().sum()
        second = model(batch(accel, 1)[0]).square().sum()
        with accel.trigger_sync_in_backward(model):
            accel.backward(first + second)
        seen.append(all(p.grad is not None for p in model.parameters()))
        accel.backward(model(batch(accel, 2)[0]).square().sum())
    accel.backward(model(batch(accel, 3)[0]).square().sum())
    seen.append(accel.strategy.gradients.has_gradients(optimizer.optimizer))
    optimizer.step()
    optimizer.zero_grad()
    seen.append(accel.strategy.gradients.has_gradients(optimizer.optimizer))
    return seen, flat(accel.unwrap_model(model))


def test_no_sync_and_trigger_sync_add_up_to_the_same_gradients(pool):
    model = Network()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for number in range(4):
        inputs = data(64).tensors[0][number * 8 : number * 8 + 8]
        (model(inputs).square().sum() / 2).backward()
    expected = torch.cat([(p - 0.1 * p.grad).flatten() for p in model.parameters()]).tolist()
    for seen, weights in pool.run(accumulated_by_hand):
        assert seen == [True, True, False]
        assert weights == reordered(expected)


def by_tokens(layout: str = "fsdp") -> tuple[list[float], float]:
    accel = accelerator(layout, gradient_accumulation_steps=2)
    model = Network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(2):
        with accel.accumulate(model):
            inputs, targets = batch(accel, number)
            loss = torch.nn.functional.mse_loss(model(inputs), targets, reduction="sum")
            accel.backward(loss, normalizer=len(inputs))
            norm = accel.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return flat(accel.unwrap_model(model)), float(norm)


def test_a_normalizer_counts_over_all_ranks(pool):
    expected, norm = by_tokens("ddp")
    for weights, found in pool.run(by_tokens):
        assert found == reordered(norm)
        assert weights == reordered(expected)


# --- clipping -----------------------------------------------------------------------------------


def clipped(norm_type: float, by_value: bool, layout: str, ignored: Any) -> tuple[Any, list[float]]:
    accel = accelerator(layout, Plugin(ignored_modules=ignored))
    model = Network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accel.backward(model(batch(accel)[0]).square().mean())
    norm = None
    if by_value:
        accel.clip_grad_value_(model.parameters(), 0.01)
    else:
        norm = accel.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        assert type(norm) is torch.Tensor
        norm = float(norm)
    optimizer.step()
    return norm, flat(accel.unwrap_model(model))


@pytest.mark.first
@pytest.mark.parametrize("ignored", [None, ["last"]], ids=["all sharded", "some whole"])
@pytest.mark.parametrize(
    ("norm_type", "by_value"), [(2.0, False), (1.0, False), (float("inf"), False), (2.0, True)]
)
def test_clipping_is_that_of_one_process(pool, norm_type, by_value, ignored):
    norm, expected = clipped(norm_type, by_value, "ddp", None)
    for found, weights in pool.run(clipped, norm_type, by_value, "fsdp", ignored):
        assert by_value or found == reordered(norm)
        assert weights == reordered(expected)


def test_clipping_over_replicas_and_empty_shards(pool_of_4):
    for norm_type in (2.0, float("inf")):
        norm, expected = clipped(norm_type, False, "ddp", None)
        for layout in ("fsdp", "hsdp"):
            for found, weights in pool_of_4.run(clipped, norm_type, False, layout, ["last"]):
                assert found == reordered(norm)
                assert weights == reordered(expected)


# --- options ------------------------------------------------------------------------------------


def trained_with(layout: str, options: dict[str, Any], precision: str = "no") -> list[float]:
    scale = [GradScalerKwargs(init_scale=256.0)]  # without an overflow at first
    accel = accelerator(layout, Plugin(**options), mixed_precision=precision, kwargs_handlers=scale)
    model = Network()
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4))
    for number in range(3):
        step(accel, model, optimizer, *batch(accel, number))
    return flat(accel.unwrap_model(model))


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": "HYBRID_SHARD"},
        {"cpu_offload": True},
        {"ignored_modules": ["first", "blocks.1"]},
        {"ignored_modules": r".*norm"},
        {"auto_wrap_policy": "NO_WRAP"},
        {"min_num_params": 900},
        {"transformer_cls_names_to_wrap": ["Block", "LayerNorm"]},
        {"forward_prefetch": True},
        {"no_sync": True},
    ],
    ids=str,
)
def test_options_do_not_change_what_is_trained(pool, options):
    expected = trained_with("ddp", {})
    for weights in pool.run(trained_with, "fsdp", options):
        assert weights == reordered(expected)


def test_a_number_of_ranks_to_reshard_to(pool_of_4):
    expected = trained_with("ddp", {})
    for weights in pool_of_4.run(trained_with, "fsdp", {"reshard_after_forward": 2}):
        assert weights == reordered(expected)


def test_whole_parameters_train_with_the_loss_scaler(pool):
    expected = trained_with("ddp", {}, "fp16")
    for weights in pool.run(trained_with, "fsdp", {"ignored_modules": ["last"]}, "fp16"):
        assert weights == pytest.approx(expected, abs=2e-3)


def overflow(ignored: Any) -> tuple[list[bool], bool, float]:
    scale = [GradScalerKwargs(init_scale=256.0)]
    plugin = Plugin(ignored_modules=ignored)
    accel = accelerator("fsdp", plugin, mixed_precision="fp16", kwargs_handlers=scale)
    model = Network()
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    skipped = []
    for number in range(3):
        loss = model(batch(accel, number)[0]).square().mean()
        if number == 1 and accel.process_index == 1:
            loss = loss * float("inf")
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    finite = all(p.isfinite().all() for p in map(whole, model.parameters()))
    return skipped, bool(finite), accel.scaler.get_scale()


@pytest.mark.parametrize("ignored", [None, ["last"]], ids=["all sharded", "some whole"])
def test_an_overflow_on_one_rank_is_skipped_by_all(pool, ignored):
    for found in pool.run(overflow, ignored):
        assert found == ([False, True, False], True, 128.0)


class Scaled(Network):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def scalar(layout: str = "fsdp") -> list[float]:
    accel, model = accelerator(layout), Scaled()
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    for number in range(3):
        step(accel, model, optimizer, *batch(accel, number))
    return flat(accel.unwrap_model(model))


def test_scalar_parameters_stay_whole_and_are_averaged(pool):
    expected = scalar("ddp")
    for weights in pool.run(scalar):
        assert weights == reordered(expected)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, WIDTH_OF_TIED)
        self.blocks = torch.nn.ModuleList(Small() for _ in range(2))
        self.norm = torch.nn.LayerNorm(WIDTH_OF_TIED)
        self.head = torch.nn.Linear(WIDTH_OF_TIED, 11, bias=False)
        self.head.weight = self.embed.weight
        self.bias = torch.nn.Parameter(torch.zeros(11))

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + self.bias

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        """Uses weights without the forward, and the forward too."""
        bias = self.bias.sum().long()
        for _ in range(2):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens + 0 * bias


WIDTH_OF_TIED = 6


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH_OF_TIED, WIDTH_OF_TIED)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def tied(layout: str, untie: bool) -> tuple[bool, list[float], list]:
    accel, model = accelerator(layout), Tied()
    if untie:
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    tokens = torch.arange(8).view(4, 2)[accel.process_index :: accel.num_processes]
    for _ in range(2):
        logits = model(tokens).flatten(0, 1)
        accel.backward(torch.nn.functional.cross_entropy(logits, tokens.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    bare = accel.unwrap_model(model)
    generated = [model.generate(torch.arange(4).view(2, 2)).tolist() for _ in range(2)]
    bare = accel.unwrap_model(model)
    return bare.embed.weight is bare.head.weight, flat(bare), generated


@pytest.mark.parametrize("untie", [False, True], ids=["tied", "not tied"])
def test_tied_weights_stay_tied_and_generate_gathers(pool, untie):
    _, expected, tokens = tied("ddp", untie)
    for is_tied, weights, generated in pool.run(tied, "fsdp", untie):
        assert is_tied is not untie
        assert weights == reordered(expected)
        assert generated == tokens


def other_method(layout: str = "fsdp") -> list[float]:
    accel, model = accelerator(layout), Network()
    model = accel.prepare(model, forward_methods=["score"])
    optimizer = accel.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(2):
        accel.backward(model.score(batch(accel, number)[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return flat(accel.unwrap_model(model))


def test_a_marked_method_gathers_and_averages(pool):
    expected = other_method("ddp")
    for weights in pool.run(other_method):
        assert weights == reordered(expected)


def low_precision() -> dict[str, Any]:
    accel = accelerator(mixed_precision="bf16")
    model = Network().bfloat16()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    seen = []
    model.blocks[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    output = model(batch(accel)[0])
    accel.backward(output.square().mean())
    optimizer.step()
    return {
        "dtypes": sorted({(str(p.dtype), p.requires_grad) for p in model.parameters()}),
        "inside": str(seen[0]),
        "output": str(output.dtype),
        "frozen": all(
            torch.equal(whole(p), before[n])
            for n, p in model.named_parameters()
            if not p.requires_grad
        ),
        "trained": all(
            not torch.equal(whole(p), before[n].float())
            for n, p in model.named_parameters()
            if "norm.bias" in n
        ),
    }


def test_trained_weights_are_float32_and_frozen_ones_are_not(pool, capfd):
    for found in pool.run(low_precision):
        assert found == {
            "dtypes": [("torch.bfloat16", False), ("torch.float32", True)],
            "inside": "torch.bfloat16",
            "output": "torch.float32",
            "frozen": True,
            "trained": True,
        }


def read_and_write() -> tuple[bool, bool, list[float]]:
    accel = accelerator(mixed_precision="bf16")
    model = accel.prepare(Network())
    expected = Network()
    with torch.no_grad():
        model(batch(accel)[0])
    with accel.full_parameters(model, writeback=True):
        named = dict(model.named_parameters())
        same = all(torch.equal(named[n], p) for n, p in expected.named_parameters())
        if accel.is_main_process:
            named["first.weight"].data.fill_(2.0)
    with accel.full_parameters(model.blocks[1]):
        model.blocks[1].linear.weight.data.fill_(7.0)  # not written back
    with torch.no_grad():
        model(batch(accel)[0])
    bare = accel.unwrap_model(model)
    sharded = all(hasattr(p, "device_mesh") for p in bare.parameters())
    return same, sharded, flat(bare)


def test_whole_parameters_can_be_read_and_written_back(pool):
    expected = Network()
    expected.first.weight.data.fill_(2.0)
    for same, sharded, weights in pool.run(read_and_write):
        assert same
        assert sharded
        assert weights == flat(expected)


# --- memory -------------------------------------------------------------------------------------


def held_elements(blocks: int) -> dict[str, Any]:
    accel = accelerator()
    model = Network(blocks=blocks)
    total = sum(p.numel() for p in model.parameters())
    rows = sum(p[0].numel() if p.dim() > 1 else 1 for p in model.parameters())
    largest = max(sum(p.numel() for p in b.parameters()) for b in model.blocks)
    around = sum(p.numel() for p in (*model.first.parameters(), *model.last.parameters()))
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    inside = []

    def count(*_: Any) -> None:
        inside.append(
            sum(
                p.untyped_storage().nbytes() // 4
                for m in model.modules()
                for p in m._parameters.values()
                if p is not None and not hasattr(p, "device_mesh")
            )
        )

    for block in model.blocks:
        block.register_forward_hook(count)
        block.register_full_backward_hook(count)
    for number in range(2):
        accel.backward(model(batch(accel, number)[0]).square().mean())
        gradients = sum(local_part(p.grad).numel() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    states = [local_part(v) for s in optimizer.state.values() for v in s.values() if v.dim()]
    return {
        "bound": total // accel.num_processes + rows,
        "parameters": sum(local_part(p).numel() for p in model.parameters()),
        "gradients": gradients,
        "optimizer": sum(one.numel() for one in states) / 2,
        "unsharded": max(inside),
        "unsharded bound": 2 * largest + around,
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_its_part_and_two_units_at_most(request, ranks):
    processes = request.getfixturevalue("pool" if ranks == 2 else "pool_of_4")
    for found in processes.run(held_elements, 6):
        for name in ("parameters", "gradients", "optimizer"):
            assert 0 < found[name] <= found["bound"]
        assert 0 < found["unsharded"] <= found["unsharded bound"]


def freed_models() -> list[bool]:
    accel, model = accelerator(), Network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(accel, model, optimizer, *batch(accel))
    left = [weakref.ref(one) for one in (model, optimizer.optimizer, model.first.weight)]
    del model, optimizer
    accel.free_memory()
    gc.collect()
    return [one() is not None for one in left]


def test_free_memory_frees_sharded_models(pool):
    assert pool.run(freed_models) == [[False, False, False]] * 2


# --- evaluation, callbacks ----------------------------------------------------------------------


def after_an_evaluation(options: dict[str, Any]) -> tuple[bool, list[str], list[float]]:
    accel = accelerator("fsdp", Plugin(**options))
    model = Network()
    model, optimizer = accel.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for number in range(2):
        step(accel, model, optimizer, *batch(accel, number))
        with accel.evaluate(model):
            model(batch(accel)[0])
        model(batch(accel)[0])  # and one whose backward never comes
        sharded = all(hasattr(p, "device_mesh") for p in accel.unwrap_model(model).parameters())
    shared, _ = accel.training_state.capture()
    return sharded, sorted(shared["optimizers"]["0"]["state"]), flat(accel.unwrap_model(model))


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_an_evaluation_leaves_the_shards_as_parameters(pool, options):
    names = sorted(f"0.{name}" for name, _ in Network().named_parameters())
    for sharded, saved, _ in pool.run(after_an_evaluation, options):
        assert sharded
        assert saved == names


def evaluated(samples: int) -> list[int]:
    accel = accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    model, batches = accel.prepare(Network(), torch.utils.data.DataLoader(data(samples), 2))
    with accel.evaluate(model):
        outputs = [accel.gather_for_metrics(model(inputs)) for inputs, _ in batches]
    return [len(one) for one in outputs]


@pytest.mark.parametrize("samples", [4, 5, 6, 7])
def test_uneven_batches_call_the_model_equally_often_on_all_ranks(pool, samples):
    for sizes in pool.run(evaluated, samples):
        assert sum(sizes) == samples


def refused(what: str) -> None:
    accel, model = accelerator(), Network()
    if what == "LBFGS":
        accel.prepare(model, torch.optim.LBFGS(model.parameters()))
        return
    model = accel.prepare(model)
    if what == "LocalSGD":
        with LocalSGD(accel, model, 2):
            pass
    if what == "join":
        with accel.join_uneven_inputs([model]):
            pass
    if what == "shared":
        other = Network()
        other.first = model.first
        accel.prepare(other)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("LBFGS", "LBFGS does not work with sharded models"),
        ("LocalSGD", "LocalSGD does not work with sharded models"),
        ("join", "join_uneven_inputs does not work with sharded models"),
        ("shared", "'first.weight' is a DTensor"),
    ],
)
def test_what_cannot_be_right_is_refused(pool, what, sentence):
    for kind, text in pool.outcomes(refused, what):
        assert kind == "ValueError"
        assert sentence in text


def with_callbacks(layout: str = "fsdp") -> dict[str, Any]:
    freeze = Freeze({"blocks.0.*": 2})
    ema = EMA(0.5)
    accel = accelerator(layout, callbacks=[GradientNorm(per_layer=1), freeze, ema, NonFinite()])
    model = Network()
    model, optimizer, batches = accel.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader(accel, 32)
    )
    norms = []
    frozen = []
    with accel.run("r"):
        for inputs, targets in batches:
            with accel.accumulate(model):
                step(accel, model, optimizer, inputs, targets)
            norms.append(float(accel.current_run.callback_metrics["grad_norm"]))
            frozen.append(flat(accel.unwrap_model(model).blocks[0])[:3])
        summary = summarize(accel.unwrap_model(model))
        state = ema.state_dict()["average"]
    averages = torch.cat([whole(state[name]).flatten() for name in sorted(state)])
    return {
        "norms": norms,
        "frozen": frozen,
        "averages": averages.tolist(),
        "kinds": [layer.kind for layer in summary.layers],
        "parameters": summary.layers[0].parameters,
        "key": Freeze({model.blocks[0] if layout == "fsdp" else Block(): 1}).state_key,
        "weights": flat(accel.unwrap_model(model)),
    }


@pytest.mark.first
def test_callbacks_see_what_they_see_on_one_process(pool):
    expected = with_callbacks("ddp")
    for found in pool.run(with_callbacks):
        for name in ("kinds", "parameters", "key"):
            assert found[name] == expected[name]
        for name in ("norms", "averages", "weights"):
            assert found[name] == reordered(expected[name])
        for mine, theirs in zip(found["frozen"], expected["frozen"], strict=True):
            assert mine == reordered(theirs)


def unfrozen(precision: str, layout: str = "fsdp") -> tuple[set[str], list[float]]:
    accel, model = accelerator(layout, mixed_precision=precision), Network()
    model.blocks.requires_grad_(False)
    model.blocks[0].linear.requires_grad_(True)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(3):
        if number == 1:
            model.blocks.requires_grad_(True)
        inputs, targets = batch(accel, number)
        accel.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        dtypes = {str(p.grad.dtype) for p in model.parameters()} if number else set()
        optimizer.step()
        optimizer.zero_grad()
    return dtypes, flat(accel.unwrap_model(model))


@pytest.mark.parametrize(("precision", "tolerance"), [("no", ABSOLUTE), ("bf16", 3e-2)])
def test_units_that_were_all_frozen_train_once_they_are_not(pool, precision, tolerance):
    # On one process, where it may be unfrozen too.
    _, expected = unfrozen(precision, "ddp")
    for dtypes, weights in pool.run(unfrozen, precision):
        assert dtypes == {"torch.float32"}
        assert weights == pytest.approx(expected, abs=tolerance)


def found_rate() -> tuple[int, bool, list[float]]:
    accel, model = accelerator(), Network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accel.evaluate(model):
        model(batch(accel)[0])  # which leaves whole parameters behind

    def train() -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(batch(accel)[0]), batch(accel)[1])
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        model(batch(accel)[0])
        return loss.detach()

    found = find_learning_rate(train, optimizer, num_steps=12, restore=[model])
    back = flat(accel.unwrap_model(model))
    train()
    changed = flat(accel.unwrap_model(model)) != back
    sizes = find_batch_size(lambda size: model(torch.ones(size, 7)), max=8, restore=[model])
    assert sizes.largest == 8
    return len(found.losses), changed, back


def test_finders_restore_the_shards(pool):
    expected = flat(Network())
    for steps, changed, back in pool.run(found_rate):
        assert steps == 12
        assert changed
        assert back == expected


class Fails(Network):
    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handles = []
        if self.fails == "forward":
            handles = [self.blocks[1].linear.register_forward_hook(self.fail)]
        try:
            out = super().forward(x)
        finally:
            for handle in handles:
                handle.remove()
        if self.fails == "backward":
            out.register_hook(self.fail)
        return out

    def fail(self, *_: object) -> None:
        raise ArithmeticError(self.fails)


def after_a_failure(where: str, layout: str = "fsdp") -> list[float]:
    accel, model = accelerator(layout, gradient_accumulation_steps=2), Fails()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(6):
        model.fails = where if number == 3 else ""
        try:
            with accel.accumulate(model):
                step(accel, model, optimizer, *batch(accel, number))
        except ArithmeticError:
            pass
    return flat(accel.unwrap_model(model))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_a_step_that_failed(pool, where):
    expected = after_a_failure(where, "ddp")
    for weights in pool.run(after_a_failure, where):
        assert weights == reordered(expected)


def compiled() -> tuple[int, list[float]]:
    import torch._dynamo

    graphs = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    plugin = TorchDynamoPlugin(backend=count, use_regional_compilation=True)
    accel, model = accelerator(dynamo_plugin=plugin), Network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(2):
        step(accel, model, optimizer, *batch(accel, number))
    return len(graphs), flat(accel.unwrap_model(model))


def test_blocks_are_compiled_once_for_all_before_they_are_sharded(pool):
    accel, model = accelerator("ddp"), Network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(2):
        step(accel, model, optimizer, *batch(accel, number))
    for graphs, weights in pool.run(compiled):
        assert graphs == 1
        assert weights == reordered(flat(model))


def kept_after_an_evaluation() -> tuple[int, int]:
    accel = accelerator("fsdp", None)
    model = accel.prepare(Network())
    with accel.evaluate(model):
        model(torch.ones(2, 7))
    parameters = list(model.parameters())
    return sum(hasattr(one, "to_local") for one in parameters), len(parameters)


def test_an_evaluation_leaves_no_whole_parameters(pool):
    for sharded, all_of_them in pool.run(kept_after_an_evaluation):
        assert sharded == all_of_them


# --- parameters of two dtypes ----------------------------------------------------------------


def train_two_dtypes(freezes: bool, ignored: list[str]) -> list[str]:
    plugin = FullyShardedDataParallelPlugin(ignored_modules=ignored)
    accel = accelerator(plugin=plugin)
    low = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    low.requires_grad_(not freezes)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(low))
    net[0].register_forward_hook(lambda module, inputs, output: output.bfloat16())
    model, optimizer = accel.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accel.backward(model(torch.ones(2, 4)).float().sum())
    optimizer.step()
    return [str(parameter.dtype) for parameter in model.parameters()]


def test_trained_parameters_of_two_dtypes_in_a_unit_are_named(pool):
    for kind, text in pool.outcomes(train_two_dtypes, False, []):
        assert kind == "ValueError"
        start = (
            "'0.weight' of Sequential is torch.float32 and '1.0.weight' torch.bfloat16, and FSDP"
        )
        assert text.startswith(start)
        assert "ignored_modules=[...]" in text


@pytest.mark.parametrize(("freezes", "ignored"), [(True, []), (False, ["1"])])
def test_frozen_or_whole_ones_may_have_another_dtype(pool, freezes, ignored):
    for dtypes in pool.run(train_two_dtypes, freezes, ignored):
        assert dtypes == ["torch.float32"] * 2 + ["torch.bfloat16"] * 2
