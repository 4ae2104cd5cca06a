"""Data that would be lost, read twice or read in part is told, and right loops are left alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from accel_callbacks import Accelerator, ResumeError
from tests.support.bound import BOUND


def accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


def messages_of(loop: str, *options: Any) -> list[str]:
    """The warnings of a loop, each with whether it names a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        globals()[loop](*options)
    return [f"{warning.filename == __file__} {warning.message}" for warning in caught]


# --- StopIteration out of an item ----------------------------------------------------------------


class Tiles(Dataset):
    """Items of which one takes the next of an iterator that is used up."""

    def __init__(self, *, broken: int | None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(next(iter([] if index == self.broken else [index])))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("broken", [5, 15])
def test_an_item_that_raises_stop_iteration_does_not_end_the_epoch(workers, shuffle, broken):
    loader = DataLoader(Tiles(broken=broken), 2, shuffle=shuffle, num_workers=workers)
    loader = accelerator().prepare(loader)
    with pytest.raises(RuntimeError, match="an item of Tiles, or the collate_fn, raised StopIt"):
        list(loader)


def test_a_collate_fn_that_raises_stop_iteration_does_not_end_the_epoch():
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return next(sample for sample in samples if sample < 4)

    accel = accelerator()
    loader = accel.prepare(DataLoader(Tiles(broken=None), 2, collate_fn=collate))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(loader)
    stream = accel.prepare(DataLoader(Counting(), 2, collate_fn=collate))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(stream)


class Counting(IterableDataset):
    def __init__(self) -> None:
        self.left = 8

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return torch.tensor(self.left)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_that_ends_is_read_to_its_end_in_silence(workers):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accel = accelerator()
        loader = accel.prepare(DataLoader(Tiles(broken=None), 3, num_workers=workers))
        for _ in range(2):
            assert len(list(loader)) == 6
        for _ in loader:
            break
        assert len(list(loader)) == 6
        assert len(list(accel.prepare(DataLoader(Counting(), 2)))) == 4


def broken_for_one(dispatch: bool) -> str:
    from accel_callbacks import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    loader = accelerator(dataloader_config=config).prepare(DataLoader(Tiles(broken=5), 2))
    try:
        list(loader)
    except Exception as error:
        return str(error)
    return "none"


def test_a_stop_iteration_that_rank_0_reads_for_all_reaches_all(pool):
    for text in pool.run(broken_for_one, True):
        assert "StopIteration" in text
    first, second = pool.run(broken_for_one, False)
    assert "an item of Tiles" in first
    assert second == "none"


# --- a stream that divides itself ----------------------------------------------------------------


class Lines(IterableDataset):
    """16 samples, with what a script may do with its rank."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.rank = torch.distributed.get_rank()

    def __iter__(self) -> Iterator[torch.Tensor]:
        world = torch.distributed.get_world_size()
        if self.how == "divided":
            return (torch.tensor([float(index)]) for index in range(self.rank, 16, world))
        return (torch.tensor([float(index)]) for index in range(16))


class NoisyLines(IterableDataset):
    """A noise that differs between processes, over samples in one order."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        return (index + torch.rand(1, generator=generator) for index in range(16))


class Synthetic(IterableDataset):
    """Samples that are drawn, for each process others."""

    def __init__(self, shape: tuple[int, ...] = (1,), lines: Any = None) -> None:
        self.shape, self.count, self.lines = shape, 16, lines

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        generator = torch.Generator().manual_seed(7 * world + rank)
        for index in range(self.count):
            if self.lines is None or index % world == rank:
                yield torch.randn(self.shape, generator=generator)


def stream_loop(how: str, workers: int) -> None:
    accel = accelerator()
    dataset = NoisyLines() if how == "noise" else Lines(how)
    if "synthetic" in how:
        dataset = Synthetic(lines=[1.0] * 16 if how == "synthetic noise on lines" else None)
    net = torch.nn.Linear(1, 1)
    model, optimizer, loader = accel.prepare(
        *(net, torch.optim.SGD(net.parameters(), 0.001)),
        DataLoader(dataset, 2, num_workers=workers),
    )
    for _ in range(2):
        for batch in loader:
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_the_script_divides_is_told_once(pool, workers):
    (text,), second = pool.run(messages_of, "stream_loop", "divided", workers)
    assert text.startswith("True Lines reads other samples on each process, and prepare() div")
    assert second == [text]


def test_noise_on_lines_that_the_script_divides_is_told(pool):
    (text,), _ = pool.run(messages_of, "stream_loop", "synthetic noise on lines", 0)
    assert text.startswith("True Synthetic reads other samples on each process")


@pytest.mark.parametrize("how", ["whole", "noise", "synthetic"])
def test_a_whole_stream_is_divided_in_silence(pool, how):
    assert pool.run(messages_of, "stream_loop", how, 0) == [[], []]


# --- weights that differ -------------------------------------------------------------------------


def weights_loop(how: str) -> None:
    accel = accelerator()
    net = torch.nn.Linear(1, 1)
    if how == "before" and accel.is_main_process:
        net.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.ones(1)})
    model, optimizer = accel.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    if how == "on all" or (how == "main only" and accel.is_main_process):
        weights = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
        accel.unwrap_model(model).load_state_dict(weights)
    own = torch.Generator().manual_seed(accel.process_index)
    for _ in range(4):
        accel.backward(model(torch.rand(2, 1, generator=own)).sum())
        optimizer.step()
        optimizer.zero_grad()


def test_weights_that_one_process_changed_after_prepare_are_told_once(pool):
    (text,), none = pool.run(messages_of, "weights_loop", "main only")
    assert text.startswith("True the weights of Linear differ between the processes (such as 'wei")
    assert none == []


