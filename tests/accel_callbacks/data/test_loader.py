"""The prepared loader: its order, its position, and going on at exactly the next sample."""

from __future__ import annotations

import json
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from accel_callbacks import Accelerator, DataLoaderConfiguration, DataLoaderShard
from accel_callbacks.data.prepare import prepare_loader
from accel_callbacks.data.sources import Setting


def prepare(loader, **options):
    """Prepare with orders by seed and epoch; test_order.py has those of the sampler."""
    config = DataLoaderConfiguration(seeded_order=True)
    return Accelerator(cpu=True, dataloader_config=config, **options).prepare(loader)


def values(batches):
    return [batch.tolist() for batch in batches]


def passes(loader, count):
    return [values(loader) for _ in range(count)]


def state_after(loader, batches):
    """The state in the body of the loop over this many batches, as a checkpoint carries it."""
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return json.loads(json.dumps(loader.state_dict()))


class VaryingBatches(BatchSampler):
    """Batches of 1, 2, 3, 1, ... shuffled samples."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        order, start = torch.randperm(self.count).tolist(), 0
        for size in self.sizes():
            yield order[start : start + size]
            start += size

    def sizes(self):
        whole = [i % 3 + 1 for i in range(self.count)]
        return [
            min(n, self.count - sum(whole[:i]))
            for i, n in enumerate(whole)
            if sum(whole[:i]) < self.count
        ]

    def __len__(self):
        return len(self.sizes())


class Stream(IterableDataset):
    """Counts up; workers read every n-th number."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id if info else 0, self.count, info.num_workers if info else 1))


class SizedStream(Stream):
    def __len__(self):
        return self.count


KINDS = {
    "in order": lambda w: DataLoader(range(7), 2, num_workers=w),
    "shuffled": lambda w: DataLoader(range(7), 2, shuffle=True, num_workers=w),
    "drop_last": lambda w: DataLoader(range(7), 2, shuffle=True, drop_last=True, num_workers=w),
    "a generator": lambda w: DataLoader(
        range(7), 2, shuffle=True, num_workers=w, generator=torch.Generator().manual_seed(5)
    ),
    "weighted": lambda w: DataLoader(
        range(7), 2, sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 2 + [9.0], 7), num_workers=w
    ),
    "batch sampler": lambda w: DataLoader(
        range(7), batch_sampler=VaryingBatches(7), num_workers=w
    ),
    "torch's batch sampler": lambda w: DataLoader(
        range(7), batch_sampler=BatchSampler(RandomSampler(range(7)), 2, False), num_workers=w
    ),
    "no batching": lambda w: DataLoader(
        torch.arange(5), batch_size=None, shuffle=True, num_workers=w
    ),
    "lists of indices": lambda w: DataLoader(
        torch.arange(7), batch_size=None, num_workers=w,
        sampler=BatchSampler(RandomSampler(range(7)), 2, drop_last=False),
    ),
    "stream": lambda w: DataLoader(Stream(7), 2, num_workers=w),
    "stream, drop_last": lambda w: DataLoader(Stream(7), 2, drop_last=True, num_workers=w),
}  # fmt: skip
every_kind = pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name) for name, make in KINDS.items()],
)
no_skip_warning = pytest.mark.filterwarnings("ignore:resuming an iterable dataset")


@no_skip_warning
@every_kind
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_state_of_any_batch_leads_to_the_rest_and_then_to_the_next_epochs(make, epoch):
    whole = passes(prepare(make(0)), epoch + 2)
    for taken in range(len(whole[epoch]) + 1):
        if taken == 0 and epoch:  # before its first batch, an epoch has not begun
            continue
        torch.manual_seed(0)
        first = prepare(make(0))
        assert passes(first, epoch) == whole[:epoch]
        state = state_after(first, taken)
        torch.manual_seed(999)
        second = prepare(make(0))
        second.load_state_dict(state)
        assert passes(second, 2) == [whole[epoch][taken:], whole[epoch + 1]]


# What workers are asked for differs between these.
ASKED = ("shuffled", "batch sampler", "no batching", "stream")


