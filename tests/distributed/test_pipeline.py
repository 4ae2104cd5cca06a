"""Pipeline parallelism against one process, alone and under FSDP2."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import checkpoint_io
from accel_callbacks import Accelerator, ParallelismConfig
from accel_callbacks.callbacks import EMA, GradientNorm

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
    return Accelerator(cpu=True, timeout=timedelta(seconds=30), **options)


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


def assert_alike(result: Any, wanted: Any, places: float = 2e-6) -> None:
    assert result.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            assert_alike(result[name], value, places)
        else:
            here, there = torch.tensor(result[name]), torch.tensor(value)
            torch.testing.assert_close(here, there, rtol=1e-5, atol=places, msg=f"{name}")


# --- parity -----------------------------------------------------------------------------------


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
    assert_alike(result, alone(window, clip))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "window"), [("1F1B", 4), ("GPipe", 1), ("Interleaved1F1B", 4)])
def test_stages_are_sharded_too(pool_of_4, schedule, window):
    """Two stages, each over two ranks that read different data."""
    results = pool_of_4.run(trains, schedule, window, "norm", True, 2)
    assert_alike(joined(results), alone(window, "norm"), 1e-5)


# --- checkpoints ------------------------------------------------------------------------------


def goes_on(
    schedule: str | None, save_to: str | None, load_from: str | None, window: int = 1, at: int = 3
) -> dict[str, Any]:
    """Train 6 batches; save after some of them, or begin there."""
    average = EMA(0.5)
    accel = accelerator(schedule, gradient_accumulation_steps=window, callbacks=[average])
    torch.manual_seed(0 if load_from is None else 7)
    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    model = ready(accel, schedule, model)
    loader = DataLoader(tokens(), 4, shuffle=True)
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
            losses.append(value.item())
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
        assert_alike(resumed, wanted)
    written = load_file(tmp_path / "checkpoint-model" / "model.safetensors")
    assert {name: value.tolist() for name, value in written.items()} == wanted["weights"]


def test_the_checkpoint_has_the_names_and_the_tensors_of_one_process(pool, tmp_path):
    goes_on(None, str(tmp_path / "one"), None)
    pool.run(goes_on, "1F1B", str(tmp_path / "two"), None)
    one, two = (checkpoint_io.open_checkpoint(str(tmp_path / name)) for name in ("one", "two"))
    shapes = [{k: e.shape for k, e in r.manifest.tensors.items()} for r in (one, two)]
    assert shapes[0] == shapes[1]
