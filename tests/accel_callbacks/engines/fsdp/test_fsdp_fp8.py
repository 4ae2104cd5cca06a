"""Weights that FSDP gathers in float8, on two real processes, with products that are emulated."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint_io
from accel_callbacks import (
    AORecipeKwargs,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    init_empty_weights,
    load_checkpoint_in_model,
)
from accel_callbacks.callbacks import EMA, Freeze, GradientNorm, NonFinite
from accel_callbacks.models.fp8.gather import Float8Shard
from tests.support.sharded import accelerator, flat, quiet, whole

float8 = pytest.importorskip("torchao.float8")
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

Plugin = FullyShardedDataParallelPlugin
CONFIG = float8.Float8LinearConfig(emulate=True, pad_inner_dim=True)


class Block(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(32, hidden)
        self.down = torch.nn.Linear(hidden, 32)
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Network(torch.nn.Module):
    """The layers of the blocks are converted; of ``hidden`` rows, for which each rank has half."""

    def __init__(self, hidden: int = 64, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(7, 32)
        self.blocks = torch.nn.ModuleList(Block(hidden) for _ in range(2))
        self.last = torch.nn.Linear(32, 1)
        if tied:
            self.blocks[0].up.weight = self.blocks[0].down.weight = self.blocks[1].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.encode(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def in_block(module: torch.nn.Module, name: str) -> bool:
    return name.startswith("blocks")


def recipe(gather: bool | None = True) -> AORecipeKwargs:
    return AORecipeKwargs(CONFIG, in_block, enable_fsdp_float8_all_gather=gather)


def fp8(
    gather: bool | None = True, layout: str = "fsdp", plugin: Any = None, **options: Any
) -> Any:
    """An Accelerator of fp8; weights are gathered in it, or in their own dtype."""
    quiet()
    options["kwargs_handlers"] = [recipe(gather)]
    return accelerator(layout, plugin, mixed_precision="fp8", **options)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def prepared(gather: bool = True, layout: str = "fsdp", **options: Any) -> Any:
    accel, model = fp8(gather, layout, **options), Network()
    return accel, *accel.prepare(model, adam(model))


def loss_of(accel: Any, model: Any, number: int) -> torch.Tensor:
    """Of this rank's part of a batch of 8."""
    inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(number))
    inputs = inputs.chunk(accel.num_processes)[accel.process_index]
    return torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))


def train(accel: Any, model: Any, optimizer: Any, steps: range = range(3)) -> list[float]:
    seen = []
    for number in steps:
        loss = loss_of(accel, model, number)
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def parts(model: torch.nn.Module) -> list[str]:
    """The parameters that are gathered in float8."""
    return [
        name
        for name, one in model.named_parameters()
        if isinstance(getattr(one, "_local_tensor", one), Float8Shard)
    ]


CONVERTED = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]


# --- the same training, in fewer bytes ----------------------------------------------------------


