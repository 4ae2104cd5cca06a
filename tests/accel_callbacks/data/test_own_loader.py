"""A loader as the script has set it: its class, its generator, its batch size."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from accel_callbacks import Accelerator, DataLoaderConfiguration


class Normalized(DataLoader):
    """Changes each batch."""

    scale = 8

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in super().__iter__():
            yield (batch - self.offset) / self.scale

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.offset = 4


class Filtered(DataLoader):
    """Leaves batches out."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (batch for batch in super().__iter__() if batch[0] > 2)


class Doubled(DataLoader):
    """Gives each batch twice."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (batch for batch in super().__iter__() for _ in range(2))


class Ahead(DataLoader):
    """Has read the next batch where it gives one."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        batches = super().__iter__()
        batch = next(batches)
        for after in batches:
            yield batch
            batch = after
        yield batch


class Repeat:
    """Batches without an end."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.batches)


class Endless(DataLoader):
    """Keeps its iterator over epochs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (next(self.iterator) for _ in range(len(self)))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[float]:
        return iter([float(number) for number in range(7)])


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("kind", [Normalized, Ahead])
@pytest.mark.parametrize(
    ("data", "workers", "dispatch"),
    [
        (torch.arange(7.0), 0, None),
        (torch.arange(7.0), 2, None),
        (torch.arange(7.0), 0, True),
        (Stream(), 0, None),
        (Stream(), 0, True),
    ],
    ids=["map", "map, workers", "map, dispatched", "stream", "stream, dispatched"],
)
@pytest.mark.filterwarnings("ignore:.*iterable dataset", "ignore:.*reads other samples")
def test_the_iter_of_a_class_of_the_script_is_kept(kind, data, workers, dispatch):
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    plain = values(kind(data, 2, num_workers=workers))
    accel = Accelerator(cpu=True, dataloader_config=config)
    loader = accel.prepare(kind(data, 2, num_workers=workers))
    assert [values(loader) for _ in range(2)] == [plain, plain]
    assert isinstance(loader, kind)
    if not isinstance(data, Stream):
        assert len(loader) == 4
        assert values(pickle.loads(pickle.dumps(loader))) == plain


def test_draws_around_a_class_of_the_script_are_those_of_the_plain_loop():
    def draws(prepares: bool) -> list[Any]:
        torch.manual_seed(0)
        loader: Any = Normalized(torch.arange(7.0), 2, shuffle=True)
        if prepares:
            loader = Accelerator(cpu=True).prepare(loader)
        return [[batch.tolist(), float(torch.rand(1))] for _ in range(2) for batch in loader]

    assert draws(True) == draws(False)


def test_a_class_of_the_script_is_resumed_within_an_epoch(tmp_path):
    def make() -> tuple[Accelerator, Any]:
        accel = Accelerator(cpu=True)
        return accel, accel.prepare(Normalized(torch.arange(7.0), 2, shuffle=True))

    accel, loader = make()
    batches = iter(loader)
    next(batches)
    accel.save_state(tmp_path / "c")
    rest = values(batches)
    accel, loader = make()
    accel.load_state(tmp_path / "c")
    assert values(loader) == rest


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Filtered, "Filtered.__iter__ gave 2 batches for 4"), (Doubled, "Doubled.__iter__ gave 2 b")],
)
def test_another_number_of_batches_than_there_are_is_an_error(kind, text):
    loader = Accelerator(cpu=True).prepare(kind(torch.arange(8.0), 2))
    with pytest.raises(RuntimeError, match=text):
        list(loader)


def test_an_endless_sampler_has_the_epochs_of_its_class():
    loader = Accelerator(cpu=True).prepare(Endless(torch.arange(8), 4))
    for _ in range(2):
        assert values(itertools.islice(loader, 9)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loader.position == 8


def test_the_generator_of_a_loader_is_the_one_of_the_script():
    def epochs(prepares: bool) -> list[Any]:
        generator = torch.Generator()
        loader: Any = DataLoader(range(8), 4, shuffle=True, generator=generator)
        if prepares:
            loader = Accelerator(cpu=True).prepare(loader)
        orders = []
        for epoch in range(3):
            loader.generator.manual_seed(epoch)
            orders.append(values(loader))
            assert loader.generator is generator
        return orders

    assert epochs(True) == epochs(False)


@pytest.mark.parametrize("given", ["batch_size", "batch_sampler"])
def test_the_batch_sampler_is_asked_for_its_options_at_each_pass(given):
    batches = BatchSampler(SequentialSampler(range(10)), 2, False)
    options = {"batch_size": 2} if given == "batch_size" else {"batch_sampler": batches}
    plain = DataLoader(range(10), **options)
    loader = Accelerator(cpu=True).prepare(DataLoader(range(10), **options))
    assert (len(loader), values(loader)) == (len(plain), values(plain))
    for part in (plain, loader):
        part.batch_sampler.batch_size, part.batch_sampler.drop_last = 4, True
    assert (len(loader), values(loader)) == (len(plain), values(plain))
    assert loader.total_batch_size == 4