@pytest.mark.parametrize("how", ["before", "on all", "never"])
def test_weights_that_are_equal_stay_without_a_word(pool, how):
    assert pool.run(messages_of, "weights_loop", how) == [[], []]


# --- a skip after load_state ---------------------------------------------------------------------


def parts(accel: Accelerator) -> tuple[Any, Any, Any]:
    net = torch.nn.Linear(1, 1)
    samples = torch.arange(16.0)[:, None]
    return accel.prepare(net, torch.optim.SGD(net.parameters(), 0.001), DataLoader(samples, 2))


def train_on(accel: Accelerator, model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    accel.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()


def resumed_at(done: int, folder: Path) -> tuple[Any, Any, Any, Any]:
    accel = accelerator()
    model, optimizer, loader = parts(accel)
    for step, batch in enumerate(loader, start=1):
        train_on(accel, model, optimizer, batch)
        if step == done:
            accel.save_state(folder / "c")
            break
    accel = accelerator()
    model, optimizer, loader = parts(accel)
    accel.load_state(folder / "c")
    return accel, model, optimizer, loader


@pytest.mark.parametrize("done", [3, 4, 6])
def test_a_skip_of_what_the_loader_has_skipped_is_an_error(tmp_path, done):
    accel, model, optimizer, loader = resumed_at(done, tmp_path)
    before = [parameter.clone() for parameter in model.parameters()]
    lost = min(done, 8 - done)
    text = f"the first {lost} batches after load_state were not"

    def loop() -> None:
        for epoch in range(2):
            for step, batch in enumerate(loader):
                if epoch > 0 or step >= done:
                    train_on(accel, model, optimizer, batch)

    with pytest.raises(ResumeError, match=text):
        loop()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("done", [1, 7])
def test_a_single_batch_that_is_skipped_is_told(tmp_path, done):
    accel, model, optimizer, loader = resumed_at(done, tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            for step, batch in enumerate(loader):
                if epoch > 0 or step >= done:
                    train_on(accel, model, optimizer, batch)
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message).startswith("1 batch after load_state was not trained on")


@pytest.mark.parametrize("how", ["plain", "start", "skip_first_batches", "one bad", "evaluated"])
def test_a_right_resume_stays_without_a_word(tmp_path, how):
    accel, model, optimizer, loader = resumed_at(3, tmp_path)
    batches = accel.skip_first_batches(loader, 3) if how == "skip_first_batches" else loader
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, batch in enumerate(batches, start=3):
            seen += batch.flatten().tolist()
            if how == "one bad" and step == 3:
                continue
            if how == "evaluated" and step < 6:
                model(batch)
                continue
            train_on(accel, model, optimizer, batch)
        assert seen == [*range(6, 16)]
        assert len(list(loader)) == 8
    assert len(model._forward_pre_hooks) == 0


def test_a_view_of_the_rest_that_is_trained_on_in_each_epoch_is_told_once():
    accel = accelerator()
    model, optimizer, loader = parts(accel)
    view = accel.skip_first_batches(loader, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for batch in view:
                train_on(accel, model, optimizer, batch)
    (warning,) = caught
    assert warning.filename == __file__
    assert "is trained on in a second epoch, which begins without" in str(warning.message)


@pytest.mark.parametrize("how", ["once", "nothing skipped", "evaluated"])
def test_a_view_that_skips_what_it_should_stays_without_a_word(how):
    accel = accelerator()
    model, optimizer, loader = parts(accel)
    view = accel.skip_first_batches(loader, 0 if how == "nothing skipped" else 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(3):
            if how == "evaluated":
                with accel.evaluate(model):
                    assert len(list(view)) == 5
                continue
            for batch in loader if how == "once" and epoch else view:
                train_on(accel, model, optimizer, batch)


# --- a sampler with an order of its own on each process ------------------------------------------


class Shuffled(Sampler):
    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8 if self.how in ("part", "subset") else 16

    def __iter__(self) -> Iterator[int]:
        rank = torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(0 if self.how == "alike" else rank)
        if self.how == "part":
            return iter(range(rank, 16, 2))
        if self.how == "with repetitions":
            return iter(torch.randint(16, (16,), generator=generator).tolist())
        return iter(torch.randperm(16, generator=generator)[: len(self)].tolist())


def sampler_loop(how: str, batches: bool) -> None:
    accel = accelerator()
    sampler: Any = Shuffled(how)
    options = {"batch_sampler": OwnBatches(sampler, 2, False)} if batches else {"sampler": sampler}
    loader = accel.prepare(DataLoader(torch.arange(16.0), **options))
    for _ in range(3):
        list(loader)


class OwnBatches(BatchSampler):
    """A batch sampler that is not torch's own."""


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("how", ["by rank", "part"])
def test_an_order_of_its_own_on_each_process_is_told_once(pool, how, batches):
    (text,), second = pool.run(messages_of, "sampler_loop", how, batches)
    kind = "OwnBatches" if batches else "Shuffled"
    assert text.startswith(f"True {kind} gives other indices on each process, and prepare() gives")
    assert second == [text]


def sampler_of_lists() -> None:
    batches = OwnBatches(range(16), 4, False)
    loader = DataLoader(torch.arange(16.0), batch_size=None, sampler=batches)
    assert len(list(accelerator().prepare(loader))) == 2


def test_a_sampler_of_lists_stays_without_a_word(pool):
    assert pool.run(messages_of, "sampler_of_lists") == [[], []]


@pytest.mark.parametrize("how", ["alike", "with repetitions", "subset"])
def test_orders_that_lose_nothing_stay_without_a_word(pool, how):
    assert pool.run(messages_of, "sampler_loop", how, False) == [[], []]