@no_skip_warning
@pytest.mark.parametrize("make", [pytest.param(KINDS[name], id=name) for name in ASKED])
def test_loader_workers_change_neither_the_order_nor_the_resume(make):
    whole = passes(prepare(make(2)), 2)
    if not isinstance(make(0).dataset, IterableDataset):
        torch.manual_seed(0)
        assert whole == passes(prepare(make(0)), 2)
    torch.manual_seed(0)
    state = state_after(prepare(make(2)), 2)  # workers have read further than this
    torch.manual_seed(999)
    second = prepare(make(2))
    second.load_state_dict(state)
    assert passes(second, 2) == [whole[0][2:], whole[1]]


@pytest.mark.parametrize(("workers", "shuffle"), [(0, False), (0, True), (2, True)])
def test_every_epoch_reads_every_sample_once_in_an_order_of_its_own(workers, shuffle):
    epochs = passes(prepare(DataLoader(range(16), 3, shuffle=shuffle, num_workers=workers)), 3)
    flat = [[n for batch in epoch for n in batch] for epoch in epochs]
    assert all(sorted(epoch) == list(range(16)) for epoch in flat)
    assert len({tuple(epoch) for epoch in flat}) == (3 if shuffle else 1)


def test_the_order_follows_the_seed_and_not_the_state_of_the_generators():
    def order(seed, draws):
        torch.manual_seed(seed)
        loader = prepare(DataLoader(range(16), 4, shuffle=True))
        torch.rand(draws)
        return passes(loader, 2)

    assert order(3, 0) == order(3, 7)
    assert order(3, 0) != order(4, 0)


def test_a_seeded_generator_of_the_loader_decides_with_it():
    def order(own):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(own)
        return values(prepare(DataLoader(range(16), 4, shuffle=True, generator=generator)))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_two_shuffled_loaders_of_one_size_are_shuffled_independently():
    accel = Accelerator(cpu=True)
    first, second = accel.prepare(
        DataLoader(range(32), 4, shuffle=True), DataLoader(range(32), 4, shuffle=True)
    )
    assert values(first) != values(second)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *((kind, 0) for kind in ("shuffled", "weighted", "batch sampler", "a generator", "stream")),
        *((kind, 2) for kind in ("a generator", "stream")),
    ],
)
def test_iterating_draws_from_no_global_generator(workers, kind):
    def state():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    loader = prepare(KINDS[kind](workers))
    before = state()
    for _ in range(2):
        for _ in loader:
            assert state() == before
    assert state() == before


# --- the position --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_break_the_next_pass_is_the_next_epoch_from_its_start(workers):
    whole = passes(prepare(DataLoader(range(9), 2, shuffle=True, num_workers=workers)), 2)
    torch.manual_seed(0)
    loader = prepare(DataLoader(range(9), 2, shuffle=True, num_workers=workers))
    for _ in loader:
        break
    assert values(loader) == whole[1]


def test_a_state_after_a_break_leads_to_the_next_epoch_as_without_a_resume():
    first = prepare(DataLoader(range(9), 2, shuffle=True))
    for _ in first:
        break
    state = first.state_dict()
    uninterrupted = values(first)
    second = prepare(DataLoader(range(9), 2, shuffle=True))
    second.load_state_dict(state)
    assert values(second) == uninterrupted


def test_a_state_after_a_whole_pass_leads_to_the_next_epoch():
    loader = prepare(DataLoader(range(9), 2, shuffle=True))
    whole = passes(loader, 1)
    state = loader.state_dict()
    assert (state["epoch"], state["position"], state["finished"]) == (0, 9, True)
    whole += passes(loader, 1)
    second = prepare(DataLoader(range(9), 2, shuffle=True))
    second.load_state_dict(state)
    assert values(second) == whole[1]


def test_a_state_can_be_loaded_again_and_in_the_middle_of_a_pass():
    loader = prepare(DataLoader(range(9), 2, shuffle=True))
    whole = passes(loader, 2)
    loader = prepare(DataLoader(range(9), 2, shuffle=True))
    state = state_after(loader, 2)
    for _ in range(3):
        loader.load_state_dict(state)
        for _ in zip(range(2), loader, strict=False):
            pass
    loader.load_state_dict(state)
    assert passes(loader, 2) == [whole[0][2:], whole[1]]


