"""Ranks with unequal numbers of batches are told both numbers, before gloo ends a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    find_executable_batch_size,
)
from accel_callbacks.callbacks import EarlyStopping
from accel_callbacks.loop import pass_ends
from tests.support.bound import BOUND
from tests.support.pool import Pool
from tests.support.sharded import quiet

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture
def fresh_pool(tmp_path: Path) -> Iterator[Pool]:
    """Two processes, whose group a test breaks."""
    fresh = Pool(2, tmp_path)
    yield fresh
    fresh.kill()


class Rows(IterableDataset[torch.Tensor]):
    """A stream of as many rows as it is told."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(self.count, 4))


def accelerator(layout: str = "ddp", **options: Any) -> Accelerator:
    quiet()
    if layout == "fsdp":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    # Longer than a pool waits: what is told is told at once.
    return Accelerator(cpu=True, **{"timeout": BOUND, **options})


def trained(accel: Accelerator) -> tuple[Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 64))
    return accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))


def batches(accel: Accelerator, kind: str, counts: tuple[int, int]) -> Any:
    """Batches of two rows: of a list of the script's own, or of a prepared stream."""
    count = counts[accel.process_index]
    if kind == "own":
        return [torch.ones(2, 4) for _ in range(count)]
    return accel.prepare(DataLoader(Rows(4 * count), batch_size=2))


def epoch(accel: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for rows in loader:
        with accel.accumulate(model):
            loss = model(rows).square().mean()
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accel.log({"loss": loss})


# --- told -----------------------------------------------------------------------------------------


def uneven(layout: str, kind: str, then: str, folder: str) -> None:
    callbacks = [EarlyStopping("loss", mode="min")] if then == "votes" else []
    accel = accelerator(layout, callbacks=callbacks)
    model, optimizer = trained(accel)
    loader = batches(accel, kind, (6, 5))
    if then in ("run", "votes"):
        with accel.run("uneven") as run:
            for _ in run.epochs(2):
                epoch(accel, model, optimizer, loader)
        return
    epoch(accel, model, optimizer, loader)
    if then == "evaluate":
        with accel.evaluate(model), torch.no_grad():
            accel.gather_for_metrics(model(torch.ones(2, 4)))
    if then == "gather":
        accel.gather(torch.ones(100))
    if then == "save":
        accel.save_state(folder)
    accel.end_training()


@pytest.mark.parametrize(
    ("layout", "kind", "then"),
    [
        ("ddp", "own", "run"),
        ("ddp", "own", "end"),
        ("ddp", "prepared", "votes"),
        ("ddp", "prepared", "evaluate"),
        ("fsdp", "own", "gather"),
        ("fsdp", "prepared", "save"),
        ("fsdp", "prepared", "run"),
    ],
)
def test_a_rank_that_runs_out_says_so_before_it_leaves(fresh_pool, tmp_path, layout, kind, then):
    for kind_of_error, text in fresh_pool.outcomes(uneven, layout, kind, then, str(tmp_path / "s")):
        assert kind_of_error in ("RuntimeError", "RemoteError")
        assert "rank 1 ran out of data after 5 batches, and rank 0 goes on with batch 6" in text
        assert "join_uneven_inputs" in text


def uneven_after_a_failure() -> None:
    """Ranks that join again after rank 1 ran out of memory, each at another place of its loop."""
    accel = accelerator()

    @find_executable_batch_size(starting_batch_size=2)
    def train(size: int) -> None:
        accel.free_memory()
        model, optimizer = trained(accel)
        if size == 2 and not accel.is_main_process:
            raise MemoryError
        epoch(accel, model, optimizer, batches(accel, "own", (6, 5)))
        accel.end_training()

    train()


def test_a_rank_that_runs_out_says_so_after_an_attempt_that_failed_too(fresh_pool):
    for _, text in fresh_pool.outcomes(uneven_after_a_failure):
        assert "rank 1 ran out of data after 5 batches, and rank 0 goes on with batch 6" in text


# --- right as it is -------------------------------------------------------------------------------


def joined() -> float:
    accel = accelerator()
    model, optimizer = trained(accel)
    for counts in ((5, 3), (2, 4)):
        with accel.join_uneven_inputs([model]):
            epoch(accel, model, optimizer, batches(accel, "own", counts))
        accel.gather(torch.ones(2))
        with accel.evaluate(model), torch.no_grad():
            accel.gather_for_metrics(model(torch.ones(2, 4)))
    epoch(accel, model, optimizer, batches(accel, "own", (2, 2)))
    return accel.reduce(torch.tensor(1.0)).item()


def in_windows() -> int:
    """Windows of four: both ranks take two steps, one of them with a batch less."""
    accel = accelerator(gradient_accumulation_steps=4)
    model, optimizer = trained(accel)
    epoch(accel, model, optimizer, batches(accel, "prepared", (6, 5)))
    accel.gather(torch.ones(2))
    return accel.current_run.global_step


def apart() -> list[float]:
    """A model of each rank's own, which nothing averages."""
    accel = accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = accel.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for rows in batches(accel, "own", (6, 3)):
        accel.backward(model(rows).mean())
        optimizer.step()
        optimizer.zero_grad()
    return accel.gather(torch.tensor([float(accel.current_run.global_step)])).tolist()


def around() -> int:
    """Unequal streams that begin anew until enough steps are taken."""
    accel = accelerator()
    model, optimizer = trained(accel)
    loader = batches(accel, "prepared", (3, 2))
    while accel.current_run.global_step < 6:
        for rows in loader:
            accel.backward(model(rows).mean())
            optimizer.step()
            optimizer.zero_grad()
            if accel.current_run.global_step == 6:
                break
    accel.gather(torch.ones(2))
    return accel.current_run.global_step


def left() -> int:
    """A loop that one rank leaves by a break, where the other has read all."""
    accel = accelerator()
    model, optimizer = trained(accel)
    for number, rows in enumerate(batches(accel, "prepared", (4, 4))):
        accel.backward(model(rows).mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 3 and accel.is_main_process:
            break
    accel.gather(torch.ones(2))
    with accel.evaluate(model):
        accel.gather(torch.ones(2))
    return accel.current_run.global_step


def past_the_library() -> int:
    """A barrier that one rank makes with torch's function, where no lengths are compared."""
    pass_ends._PATIENCE = 1.0
    accel = accelerator()
    model, optimizer = trained(accel)
    epoch(accel, model, optimizer, batches(accel, "own", (2, 2)))
    (torch.distributed.barrier if accel.is_main_process else accel.wait_for_everyone)()
    return accel.current_run.global_step


def test_a_rank_does_not_wait_until_the_collective_of_another_times_out(fresh_pool):
    assert fresh_pool.run(past_the_library) == [2, 2]


@pytest.mark.parametrize(
    ("script", "result"),
    [
        (joined, 2.0),
        (in_windows, 2),
        (apart, [6.0, 3.0]),
        (around, 6),
        (left, 4),
    ],
)
def test_unequal_numbers_that_are_right_are_not_told(pool, script, result):
    assert pool.run(script) == [result] * 2