def trained_by_hand(dtype: torch.dtype | None) -> list[float]:
    accel = fp8()
    config = float8.Float8LinearConfig(
        emulate=True, pad_inner_dim=True, enable_fsdp_float8_all_gather=True
    )
    model, mesh = Network(), init_device_mesh("cpu", (2,))
    float8.convert_to_float8_training(model, module_filter_fn=in_block, config=config)
    inner, outer = (
        MixedPrecisionPolicy(dtype, dtype and torch.float32, output)
        for output in (None, dtype and torch.float32)
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=outer)
    optimizer = adam(model)
    for number in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(accel, lambda x: model(x).float(), number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        float8.precompute_float8_dynamic_scale_for_fsdp(model)
    return flat(model)


def trained(dtype: torch.dtype | None = None) -> tuple[list[float], list[str]]:
    policy = "no" if dtype is None else "bf16"
    accel, model, optimizer = prepared(plugin=Plugin(mixed_precision_policy=policy))
    train(accel, model, optimizer)
    return flat(model), parts(model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_trains_to_the_bit_as_torchao_by_hand(pool, dtype):
    by_hand = pool.run(trained_by_hand, dtype)
    assert pool.run(trained, dtype) == [(weights, CONVERTED) for weights in by_hand]


class Collectives(TorchDispatchMode):
    """Note the bytes that each collective sends from this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if "allgather" in name:
            self.sent.append(("gather", args[1].nbytes))
        elif name == "_c10d_functional::all_reduce":
            self.sent.append(("reduce", args[0].nbytes))
        return func(*args, **(kwargs or {}))


def sent_in_a_step(gather: bool) -> list[tuple[str, int]]:
    accel, model, optimizer = prepared(gather)
    train(accel, model, optimizer)
    with Collectives() as seen:
        train(accel, model, optimizer)
    return seen.sent[: len(seen.sent) // 3]


def test_a_weight_is_one_byte_an_element_and_the_scales_are_one_collective(pool):
    rest = 4 * (16 * 7 + 16 + 32 + 1)  # of the model itself; what has one row is padded to two
    vectors, weights = 4 * (64 + 3 * 32) // 2, 2 * 32 * 64 // 2
    in_float32 = [("gather", rest), *[("gather", vectors + 4 * weights)] * 4]
    assert pool.run(sent_in_a_step, False) == [in_float32] * 2
    in_float8 = [("gather", rest), *[("gather", vectors + weights)] * 4]
    assert pool.run(sent_in_a_step, True) == [[("reduce", 4 * 4), *in_float8]] * 2


OPTIONS: dict[str, dict[str, Any]] = {
    "offloaded": {"plugin": Plugin(cpu_offload=True)},
    "checkpointed": {"plugin": Plugin(activation_checkpointing=True)},
    "one unit": {"plugin": Plugin(auto_wrap_policy="NO_WRAP")},
    "kept": {"plugin": Plugin(reshard_after_forward=False)},
    "window": {"plugin": Plugin(no_sync=True), "gradient_accumulation_steps": 2},
    "compiled": {
        "dynamo_plugin": TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    },
}


def with_options(gather: bool, name: str) -> tuple[list[float], list[float], int]:
    accel, model, optimizer = prepared(gather, **OPTIONS[name])
    seen = []
    for number in range(4):
        with accel.accumulate(model):
            seen += train(accel, model, optimizer, range(number, number + 1))
    return seen, flat(model), len(parts(model))


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.slow) if one == "compiled" else one for one in OPTIONS],
)
def test_with_each_option_it_trains_to_the_bit_as_without_the_cast(pool, name):
    plain = pool.run(with_options, False, name)
    assert pool.run(with_options, True, name) == [(*one[:2], 4) for one in plain]


def on_replicas(gather: bool) -> tuple[list[float], list[float], int]:
    accel, model, optimizer = prepared(gather, "hsdp")
    return train(accel, model, optimizer), flat(model), len(parts(model))


@pytest.mark.slow
def test_replicas_gather_so_too(pool_of_4):
    plain = pool_of_4.run(on_replicas, False)
    assert pool_of_4.run(on_replicas, True) == [(*one[:2], 4) for one in plain]


def cannot(gather: bool, hidden: int, reshard: Any) -> tuple[list[float], list[str], str]:
    accel = fp8(gather, plugin=Plugin(reshard_after_forward=reshard))
    model = Network(hidden)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        model, optimizer = accel.prepare(model, adam(model))
    train(accel, model, optimizer)
    return flat(model), parts(model), told.getvalue()


def test_weights_that_do_not_divide_are_gathered_in_their_own_dtype(pool):
    plain = pool.run(cannot, False, 63, True)
    cast = pool.run(cannot, True, 63, True)
    assert [weights for weights, *_ in cast] == [weights for weights, *_ in plain]
    assert [gathered for _, gathered, _ in cast] == [
        [one for one in CONVERTED if "down" in one]
    ] * 2
    assert "weights of 2 of 4 fp8 layers, such as 'blocks.0.up', are gathered in" in cast[0][2]
    assert [told for *_, told in plain] == ["", ""]


@pytest.mark.slow
def test_and_so_are_those_that_are_kept_on_some_of_the_ranks(pool_of_4):
    plain = pool_of_4.run(cannot, False, 64, 2)
    cast = pool_of_4.run(cannot, True, 64, 2)
    assert [one[:2] for one in cast] == [one[:2] for one in plain]
    assert "weights of 4 of 4 fp8 layers" in cast[0][2]


def tied(gather: bool) -> tuple[bool, list[float], list[str]]:
    accel, model = fp8(gather), Network(32, tied=True)
    model, optimizer = accel.prepare(model, adam(model))
    train(accel, model, optimizer)
    still = model.blocks[0].up.weight is model.blocks[1].up.weight
    return still, flat(model), parts(model)


def test_tied_weights_stay_tied(pool):
    for (still, weights, gathered), (_, expected, _) in zip(
        pool.run(tied, True), pool.run(tied, False), strict=True
    ):
        assert (still, weights) == (True, expected)
        assert gathered == ["blocks.0.up.weight", "blocks.1.down.weight"]


def optimizer_first() -> list[float]:
    accel, model = fp8(), Network()
    optimizer = accel.prepare(adam(model))
    model = accel.prepare(model)
    train(accel, model, optimizer)
    return flat(model)


def test_an_optimizer_may_be_prepared_before_the_model(pool):
    assert pool.run(optimizer_first) == [weights for weights, _ in pool.run(trained)]


# --- weights that change outside of a step ------------------------------------------------------


def averaged(gather: bool) -> tuple[list[float], list[float]]:
    """Outputs of an evaluation with averaged weights, and of the training after it."""
    ema, norm = EMA(decay=0.9), GradientNorm()
    accel = fp8(gather, callbacks=[ema, norm, NonFinite(), Freeze({"blocks.1.*": 2})])
    model = Network()
    model, optimizer = accel.prepare(model, adam(model))
    seen = []
    with accel.run("averaged", resume=False):
        for number in range(4):
            accel.backward(loss_of(accel, model, number))
            seen.append(float(accel.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            with accel.evaluate(model), torch.no_grad():
                seen.append(loss_of(accel, model, 9).item())
    return seen, flat(model)


def test_averaged_weights_are_gathered_with_scales_of_their_own(pool):
    assert pool.run(averaged, True) == pool.run(averaged, False)


ROW = torch.ones(1, 7)


def written(gather: bool, how: str) -> list[float]:
    accel, model, optimizer = prepared(gather)
    if how in ("encode", "lent"):
        accel.prepare(model, forward_methods=["encode"])
    seen = train(accel, model, optimizer)
    parameters = list(model.parameters())
    if how == "clamped":  # as a critic of a WGAN is
        for one in parameters:
            one.data.clamp_(-0.05, 0.05)
    elif how == "moved":
        model.to("cpu")
    elif how == "loaded":
        saved = {name: one.detach() / 3 for name, one in model.state_dict().items()}
        model.load_state_dict(saved)
    elif how == "assigned":
        saved = {name: one.detach() / 3 for name, one in model.state_dict().items()}
        model.load_state_dict(saved, assign=True)
    elif how == "whole":
        with accel.full_parameters(model, writeback=True), torch.no_grad():
            for one in model.parameters():
                one.mul_(0.3)
    elif how == "lent":
        for scale in (0.3, 1 / 0.3):
            for one in parameters:
                one.data.mul_(scale)
            with torch.no_grad():
                found = model(ROW) if scale < 1 else model.encode(ROW)
            seen.append(found.sum().item())
    elif how == "encode":  # which gathers without a forward of the model
        return [*seen, model.encode(ROW).sum().item()]
    elif how == "inference":
        with torch.inference_mode():
            seen.append(loss_of(accel, model, 5).item())
    accel.unwrap_model(model)  # which frees what an evaluation has left whole
    assert len(parts(model)) == (4 if gather else 0)
    return [*seen, *train(accel, model, optimizer)]


@pytest.mark.parametrize(
    "how", ["clamped", "lent", "moved", "loaded", "assigned", "whole", "encode", "inference"]
)
def test_weights_that_are_written_between_steps_have_new_scales(pool, how):
    assert pool.run(written, True, how) == pool.run(written, False, how)


def unwrapped(gather: bool) -> list[float]:
    accel, model, optimizer = prepared(gather)
    train(accel, model, optimizer)
    accel.unwrap_model(model, keep_fp32_wrapper=False)
    accel.unwrap_model(model)
    other = fp8(gather)
    model, optimizer = other.prepare(model, optimizer)
    assert len(parts(model)) == (4 if gather else 0)
    return train(other, model, optimizer)


def test_a_sharded_model_keeps_its_layers_when_it_is_unwrapped_or_prepared_again(pool):
    assert pool.run(unwrapped, True) == pool.run(unwrapped, False)


def sharded_before() -> None:
    model = accelerator().prepare(Network())
    fp8().prepare(model)


def test_a_model_that_is_sharded_already_is_refused(pool):
    for kind, text in pool.outcomes(sharded_before):
        assert kind == "ValueError"
        assert "is sharded already" in text


# --- what is saved ------------------------------------------------------------------------------


def copies() -> set[str]:
    """Kinds of what the model, its optimizer and copies of its weights hold."""
    accel, model, optimizer = prepared()
    train(accel, model, optimizer)
    stream = io.BytesIO()
    torch.save(dict(model.named_parameters()), stream)
    stream.seek(0)
    held = [
        *model.state_dict().values(),
        *(one for state in optimizer.optimizer.state.values() for one in state.values()),
        *copy.deepcopy(list(model.parameters())),
        *torch.load(stream, weights_only=False).values(),
        *(one.clone() for one in model.parameters()),
    ]
    return {type(getattr(one, "_local_tensor", one)).__name__ for one in held}


def test_states_and_copies_hold_plain_tensors(pool):
    assert pool.run(copies) == [{"Tensor"}] * 2


def saved_model(folder: str) -> bool:
    accel, model, optimizer = prepared()
    train(accel, model, optimizer)
    state = accel.get_state_dict(model, all_ranks=True)
    accel.save_model(model, folder)
    expected = {name: whole(one) for name, one in model.named_parameters()}
    file = load_file(f"{folder}/model.safetensors")
    assert {one.dtype for one in file.values()} == {torch.float32}
    assert all(type(one) is torch.Tensor for one in state.values())
    return all(
        torch.equal(one, expected[name])
        for found in (state, file)
        for name, one in found.items()
        if found.keys() == expected.keys()
    )


def test_a_model_is_saved_with_its_own_weights_to_the_bit(pool, tmp_path: Path):
    assert pool.run(saved_model, str(tmp_path)) == [True, True]


def save(layout: str, folder: str) -> tuple[list[float], list[float]]:
    """Save in the middle; return the weights then, and the losses after it."""
    accel, model, optimizer = prepared(layout=layout)
    train(accel, model, optimizer)
    accel.save_state(folder)
    return flat(model), train(accel, model, optimizer, range(3, 6))


def load(layout: str, folder: str) -> tuple[list[float], list[float]]:
    warnings.filterwarnings("ignore", "the checkpoint was saved by")
    accel, model, optimizer = prepared(layout=layout)
    train(accel, model, optimizer, range(10, 12))
    accel.load_state(folder)
    return flat(model), train(accel, model, optimizer, range(3, 6))


def test_a_checkpoint_is_resumed_to_the_bit(pool, tmp_path: Path):
    folder = str(tmp_path / "c")
    assert pool.run(save, "fsdp", folder) == pool.run(load, "fsdp", folder)
    tensors = checkpoint_io.load(folder).state["models"]["0"]
    assert {one.dtype for one in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("layouts", [("fsdp", "ddp"), ("ddp", "fsdp")], ids="-".join)
def test_other_layouts_load_it_and_it_loads_theirs(pool, tmp_path: Path, layouts):
    before, after = layouts
    expected = pool.run(save, before, str(tmp_path / "c"))
    for (weights, losses), (saved, goes_on) in zip(
        pool.run(load, after, str(tmp_path / "c")), expected, strict=True
    ):
        assert weights == saved
        assert losses == pytest.approx(goes_on, rel=0.05)  # sums of bf16 in another order


def test_one_process_loads_it(pool, alone, tmp_path: Path):
    weights, _ = pool.run(save, "fsdp", str(tmp_path / "c"))[0]
    loaded, _ = alone.run(load, "ddp", str(tmp_path / "c"))[0]
    assert loaded == weights


def filled_later(folder: str) -> tuple[list[float], list[str]]:
    accel = fp8()
    with init_empty_weights():
        model = Network()
    model, optimizer = accel.prepare(model, adam(model))
    load_checkpoint_in_model(model, folder)
    train(accel, model, optimizer)
    return flat(model), parts(model)


def test_a_model_without_weights_is_filled_after_prepare(pool, tmp_path: Path):
    accelerator("ddp").save_model(Network(), tmp_path)
    assert pool.run(filled_later, str(tmp_path)) == pool.run(trained)


# --- the option ---------------------------------------------------------------------------------


def chosen(given: bool | None, config: bool) -> int:
    handler = AORecipeKwargs(
        float8.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=config),
        in_block,
        enable_fsdp_float8_all_gather=given,
    )
    quiet()
    accel = accelerator("fsdp", mixed_precision="fp8", kwargs_handlers=[handler])
    return len(parts(accel.prepare(Network())))


@pytest.mark.parametrize(
    ("given", "config", "expected"),
    [(None, False, 0), (None, True, 4), (True, False, 4), (False, True, 0)],
)
def test_the_recipe_overrides_the_config(pool, given, config, expected):
    assert pool.run(chosen, given, config) == [expected] * 2


def without_sharding() -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for gather in (None, False, True):
            prepared(gather, "ddp")
    return [str(one.message) for one in seen if "all_gather" in str(one.message)]


def test_it_has_no_effect_where_weights_are_not_sharded(pool):
    for (text,) in pool.run(without_sharding):
        assert "has no effect: the weights of Network are not sharded" in text