def test_set_epoch_chooses_the_order_of_the_next_pass_only():
    whole = passes(prepare(DataLoader(range(9), 2, shuffle=True)), 6)
    torch.manual_seed(0)
    loader = prepare(DataLoader(range(9), 2, shuffle=True))
    loader.set_epoch(4)
    assert values(loader) == whole[4]
    assert loader.epoch == 4
    assert values(loader) == whole[5]
    loader.set_epoch(1)
    assert values(loader) == whole[1]


def test_set_epoch_of_the_resumed_epoch_goes_on_in_it_and_of_another_starts_that_one():
    whole = passes(prepare(DataLoader(range(9), 2, shuffle=True)), 3)
    torch.manual_seed(0)
    state = state_after(prepare(DataLoader(range(9), 2, shuffle=True)), 2)
    for epoch, expected in ((0, whole[0][2:]), (2, whole[2])):
        loader = prepare(DataLoader(range(9), 2, shuffle=True))
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        assert values(loader) == expected


def test_a_shuffled_evaluation_that_was_interrupted_starts_anew():
    accel = Accelerator(cpu=True)
    model, loader = accel.prepare(torch.nn.Linear(1, 1), DataLoader(range(6), 2, shuffle=True))
    with accel.evaluate(model):
        state = state_after(loader, 1)
    loader.load_state_dict(state)
    with accel.evaluate(model):
        assert sorted(n for batch in loader for n in batch.tolist()) == list(range(6))


@pytest.mark.parametrize("kind", ["in order", "drop_last", "batch sampler", "no batching"])
def test_left_counts_down_and_on_last_is_true_once(kind):
    loader = prepare(KINDS[kind](0))
    total = len(values(loader))
    for _ in range(2):
        seen = [(loader.left, loader.on_last, loader.batch_index) for _ in loader]
        assert seen == [(total - i, i == total - 1, i) for i in range(total)]


@pytest.mark.parametrize("kind", ["in order", "batch sampler", "no batching", "drop_last"])
def test_left_and_on_last_are_right_after_a_resume(kind):
    loader = prepare(KINDS[kind](0))
    total = len(values(loader))
    loader = prepare(KINDS[kind](0))
    loader.load_state_dict(state_after(prepare(KINDS[kind](0)), 2))
    seen = [(loader.left, loader.on_last) for _ in loader]
    assert seen == [(total - i, i == total - 1) for i in range(2, total)]


@pytest.mark.parametrize(
    "kind",
    [
        "in order",
        "no batching",
        "batch sampler",
    ],
)
def test_the_index_of_the_batch_goes_on_after_a_resume(kind):
    loader = prepare(KINDS[kind](0))
    loader.load_state_dict(state_after(prepare(KINDS[kind](0)), 2))
    assert [loader.batch_index for _ in loader][:2] == [2, 3]


def test_a_break_leaves_no_end_of_loader_behind():
    loader = prepare(DataLoader(range(4), 2))
    for _ in loader:
        if loader.on_last:
            break
    for _ in loader:
        assert not loader.on_last
        assert loader.left == 2
        break


@pytest.mark.parametrize(
    ("loader", "length"),
    [
        (lambda: DataLoader(range(7), 2), 4),
        (lambda: DataLoader(range(7), 2, drop_last=True), 3),
        (lambda: DataLoader(torch.arange(7), batch_size=None), 7),
        (lambda: DataLoader(range(0), 2), 0),
        (lambda: DataLoader(range(7), batch_sampler=VaryingBatches(7)), 4),
        (lambda: DataLoader(SizedStream(7), 2), 4),
        (lambda: DataLoader(SizedStream(7), 2, drop_last=True), 3),
    ],
)
def test_the_length_is_the_number_of_batches(loader, length):
    prepared = prepare(loader())
    assert len(prepared) == length
    assert len(values(prepared)) == length
    assert len(prepared) == length


