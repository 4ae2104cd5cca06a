"""Loops without a prepared loader on two processes: saves, votes and unequal numbers of steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


class StopsOnOne(Callback):
    """The second process asks for a stop after a step."""

    can_vote = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        if run.global_rank == 1 and run.global_step == self.step:
            run.stop("enough")


def build(*callbacks: Callback):
    accel = Accelerator(cpu=True, timeout=BOUND, callbacks=callbacks)
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    return accel, *accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(folder: str, stop_at: int, block: bool) -> list:
    """Steps on numbers of the own process, from where the run is to ten."""
    saver = Checkpoint(folder, every_n_steps=2, keep_last=None)
    accel, model, optimizer = build(saver, StopsOnOne(stop_at))
    with accel.run("own") as run:
        for index in range(run.batch_idx + 1, 10):
            batch = torch.tensor([[index + accel.process_index * 1.0]])
            if block:
                with accel.accumulate(model):
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
            if run.should_stop:
                break
    return [run.global_step, run.stop_reason, [one.tolist() for one in model.parameters()]]


@pytest.mark.parametrize("block", [True, False])
def test_all_processes_save_and_stop_at_the_same_step_and_resume_exactly(pool, tmp_path, block):
    first, second = pool.run(train, str(tmp_path / "cut"), 5, block)
    assert first == second
    assert first[:2] == [5, "enough"]
    assert sorted(one.name[-1] for one in (tmp_path / "cut").glob("step-*")) == ["2", "4", "5"]
    first, second = pool.run(train, str(tmp_path / "cut"), 0, block)
    assert [first, second] == pool.run(train, str(tmp_path / "whole"), 0, block)
    assert first == second
    assert first[:2] == [10, None]


def unequal(folder: str, counts: list[int], plain: bool) -> int:
    saver = Checkpoint(folder, every_n_steps=2, keep_last=None)
    accel, model, optimizer = build(saver)

    def steps() -> None:
        with accel.join_uneven_inputs([model]):
            for _ in range(counts[accel.process_index]):
                accel.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()

    if plain:
        steps()
        accel.end_training()
    else:
        with accel.run("own"):
            steps()
    return accel.current_run.global_step


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("counts", [[5, 3], [0, 3]])
def test_unequal_numbers_of_steps_hang_nobody(pool, tmp_path, counts, plain):
    assert pool.run(unequal, str(tmp_path / "c"), counts, plain) == [max(counts)] * 2
    assert [int(one.name[-1]) for one in Path(tmp_path / "c").glob("step-*")] == [max(counts)]
