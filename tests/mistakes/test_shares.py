"""Ranks that train on the same inputs, or log a metric of their own share, are told of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, set_seed
from accel_callbacks.loop.input_checksums import InputChecksums
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def messages_of(loop: str, *options: Any) -> list[str]:
    """The warnings of a loop, each with whether it names a line of this file."""
    set_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accel = Accelerator(cpu=True, timeout=BOUND)
        globals()[loop](accel, *options)
        accel.end_training()
    return [f"{warning.filename == __file__} {warning.message}" for warning in caught]


def parts(accel: Accelerator) -> tuple[Any, Any]:
    model = torch.nn.Linear(4, 1)
    return accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))  # type: ignore[return-value]


def step(accel: Accelerator, model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    accel.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()


ROWS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


# --- inputs -------------------------------------------------------------------------------------


def trained_on(accel: Accelerator, kind: str) -> None:
    model, optimizer = parts(accel)
    if kind == "noise of each rank":
        set_seed(0, device_specific=True)
    batches: Any = DataLoader(ROWS, batch_size=4, shuffle=kind == "shuffled by one seed")
    if kind == "prepared":
        batches = accel.prepare(batches)
    elif "noise" in kind:
        batches = (torch.randn(4, 4) for _ in range(5))
    elif kind == "a whole small dataset":
        batches = [ROWS] * 5
    elif kind == "divided by hand":
        batches = DataLoader(ROWS[accel.process_index :: 2], batch_size=4)
    for batch in batches:
        step(accel, model, optimizer, batch)


@pytest.mark.parametrize("kind", ["not prepared", "shuffled by one seed", "noise of one seed"])
def test_the_same_inputs_on_all_processes_are_told_once(pool, kind):
    first, second = pool.run(messages_of, "trained_on", kind)
    assert second == first
    assert len(first) == 1, first
    assert first[0].startswith("True all 2 processes call Linear with the same inputs")
    assert "`loader = accel.prepare(loader)`" in first[0]


@pytest.mark.parametrize(
    "kind", ["prepared", "divided by hand", "noise of each rank", "a whole small dataset"]
)
def test_inputs_of_each_process_stay_without_a_word(pool, kind):
    assert pool.run(messages_of, "trained_on", kind) == [[], []]


def adversarial(accel: Accelerator) -> None:
    """A generator of latents that are alike on purpose, and a critic that reads its own share."""
    generator, critic = parts(accel), parts(accel)
    for batch in accel.prepare(DataLoader(ROWS, batch_size=4)):
        latents = torch.randn(4, 4)
        assert accel.gather(latents[:1, :1]).unique().numel() == 1
        step(accel, *critic, batch)
        step(accel, *generator, latents)


def test_latents_that_are_alike_stay_without_a_word_beside_shares(pool):
    assert pool.run(messages_of, "adversarial") == [[], []]


def ends_of_steps(steps: list[float | None], data_rank_of: list[int]) -> list[bool]:
    """What each step ends with whose model is called with this value, or not at all."""
    accel = Accelerator(cpu=True, timeout=BOUND)
    inputs = InputChecksums("Linear", data_rank_of[accel.process_index])
    ends = []
    for value in steps:
        if value is not None:
            inputs.note((torch.tensor(value),))
        accel.wait_for_everyone()  # so that both have posted
        ends.append(inputs.end_step())
    return ends


@pytest.mark.parametrize(
    ("steps", "data_ranks", "equal_after"),
    [
        ([1.0, 2.0, 3.0, 3.0], [0, 1], 2),
        ([1.0, None, 2.0, 1.0, None, None], [0, 1], 3),
        ([1.0, 1.0, 1.0], [0, 1], None),
        ([None, None, None], [0, 1], None),
        ([1.0, 2.0, 3.0, 4.0], [0, 0], None),  # they read the same data
    ],
)
def test_the_first_two_steps_with_inputs_are_compared_once(pool, steps, data_ranks, equal_after):
    ends = [step == equal_after for step in range(len(steps))]
    assert pool.run(ends_of_steps, steps, data_ranks) == [ends, ends]


# --- metrics ------------------------------------------------------------------------------------


def evaluated(accel: Accelerator, how: str) -> None:
    model, optimizer = parts(accel)
    train, val = DataLoader(ROWS, 4), DataLoader(ROWS, 4)
    train, val = accel.prepare(train, val)
    gathered = ("gathered", "before any evaluation")
    if how == "before any evaluation":
        accel.log({"val/target": float(accel.process_index)})
    for epoch in range(4 if how == "first on the main process" else 2):
        for batch in train:
            step(accel, model, optimizer, batch)
            accel.log({"train/loss": float(accel.process_index)})
        total = torch.zeros(())
        with accel.evaluate(model):
            for batch in val:
                output = model(batch)
                total += (accel.gather_for_metrics(output) if how in gathered else output).sum()
        if how in ("reduced", "first on the main process"):
            total = accel.reduce(total, "mean")
        alone = how == "on the main process" or (how.startswith("first on") and epoch == 0)
        if alone and not accel.is_main_process:
            continue
        names = {"a loss of training": "train/epoch_loss", "a duration": "val/time"}
        name = names.get(how, "val/peak_memory_gb" if how == "memory" else None)
        more = {"val/error": total.item()} if how == "each its own" else {}
        accel.log({name or "val/loss": total.item(), "epoch": epoch, **more})


def test_a_metric_of_each_process_is_told_once(pool):
    first, second = pool.run(messages_of, "evaluated", "each its own")
    assert second == []
    assert len(first) == 1, first
    assert "val/loss was" in first[0]
    assert "on rank 1: each computed it of its own share" in first[0]


@pytest.mark.parametrize(
    "how",
    [
        *("gathered", "reduced", "a loss of training", "a duration", "memory"),
        "before any evaluation",
        "first on the main process",
        "on the main process",  # last: what one rank alone has posted, the next test would meet
    ],
)
def test_metrics_of_all_processes_stay_without_a_word(pool, how):
    assert pool.run(messages_of, "evaluated", how) == [[], []]