def test_a_stream_without_a_length_has_none():
    with pytest.raises(TypeError):
        len(prepare(DataLoader(Stream(7), 2)))


def test_a_resume_of_a_map_style_dataset_reads_no_sample_twice():
    class Counted(Dataset):
        reads = 0

        def __len__(self):
            return 100_000

        def __getitem__(self, index):
            type(self).reads += 1
            return index

    state = state_after(prepare(DataLoader(Counted(), 10, shuffle=True)), 3)
    state["position"] = 90_000
    loader = prepare(DataLoader(Counted(), 10, shuffle=True))
    loader.load_state_dict(state)
    Counted.reads = 0
    next(iter(loader))
    assert Counted.reads == 10


# --- streams -------------------------------------------------------------------------------


def test_a_resumed_stream_says_once_that_it_reads_and_drops():
    loader = prepare(DataLoader(Stream(7), 2))
    state = state_after(loader, 2)
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="drops its first 4 samples"):
        assert values(loader) == [[4, 5], [6]]
    loader.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert values(loader) == [[4, 5], [6]]


def test_a_stream_that_is_not_resumed_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(prepare(DataLoader(Stream(7), 2)), 2)


@pytest.mark.parametrize("make", [Stream, SizedStream])
def test_the_last_batch_of_a_stream_is_known_when_it_comes(make):
    loader = prepare(DataLoader(make(7), 2))
    for _ in range(2):
        assert [loader.on_last for _ in loader] == [False, False, False, True]


def test_a_stream_shorter_than_its_length_still_ends_well():
    class Short(Stream):
        def __len__(self):
            return 100

    loader = prepare(DataLoader(Short(3), 2))
    assert [(batch.tolist(), loader.on_last) for batch in loader] == [([0, 1], False), ([2], True)]
    assert loader.finished


def test_workers_of_a_stream_read_every_sample_once():
    batches = values(prepare(DataLoader(Stream(11), 2, num_workers=2)))
    assert sorted(n for batch in batches for n in batch) == list(range(11))


class EpochStream(IterableDataset):
    """Yields the epoch it was told."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * 2)


@pytest.mark.parametrize(
    ("workers", "persistent"),
    [(0, False), (1, False), (1, True)],
)
def test_a_stream_with_set_epoch_is_told_the_epoch_in_its_workers_too(workers, persistent):
    loader = prepare(
        DataLoader(EpochStream(), 2, num_workers=workers, persistent_workers=persistent)
    )
    seen = passes(loader, 2)
    if persistent:
        loader._iterator._shutdown_workers()
    assert seen == [[[0, 0]], [[1, 1]]]


class ShuffledStream(IterableDataset):
    """Shuffles with torch's generator, which each worker has seeded by its loader."""

    def __iter__(self):
        return iter(torch.randperm(8).tolist())


@no_skip_warning
def test_a_stream_shuffled_in_its_worker_resumes_in_the_same_order():
    whole = values(prepare(DataLoader(ShuffledStream(), 2, num_workers=1)))
    torch.manual_seed(0)
    loader = prepare(DataLoader(ShuffledStream(), 2, num_workers=1))
    loader.load_state_dict(state_after(loader, 2))
    assert values(loader) == whole[2:]


