"""Checks of the data: every sample reaches one process, once, also through worker processes."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from accel_callbacks.selftest.check import Expectations, Lab

__all__ = ["every_sample_once", "workers_deliver"]

_BATCH = 4
_WIDE = 1 << 16


def every_sample_once(lab: Lab) -> str:
    """Two shuffled epochs over a number of samples that does not divide."""
    accel = lab.accelerator()
    count = 2 * _BATCH * accel.num_processes + 3
    loader = accel.prepare(DataLoader(_Numbers(count), _BATCH, shuffle=True))
    epochs = [
        [int(n) for batch in loader for n in accel.gather_for_metrics(batch)] for _ in range(2)
    ]
    expect = Expectations()
    for number, seen in enumerate(epochs, 1):
        lost = sorted(set(range(count)) - set(seen))
        twice = sorted({n for n in seen if seen.count(n) > 1})
        expect.that(not lost, f"epoch {number} lost samples {lost[:5]}")
        expect.that(not twice, f"epoch {number} had samples {twice[:5]} more than once")
    expect.that(epochs[0] != epochs[1], "the second epoch had the order of the first")
    expect.done()
    return f"{count} samples, two epochs, none lost, none twice"


def workers_deliver(lab: Lab) -> str:
    """Batches of some size that worker processes make arrive whole."""
    accel = lab.accelerator()
    count = 3 * accel.num_processes
    loader = accel.prepare(DataLoader(_Wide(count), 1, num_workers=1))
    expect, seen = Expectations(), []
    for batch in loader:
        number = int(batch[0, 0])
        expect.that(bool((batch == number).all()), f"sample {number} came with other values")
        seen += accel.gather_for_metrics(batch.amax(dim=1)).tolist()
    expect.equal("samples of the workers", sorted(seen), list(range(count)))
    expect.done()
    return "one worker a process, through shared memory"


class _Numbers(Dataset[int]):
    """The numbers below a count."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


class _Wide(Dataset[torch.Tensor]):
    """Half a megabyte a sample, full of its own number."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((_WIDE,), index, dtype=torch.int64)
