"""Samplers of torch's and samplers as people write them, for tests of the order of samples."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

COUNT, BATCH = 26, 4


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def dataset() -> TensorDataset:
    ids = torch.arange(COUNT)
    inputs = torch.stack([(ids * prime % 17 - 8) / 8 for prime in (1, 3, 5, 7)], dim=1)
    return TensorDataset(ids, inputs)


class Custom(Sampler[int]):
    def __len__(self) -> int:
        return COUNT


class Shuffled(Custom):
    """Shuffles with Python's generator, and returns an iterator that draws no more."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(COUNT))
        random.shuffle(order)
        return iter(order)


class OneByOne(Custom):
    """Draws each index when it is asked for."""

    def __init__(self, draw: Callable[[], int]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return (self.draw() for _ in range(COUNT))


class OwnNumpy(Custom):
    """Has a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(COUNT).tolist())


class Rounds(Custom):
    """Shuffles again in the middle of an epoch, from the generator of dropout."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(2):
            yield from torch.randperm(COUNT // 2).tolist()


class Told(Custom):
    """Shuffles by the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(100 + self.epoch)
        return iter(torch.randperm(COUNT, generator=generator).tolist())


class Buckets(Sampler[list[int]]):
    """Batches of several sizes; shuffled where ``__iter__`` is called, or when one is asked for."""

    def __init__(self, late: bool) -> None:
        self.late = late

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches() if self.late else iter(list(self.batches()))

    def batches(self) -> Iterator[list[int]]:
        order = torch.randperm(COUNT).tolist()
        for start, stop in itertools.pairwise((0, 5, 7, 13, 17, 22, COUNT)):
            yield order[start:stop]

    def __len__(self) -> int:
        return 6


class ToldBuckets(Told):
    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        return (order[start : start + 5] for start in range(0, COUNT, 5))

    def __len__(self) -> int:
        return 6


class Unsized:
    """A batch sampler that does not say how long it is."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from BatchSampler(RandomSampler(range(COUNT)), 5, drop_last=False)


def own() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def sampled(sampler: Any) -> dict[str, Any]:
    return {"sampler": sampler, "batch_size": BATCH}


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": BATCH},
    "shuffle": lambda: {"shuffle": True, "batch_size": BATCH},
    "drop_last": lambda: {"shuffle": True, "batch_size": BATCH, "drop_last": True},
    "replacement": lambda: sampled(RandomSampler(range(COUNT), True, 70)),
    "own replacement": lambda: sampled(RandomSampler(range(COUNT), True, 70, own())),
    "more than all": lambda: sampled(RandomSampler(range(COUNT), False, 60, own())),
    "weighted": lambda: sampled(WeightedRandomSampler([1.0, 2.0] * 13, COUNT)),
    "subset": lambda: sampled(SubsetRandomSampler(range(0, COUNT, 2))),
    "python": lambda: sampled(Shuffled()),
    "python, one by one": lambda: sampled(OneByOne(lambda: random.randrange(COUNT))),
    "numpy": lambda: sampled(OneByOne(lambda: int(np.random.randint(COUNT)))),
    "torch, one by one": lambda: sampled(OneByOne(lambda: int(torch.randint(COUNT, ())))),
    "own numpy": lambda: sampled(OwnNumpy()),
    "rounds": lambda: sampled(Rounds()),
    "told": lambda: sampled(Told()),
    "batches": lambda: {"batch_sampler": Buckets(late=False)},
    "late batches": lambda: {"batch_sampler": Buckets(late=True)},
    "told batches": lambda: {"batch_sampler": ToldBuckets()},
    "unsized batches": lambda: {"batch_sampler": Unsized()},
    "lists of indices": lambda: {
        "sampler": BatchSampler(RandomSampler(range(COUNT)), 5, False), "batch_size": None,
    },
}  # fmt: skip
