"""Copies of prepared loaders and optimizers on two processes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from tests.accel_callbacks.loop.test_copies import WAYS
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def read(way: str) -> tuple[list[int], list[int], int]:
    accel = Accelerator(cpu=True, timeout=BOUND)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(range(8), batch_size=2)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    own, copied = [], []
    for batch in loader:
        own += batch.tolist()
        accel.backward(model(batch.float().unsqueeze(1)).sum())
        optimizer.step()
        if not copied:
            for other in WAYS[way](loader):
                copied += other.tolist()
    return own, copied, len(WAYS[way](optimizer).state)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_reads_the_share_of_its_process(pool, way):
    shares = [0, 1, 4, 5], [2, 3, 6, 7]
    assert pool.run(read, way) == [(share, share, 2) for share in shares]
