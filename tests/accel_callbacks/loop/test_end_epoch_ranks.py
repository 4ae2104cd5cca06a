"""run.end_epoch on two processes: one asks, and both end the epoch at the same step."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, Callback
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


class EndsOnOneRank(Callback):
    can_vote = True

    def on_train_batch_start(self, run, model, batch, batch_idx):
        if run.global_rank == 1 and run.current_epoch == 0 and batch_idx == 1:
            run.end_epoch("enough")


def train() -> tuple[list[int], int]:
    accel = Accelerator(cpu=True, timeout=BOUND, callbacks=[EndsOnOneRank()])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(torch.arange(16.0)[:, None], batch_size=2)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    seen = []
    with accel.run("end", resume=False) as run:
        for _ in run.epochs(2):
            seen.append(0)
            for batch in data:
                accel.backward(model(batch).sum())
                optimizer.step()
                seen[-1] += 1
    return seen, run.global_step


def test_c14_both_ranks_end_the_epoch_a_step_later(pool):
    assert pool.run(train) == [([3, 4], 7), ([3, 4], 7)]
