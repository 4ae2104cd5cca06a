"""Pipeline parallelism against one process, alone and under FSDP2."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import checkpoint_io
from accel_callbacks import Accelerator, ParallelismConfig
from accel_callbacks.callbacks import EMA, GradientNorm, NonFinite
from accel_callbacks.errors.removed import REMOVED
from tests.support.bound import BOUND
from tests.support.rounding import assert_reordered

pytestmark = pytest.mark.distributed

WORDS = 11


class Block(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + mask.unsqueeze(-1) * self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class LM(torch.nn.Module):
    """Embeddings by a parameter of its own too, and a mask that all blocks take."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 8)
        self.place = torch.nn.Parameter(torch.randn(6, 8))
        self.blocks = torch.nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = torch.nn.Linear(8, WORDS)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor, again: bool = False) -> torch.Tensor:
        mask = tokens != 0
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x, mask)
        if again:
            x = self.blocks[0](x, mask)
        return self.head(x)


def tokens(number: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randint(0, WORDS, (number, 6), generator=generator))


def loss_of(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


SPLITS = {
    "GPipe": ["blocks.2"],
    "1F1B": ["blocks.1"],
    "Interleaved1F1B": ["blocks.1", "blocks.2", "blocks.3"],
    "LoopedBFS": ["blocks.1", "blocks.2", "head"],
}


def accelerator(schedule: str | None, shards: int = 1, **options: Any) -> Accelerator:
    if schedule is not None:
        options["parallelism_config"] = ParallelismConfig(pp_size=2, dp_shard_size=shards)
    return Accelerator(cpu=True, timeout=BOUND, **options)


def ready(
    accel: Accelerator, schedule: str | None, model: torch.nn.Module, **options: Any
) -> torch.nn.Module:
    if schedule is None:
        return accel.prepare(model)
    return accel.prepare_pipeline(
        model, SPLITS[schedule], loss_of, schedule=schedule, **{"microbatches": 4, **options}
    )


def loss(model: Any, schedule: str | None, batch: torch.Tensor) -> torch.Tensor:
    return loss_of(model(batch), batch) if schedule is None else model(batch, target=batch)


def whole(tensor: torch.Tensor | None) -> list[Any] | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()


def trains(
    schedule: str | None,
    window: int = 1,
    clip: str = "norm",
    optimizer_first: bool = False,
    shards: int = 1,
    rows: int = 8,
) -> dict[str, Any]:
    """Losses, gradients of the first step, norms, what is logged and the last weights."""
    accel = accelerator(schedule, shards, gradient_accumulation_steps=window)
    torch.manual_seed(0)
    model: Any = LM()
    if optimizer_first:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
        model = ready(accel, schedule, model)
    else:
        model = ready(accel, schedule, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    loader = DataLoader(tokens(), rows // accel.data_world)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    optimizer, loader, scheduler = accel.prepare(optimizer, loader, scheduler)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    for _ in range(2):
        for batch in loader:
            with accel.accumulate(model):
                value = loss(model, schedule, batch)
                result["losses"].append(accel.reduce(value.detach(), "mean").item())
                accel.backward(value)
                if not result["gradients"] and accel.sync_gradients:
                    named = accel.unwrap_model(model).named_parameters()
                    result["gradients"] = {
                        name: whole(one.grad) for name, one in named if not one.is_meta
                    }
                if clip == "norm" and accel.sync_gradients:
                    result["norms"].append(accel.clip_grad_norm_(model.parameters(), 0.1).item())
                elif accel.sync_gradients:
                    accel.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    state = accel.get_state_dict(model, all_ranks=True)
    result["weights"] = {name: value.tolist() for name, value in state.items()}
    with torch.no_grad():
        result["outputs"] = model(torch.stack(tokens(8))).tolist()
    return result


@cache
def alone(*args: Any) -> dict[str, Any]:
    """The same on one process."""
    return trains(None, *args)


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the gradients of the stages; all else is equal."""
    gradients = {name: one for result in results for name, one in result["gradients"].items()}
    rest = [{k: v for k, v in one.items() if k != "gradients"} for one in results]
    assert all(one == rest[0] for one in rest)
    return {**results[0], "gradients": gradients}


# --- parity -----------------------------------------------------------------------------------


@pytest.mark.first
@pytest.mark.parametrize(
    ("schedule", "window", "clip", "first"),
    [
        ("1F1B", 4, "norm", False),
        ("Interleaved1F1B", 1, "norm", True),
        pytest.param("GPipe", 1, "value", True, marks=pytest.mark.slow),
        pytest.param("GPipe", 4, "norm", False, marks=pytest.mark.slow),
        pytest.param("1F1B", 1, "norm", False, marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", 4, "value", False, marks=pytest.mark.slow),
        pytest.param("LoopedBFS", 4, "norm", True, marks=pytest.mark.slow),
    ],
)
def test_losses_gradients_and_weights_are_those_of_one_process(pool, schedule, window, clip, first):
    result = joined(pool.run(trains, schedule, window, clip, first))
    assert_reordered(result, alone(window, clip))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "window"), [("1F1B", 4), ("GPipe", 1), ("Interleaved1F1B", 4)]
)
def test_stages_are_sharded_too(pool_of_4, schedule, window):
    """Two stages, each over two ranks that read different data."""
    results = pool_of_4.run(trains, schedule, window, "norm", True, 2)
    assert_reordered(joined(results), alone(window, "norm"))


# --- checkpoints ------------------------------------------------------------------------------


def goes_on(
    schedule: str | None,
    save_to: str | None,
    load_from: str | None,
    window: int = 1,
    at: int = 3,
    shards: int = 1,
) -> dict[str, Any]:
    """Train 6 batches; save after some of them, or begin there."""
    average = EMA(0.5)
    accel = accelerator(schedule, shards, gradient_accumulation_steps=window, callbacks=[average])
    torch.manual_seed(0 if load_from is None else 7)
    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    model = ready(accel, schedule, model)
    loader = DataLoader(tokens(), 4 // accel.data_world, shuffle=True)
    optimizer, loader = accel.prepare(optimizer, loader)
    losses: list[float] = []
    with accel.run("test", resume=False):
        if load_from is not None:
            accel.load_state(load_from)
        for number, batch in enumerate(loader, 1 if load_from is None else at + 1):
            with accel.accumulate(model):
                value = loss(model, schedule, batch)
                accel.backward(value)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accel.reduce(value.detach(), "mean").item())
            if number == at and save_to is not None:
                accel.save_state(save_to)
        state = accel.get_state_dict(model, all_ranks=True)
        if save_to is not None:
            accel.save_model(model, f"{save_to}-model")
    return {
        "losses": losses[-(6 - at) :],
        "weights": {name: value.tolist() for name, value in state.items()},
    }


@pytest.mark.parametrize(
    ("saver", "loader", "window", "at"),
    [
        ("1F1B", "1F1B", 4, 2),
        ("1F1B", None, 1, 3),
        (None, "Interleaved1F1B", 1, 3),
        pytest.param("1F1B", None, 4, 2, marks=pytest.mark.slow),
        pytest.param(None, "1F1B", 4, 2, marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", "GPipe", 4, 2, marks=pytest.mark.slow),
        pytest.param("GPipe", "Interleaved1F1B", 1, 3, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_with_other_stages(pool, tmp_path, saver, loader, window, at):
    """In a window, and outside; the same layout goes on with the same bits."""
    path = str(tmp_path / "checkpoint")

    def run(schedule: str | None, *args: Any) -> dict[str, Any]:
        if schedule is None:
            return goes_on(None, *args)
        first, second = pool.run(goes_on, schedule, *args)
        assert first == second
        return first

    wanted = run(saver, path, None, window, at)
    resumed = run(loader, None, path, window, at)
    if saver == loader:
        assert resumed == wanted
    else:
        assert_reordered(resumed, wanted)
    written = load_file(tmp_path / "checkpoint-model" / "model.safetensors")
    assert {name: value.tolist() for name, value in written.items()} == wanted["weights"]


@pytest.mark.first
def test_the_checkpoint_has_the_names_and_the_tensors_of_one_process(pool, tmp_path):
    goes_on(None, str(tmp_path / "one"), None)
    pool.run(goes_on, "1F1B", str(tmp_path / "two"), None)
    one, two = (checkpoint_io.open_checkpoint(str(tmp_path / name)) for name in ("one", "two"))
    shapes = [{k: e.shape for k, e in r.manifest.tensors.items()} for r in (one, two)]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["1F1B", "2x2", None])
def test_a_checkpoint_of_sharded_stages_goes_on_elsewhere(pool, pool_of_4, tmp_path, loader):
    path = str(tmp_path / "checkpoint")
    wanted = pool_of_4.run(sharded_goes_on, path, None)[0]
    if loader is None:
        assert_reordered(goes_on(None, None, path), wanted)
    elif loader == "2x2":
        assert pool_of_4.run(sharded_goes_on, None, path)[0] == wanted
    else:
        assert_reordered(pool.run(goes_on, loader, None, path)[0], wanted)


def sharded_goes_on(save_to: str | None, load_from: str | None) -> dict[str, Any]:
    return goes_on("1F1B", save_to, load_from, shards=2)


# --- what is measured, and evaluation ---------------------------------------------------------


def measured(schedule: str | None) -> dict[str, Any]:
    """What callbacks and metrics see, on each rank."""
    norms, average = GradientNorm(per_layer=True), EMA(0.5)
    accel = accelerator(schedule, callbacks=[norms, average, NonFinite()])
    logged: dict[str, float] = {}
    accel.on("log")(lambda metrics: logged.update(metrics))
    torch.manual_seed(0)
    model = ready(accel, schedule, LM())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, valid = DataLoader(tokens(8), 8), DataLoader(tokens(13), 4)
    optimizer, train, valid = accel.prepare(optimizer, train, valid)
    with accel.run("test"):
        for batch in train:
            value = 0.5 * loss(model, schedule, batch) + 1.0
            accel.backward(value)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        seen, losses = [], []
        with torch.no_grad():
            for batch in valid:  # the last has one row
                found = accel.gather_for_metrics(model(batch).argmax(-1))
                seen += found.tolist()
                losses.append(loss(model, schedule, batch).item())
        with average.applied():
            averaged = accel.get_state_dict(model, all_ranks=True)
    return {
        "logged": {name: float(number) for name, number in logged.items() if "norm" in name},
        "seen": seen,
        "losses": losses,
        "averaged": {name: one.tolist() for name, one in averaged.items()},
    }


def test_norms_metrics_and_averages_are_those_of_the_whole_model(pool):
    first, second = pool.run(measured, "1F1B")
    assert first == second
    assert_reordered(first, measured(None))


def draws(training: bool) -> tuple[list[Any], list[int]]:
    """The masks of dropout in both stages, and numbers that the loop draws after it."""
    accel = accelerator("1F1B")
    torch.manual_seed(accel.process_index)
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    model = torch.nn.Sequential(layers[0], torch.nn.Dropout(), layers[1], torch.nn.Dropout())
    masks: list[Any] = []
    for module in (model[1], model[3]):
        module.register_forward_hook(lambda module, args, result: masks.append(result == 0))
    model = accel.prepare_pipeline(model, ["2"], lambda output, target: output.sum())
    model.train(training)
    accel.backward(model(torch.ones(4, 4), target=torch.zeros(4)))
    masks = [mask for mask in masks if mask.device.type != "meta"]
    return torch.cat(masks).tolist(), torch.randint(1 << 30, (4,)).tolist()


def test_stages_draw_different_numbers_and_the_loop_the_same(pool):
    (first, after), (second, also) = pool.run(draws, True)
    assert after == also
    assert first != second
    assert len({str(row) for row in first}) > 1  # micro-batches differ too
    (first, after), (second, also) = pool.run(draws, False)
    assert after == also
    assert not torch.tensor(first + second).any()


# --- what is refused --------------------------------------------------------------------------


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no module": (LM, {"split_points": ["layers.2"]}, "has no module 'layers.2'"),
    "order": (LM, {"split_points": ["head", "blocks.0", "blocks.1"]}, "in the order of"),
    "too many": (LM, {"schedule": "1F1B"}, "one stage, and 3 split_points make 4"),
    "too few": (
        LM,
        {"split_points": ["head"]},
        "several stages, and 1 split_points make 2: give 3 or more",
    ),
    "schedule": (LM, {"schedule": "ZeroBubble"}, "is unknown; use one of"),
    **{
        name: (
            LM,
            {"schedule": name},
            r"unknown\. It was removed in 0\.2\.0\. Use .Interleaved1F1B",
        )
        for name, instead in REMOVED.items()
        if "1F1B" in instead
    },
    "few microbatches": (LM, {"microbatches": 1}, "need at least 2, or some idle"),
    "no blocks": (
        lambda: torch.nn.Bilinear(2, 2, 2),
        {"split_points": None},
        "Bilinear has 0 blocks in its ModuleLists, and 4",
    ),
    "batch norm state": (lambda: Custom(*layers()), {"split_points": ["1"]}, "customizes how"),
}


class Custom(torch.nn.Sequential):
    def get_extra_state(self) -> Any:
        return {"seen": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def layers() -> list[torch.nn.Module]:
    return [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]


def refused(case: str) -> str:
    build, options, _ = REFUSED[case]
    options = {"split_points": SPLITS["Interleaved1F1B"], "schedule": "Interleaved1F1B", **options}
    if len(options["split_points"] or ()) == 1 and case != "too few":
        options["schedule"] = "1F1B"
    with pytest.raises(ValueError, match=r"\S") as caught:
        accelerator("1F1B").prepare_pipeline(build(), loss_fn=loss_of, **options)
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused(pool, case):
    for text in pool.run(refused, case):
        assert re.search(REFUSED[case][2], text), text


class Holder:
    """What is no tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Held(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return Holder(super().forward(x))


class Unfit(torch.nn.Sequential):
    """A forward that no pipeline has."""

    def __init__(self, part: Callable[..., torch.Tensor], first: type = torch.nn.Linear) -> None:
        super().__init__(first(2, 2), torch.nn.Linear(2, 2))
        self._part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._part(self, x)


def branches(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model[0](x)
    return model[1](hidden) if hidden.sum() > 0 else hidden


def draws_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(x)
    return model[1](model[0](x + noise) + noise)


UNFIT: dict[str, Any] = {
    "skips": partial(Unfit, lambda model, x: model[0](x)),
    "branches": partial(Unfit, branches),
    "draws": partial(Unfit, draws_between),
    "objects": partial(Unfit, lambda model, x: model[1](model[0](x).value), Held),
}


def forward_of(accel: Accelerator, build: Any) -> Any:
    model = accel.prepare_pipeline(build(), ["1"], F.mse_loss)
    return model(torch.ones(4, 2), target=torch.ones(4, 2))


def misused() -> dict[str, str]:
    """What each wrong call says."""
    accel = accelerator("1F1B")
    model = ready(accel, "1F1B", LM())
    batch = torch.stack(tokens(4))
    value = model(batch, target=batch)
    calls: dict[str, Any] = {
        "no target": lambda: model(batch),
        "target by position": lambda: model(batch, False, batch),
        "rows": lambda: model(torch.stack(tokens(7)), target=torch.stack(tokens(7))),
        "target rows": lambda: model(batch, target=batch[:2]),
        "no loss": lambda: accel.prepare(LM())(batch),
        "called again": lambda: model(batch, True, target=batch),
        **{name: partial(forward_of, accel, part) for name, part in UNFIT.items()},
        "cut again": lambda: ready(accel, "1F1B", model),
        "again": lambda: [accel.backward(value, retain_graph=True), accel.backward(value)],
        "full_parameters": lambda: accel.full_parameters(model).__enter__(),
        "fp16": lambda: ready(accelerator("1F1B", mixed_precision="fp16"), "1F1B", LM()),
    }
    assert accel.prepare(model) is accel.prepare(accel.unwrap_model(model)) is model
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = ""
        except (ValueError, TypeError, RuntimeError) as error:
            said[name] = str(error)
    return said


def test_wrong_calls_say_what_to_do(pool):
    for said in pool.run(misused):
        assert "the loss there: call model(*inputs, target=target)" in said["no target"]
        assert "The target of the loss is passed as target=" in said["target by position"]
        assert "7 rows cannot be cut" in said["rows"]
        assert "the target has 2 rows, and the inputs have 4" in said["target rows"]
        assert "or pass labels to a model whose outputs have a loss" in said["no loss"]
        assert (
            "calls 'blocks.0', of stage 0, after the first layer of stage 1" in said["called again"]
        )
        assert "calls no layer of stage 1 of 2" in said["skips"]
        assert "depends on the values of what its layers return" in said["branches"]
        assert "draws random numbers between its layers, which stages [0, 1]" in said["draws"]
        assert "'0' returns a Holder, and only tensors and constants" in said["objects"]
        assert "is cut into stages already: options of" in said["cut again"]
        assert "a second time" in said["again"]
        assert "its own layers" in said["full_parameters"]
        assert 'use "bf16"' in said["fp16"]