class Augmented(Dataset):
    """Each sample with noise, from the generator of whoever reads it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.randint(1_000_000, ())


def test_workers_draw_other_noise_in_every_epoch_and_the_same_in_every_run():
    def noise():
        torch.manual_seed(0)
        return passes(prepare(DataLoader(Augmented(), 4, num_workers=2)), 2)

    first = noise()
    assert first == noise()
    assert first[0] != first[1]


class JustBatches:
    """A loop without hooks, for the loader of a rank that is not running."""

    def iterate(self, loader):
        return loader.batches()


def test_workers_of_different_ranks_draw_different_noise():
    def noise(rank):
        loader = prepare_loader(
            DataLoader(Augmented(), 2, num_workers=1),
            Setting(rank=rank, world_size=2),
            events=JustBatches(),
            feed=None,
            seed=0,
        )
        return values(loader)

    assert noise(0) != noise(1)


def test_the_noise_of_workers_after_a_resume_depends_on_the_position():
    def noise_from(batches):
        loader = prepare(DataLoader(Augmented(), 1, num_workers=1))
        loader.load_state_dict(state_after(loader, batches))
        return values(loader)[0]

    assert noise_from(2) == noise_from(2)
    assert noise_from(2) != noise_from(3)


@pytest.mark.parametrize("make", [lambda: range(7), lambda: Stream(7)], ids=["map", "stream"])
def test_persistent_workers_live_through_breaks_and_resumes(make):
    def loader():
        return DataLoader(make(), 2, num_workers=2, persistent_workers=True)

    plain = passes(prepare(DataLoader(make(), 2, num_workers=2)), 2)
    prepared = prepare(loader())
    assert values(prepared) == plain[0]
    workers = {worker.pid for worker in prepared._iterator._workers}
    for _ in prepared:
        break
    assert values(prepared) == plain[1]
    assert {worker.pid for worker in prepared._iterator._workers} == workers
    state = state_after(prepared, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared.load_state_dict(state)
        assert values(prepared) == plain[0][2:]
    prepared._iterator._shutdown_workers()  # else freed in a cycle, where torch waits for each


# --- what is refused, and several loaders --------------------------------------------------


def test_a_distributed_sampler_is_refused_with_what_to_do():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="drop the sampler and pass shuffle=True"):
        prepare(DataLoader(range(8), 2, sampler=sampler))


def test_a_distributed_sampler_inside_of_a_batch_sampler_is_refused_too():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)

    class Own(BatchSampler):
        pass

    with pytest.raises(ValueError, match="DistributedSampler"):
        prepare(DataLoader(range(8), batch_sampler=Own(sampler, 2, False)))


def test_prepared_loaders_are_loaders_and_are_prepared_once():
    accel = Accelerator(cpu=True)
    loader = accel.prepare(DataLoader(range(4), 2))
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert accel.prepare(loader) is loader
    assert accel.loaders == [loader]


def test_the_dataset_of_a_prepared_stream_has_its_length():
    assert len(prepare(DataLoader(SizedStream(7), 2)).dataset) == 7


@pytest.mark.parametrize("lengths", [(6, 6), (6, 10), (10, 6)])
def test_loaders_zipped_together_deliver_as_the_bare_ones_do(lengths):
    accel = Accelerator(cpu=True)
    bare = [DataLoader(range(n), 2) for n in lengths]
    loaders = accel.prepare(*bare)
    expected = [(a.tolist(), b.tolist()) for a, b in zip(*bare, strict=False)]
    for _ in range(2):
        assert [(a.tolist(), b.tolist()) for a, b in zip(*loaders, strict=False)] == expected


@pytest.mark.parametrize(
    "lengths",
    [(6, 6), (6, 10), (10, 6)],
)
def test_the_last_window_of_zipped_loaders_is_stepped(lengths):
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loaders = accel.prepare(*(DataLoader(range(n), 2) for n in lengths))
    stepped = []
    for _ in zip(*loaders, strict=False):
        with accel.accumulate():
            stepped.append(accel.sync_gradients)
    assert stepped == [False, True, True]  # the shorter one has three batches


def test_loaders_nested_in_each_other_each_deliver_their_own():
    accel = Accelerator(cpu=True)
    outer, inner = accel.prepare(DataLoader(range(4), 2), DataLoader(range(3), 2))
    seen = [(a.tolist(), b.tolist()) for a in outer for b in inner]
    inside = [[0, 1], [2]]
    assert seen == [(a, b) for a in ([0, 1], [2, 3]) for b in inside]
    assert (outer.epoch, inner.epoch) == (0, 1)
    assert not accel.loop.position.active


def test_gather_for_metrics_inside_of_a_nested_loop_counts_by_the_inner_loader():
    accel = Accelerator(cpu=True)
    train, val = accel.prepare(DataLoader(range(4), 2), DataLoader(range(5), 2))
    seen = []
    for _ in train:
        with accel.evaluate():
            seen.append([n for batch in val for n in accel.gather_for_metrics(batch).tolist()])
    assert seen == [list(range(5))] * 2
