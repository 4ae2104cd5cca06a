"""Iterable datasets: how they are split, and how a pass goes on where it was left."""

from __future__ import annotations

import functools
import gc
import json
import threading
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import TMonitor

from accel_callbacks import Accelerator, ResumeError, prepare_data_loader
from accel_callbacks.data.config import DataLoaderConfiguration
from accel_callbacks.data.iterable import IterableDatasetShard, IterableShards, Part
from accel_callbacks.data.stream import StreamSource


class Stream(IterableDataset):
    """Counts up; workers read every n-th number. It does not know where it is."""

    def __init__(self, count):
        self.count = count
        self.reads = torch.zeros(1, dtype=torch.int64).share_memory_()

    def own(self):
        info = get_worker_info()
        return range(info.id if info else 0, self.count, info.num_workers if info else 1)

    def __iter__(self):
        for value in self.own():
            self.reads += 1
            yield value


class Placed(Stream):
    """The same, and it knows where it is. Passes differ, by a count that is its own."""

    def __init__(self, count):
        super().__init__(count)
        self.place = self.passes = 0

    def __iter__(self):
        own = self.own()
        while self.place < len(own):
            self.place += 1
            self.reads += 1
            yield 100 * self.passes + own[self.place - 1]
        self.place, self.passes = 0, self.passes + 1

    def state_dict(self):
        return {"place": self.place, "passes": self.passes}

    def load_state_dict(self, state):
        self.place, self.passes = state["place"], state["passes"]


class Box(list):
    """What a collate function may return."""


class Ready(Stream):
    """Yields batches of 1, 2, 3, 1, ... numbers."""

    def __iter__(self):
        first = 0
        for index in range(self.count):
            self.reads += 1
            size = index % 3 + 1
            yield torch.arange(first, first + size)
            first += size


def options(**named):
    return {"dataloader_config": DataLoaderConfiguration(**named)}


def prepare(loader, **named):
    return Accelerator(cpu=True, **options(**named)).prepare(loader)


def ranks(make, world, **named):
    """The prepared loaders of all processes, in one."""
    return [
        prepare_data_loader(make(), num_processes=world, process_index=rank, **named)
        for rank in range(world)
    ]


def values(loader):
    return [batch.tolist() for batch in loader]


def flat(batches):
    return [n for batch in batches for n in batch]


def together(loaders):
    """One pass: for each step the batches of all ranks and the samples that count."""
    steps, counted = [], []
    for batches in zip(*loaders, strict=True):
        lists = [batch.tolist() for batch in batches]
        assert len({(one.real, one.padded, one.on_last) for one in loaders}) == 1
        steps.append(lists)
        counted += [n for piece in lists for n in piece][: loaders[0].real]
    assert all(loader.finished for loader in loaders)
    return steps, counted


def after(loader, batches):
    """The state in the body of the loop over this many batches, as a checkpoint carries it."""
    loader.trained = True
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return json.loads(json.dumps(loader.state_dict()))


# --- how a stream is split ------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_processes_together_read_a_stream_once_and_take_as_many_steps(world, drop_last):
    size = 2 * world
    for count in range(13):
        data = Stream(count)
        make = functools.partial(DataLoader, data, 2, drop_last=drop_last)
        steps, seen = together(ranks(make, world))
        assert seen == list(range(count // size * size if drop_last else count))
        for step in steps:
            assert len({len(piece) for piece in step}) == 1


@pytest.mark.parametrize("world", [2, 3])
def test_without_even_batches_no_sample_of_a_stream_is_read_twice(world):
    for count in range(world, 15):
        make = functools.partial(DataLoader, Stream(count), 2)
        steps, _ = together(ranks(make, world, even_batches=False))
        assert [n for step in steps for piece in step for n in piece] == list(range(count))
        sizes = [[len(piece) for piece in step] for step in steps]
        assert all(max(step) - min(step) <= 1 and min(step) >= 1 for step in sizes)
        assert all(sum(step) == 2 * world for step in sizes[:-1])


def test_a_stream_that_is_too_short_to_be_split_says_what_to_do():
    loaders = ranks(lambda: DataLoader(Stream(2), 2), 3, even_batches=False)
    for loader in loaders:
        with pytest.raises(ValueError, match="leave even_batches on"):
            list(loader)


def test_split_batches_makes_the_batch_size_that_of_all_processes():
    loaders = ranks(lambda: DataLoader(Stream(9), 4), 2, split_batches=True)
    assert {loader.total_batch_size for loader in loaders} == {4}
    assert together(loaders)[0] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [8]]]
    with pytest.raises(ValueError, match="multiple of 2"):
        ranks(lambda: DataLoader(Stream(9), 3), 2, split_batches=True)


def test_even_batches_can_be_set_for_the_next_pass_also_of_workers_that_live_on():
    loader = DataLoader(Stream(6), 2, num_workers=1, persistent_workers=True)
    rank = prepare_data_loader(loader, num_processes=2, process_index=0)
    assert values(rank) == [[0, 1], [4]]
    loader = DataLoader(Stream(5), 2, num_workers=1, persistent_workers=True)
    rank = prepare_data_loader(loader, num_processes=2, process_index=0)
    assert values(rank) == [[0, 1], [4]]
    rank.even_batches = False
    assert values(rank) == [[0, 1, 2]]


def test_each_worker_batches_what_it_reads_as_in_plain_torch():
    def make():
        return DataLoader(Stream(11), 2, num_workers=2)

    assert values(prepare(make())) == values(make())
    steps, _ = together(ranks(make, 2))
    assert steps[:3] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]], [[8], [10]]]


def test_a_stream_keeps_its_collate_function_and_its_other_options():
    loader = prepare(DataLoader(Stream(4), 2, collate_fn=Box, num_workers=1, prefetch_factor=3))
    assert [type(batch) for batch in loader] == [Box, Box]
    assert loader.prefetch_factor == 3


def test_ready_batches_go_to_the_processes_in_turn():
    def make():
        return DataLoader(Ready(5), batch_size=None)

    assert values(prepare(make())) == values(make())
    loaders = ranks(make, 2)
    kept = []
    steps = []
    for batches in zip(*loaders, strict=True):
        steps.append([batch.tolist() for batch in batches])
        counts = loaders[0].kept or [9, 9]
        kept.append([batch[:n].tolist() for batch, n in zip(batches, counts, strict=True)])
    assert steps == [[[0], [1, 2]], [[3, 4, 5], [6]], [[7, 8], [7, 8]]]
    assert kept == [*steps[:2], [[7, 8], []]]


@pytest.mark.parametrize("named", [{"even_batches": False}, {"split_batches": True}])
def test_ready_batches_are_not_split(named):
    with pytest.raises(ValueError, match="give it a batch_size"):
        prepare(DataLoader(Ready(5), batch_size=None), **named)


def test_a_dataset_without_set_epoch_has_its_generator_seeded_for_each_pass():
    class Noise(IterableDataset):
        generator = torch.Generator()

        def __iter__(self):
            return iter(torch.rand(3, generator=self.generator).tolist())

    loader = prepare_data_loader(DataLoader(Noise(), 3), data_seed=5)
    first, second = values(loader), values(loader)
    assert first != second
    again = prepare_data_loader(DataLoader(Noise(), 3), data_seed=5)
    assert [values(again), values(again)] == [first, second]
    assert values(prepare_data_loader(DataLoader(Noise(), 3), data_seed=6)) != first


# --- resume ---------------------------------------------------------------------------------

quiet = pytest.mark.filterwarnings("ignore:resuming an iterable dataset")


def places(last, workers):
    """Each place up to the last one; with workers, which take their time to start, every third."""
    return range(1, last + 1, 3 if workers else 1)


@quiet
@pytest.mark.parametrize(("workers", "epochs"), [(0, (0, 1)), (2, (1,))])
@pytest.mark.parametrize("kind", [Stream, Placed])
def test_any_batch_leads_to_the_rest_and_to_the_next_pass(kind, workers, epochs):
    def make():
        return prepare(DataLoader(kind(9), 2, num_workers=workers))

    whole = make()
    passes = [values(whole) for _ in range(3)]
    for epoch in epochs:
        for k in places(len(passes[epoch]), workers):
            loader = make()
            for _ in range(epoch):
                values(loader)
            state = after(loader, k)
            resumed = make()
            resumed.load_state_dict(state)
            assert values(resumed) == passes[epoch][k:]
            assert values(resumed) == passes[epoch + 1]


@quiet
@pytest.mark.parametrize("kind", [Stream, Placed])
def test_any_batch_leads_to_the_rest_also_where_nothing_is_read_twice(kind):
    def make():
        return ranks(lambda: DataLoader(kind(9), 2), 2, even_batches=False)

    whole = make()
    steps, _ = together(whole)
    following, _ = together(whole)
    for k in range(1, len(steps) + 1):
        loaders = make()
        states = [after(loader, k) for loader in loaders]
        resumed = make()
        for loader, state in zip(resumed, states, strict=True):
            loader.load_state_dict(state)
        assert together(resumed)[0] == steps[k:]
        assert together(resumed)[0] == following


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_with_a_state_is_not_read_up_to_the_place(workers):
    def make(data):
        return prepare(DataLoader(data, 2, num_workers=workers))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in places(6, workers):
            state = after(make(Placed(11)), k)
            data = Placed(11)
            resumed = make(data)
            resumed.load_state_dict(state)
            left = sum(len(batch) for batch in resumed)
            assert data.reads.item() == left


@pytest.mark.parametrize("kind", [Stream, Placed])
def test_reading_up_to_the_place_is_said_once(kind):
    named = {"use_stateful_dataloader": False} if kind is Placed else {}
    state = after(prepare(DataLoader(kind(11), 2), **named), 2)
    data = kind(11)
    resumed = prepare(DataLoader(data, 2), **named)
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match="reads and drops its first 4 samples"):
        values(resumed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(state)
        values(resumed)
    assert data.reads.item() == 22


@quiet
@pytest.mark.parametrize(
    ("saved", "here", "kind", "workers"),
    [
        *((*worlds, kind, 0) for worlds in [(1, 2), (2, 1), (2, 2)] for kind in (Stream, Placed)),
        (1, 2, Placed, 2),
        (2, 1, Stream, 2),
    ],
)
def test_a_stream_goes_on_at_the_sample_on_another_number_of_processes(kind, saved, here, workers):
    def make():
        return DataLoader(kind(22), 2, num_workers=workers)

    everything = sorted(range(22))
    for k in places(4, workers):
        before = ranks(make, saved)
        states = []
        for loader in before:
            loader.trained = True
        seen = []
        for step, batches in enumerate(zip(*before, strict=True), 1):
            seen += [n for batch in batches for n in batch.tolist()][: before[0].real]
            if step == k:
                states = [json.loads(json.dumps(one.state_dict())) for one in before]
                break
        assert all(state == states[0] for state in states)
        resumed = ranks(make, here)
        for loader in resumed:
            loader.load_state_dict(states[0])
        _, rest = together(resumed)
        assert sorted(seen + rest) == everything


def test_another_number_of_workers_is_told_and_reads_up_to_the_place():
    state = after(prepare(DataLoader(Placed(12), 2, num_workers=2)), 2)
    resumed = prepare(DataLoader(Placed(12), 2, num_workers=3))
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match="2 worker processes and is read with 3"):
        rest = values(resumed)
    assert sum(map(len, rest)) == 8
    one = prepare(DataLoader(Placed(12), 2, num_workers=1))
    one.load_state_dict(after(prepare(DataLoader(Placed(12), 2)), 2))
    with warnings.catch_warnings():  # one worker reads what none reads
        warnings.simplefilter("error")
        assert values(one) == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_a_state_that_the_dataset_does_not_take_is_told_and_reads_up_to_the_place():
    class Other(Placed):
        def load_state_dict(self, state):
            raise KeyError("cursor")

    state = after(prepare(DataLoader(Placed(9), 2)), 2)
    resumed = prepare(DataLoader(Other(9), 2))
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"does not take its saved state \(KeyError\('cursor'\)"):
        assert values(resumed) == [[4, 5], [6, 7], [8]]
    state["stream"] = {"something": "else"}
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match="not understood"):
        values(resumed)


@quiet
def test_skipping_batches_of_a_stream_begins_at_that_batch():
    def make():
        return prepare(DataLoader(Placed(7), 2))

    first, second = (lambda loader: (values(loader), values(loader)))(make())
    accel = Accelerator(cpu=True)
    for k in range(len(first) + 1):
        loader = make()
        assert values(accel.skip_first_batches(loader, k)) == first[k:]
        assert values(loader) == second
        if k:
            state = after(make(), k)
            loader = make()
            loader.load_state_dict(state)
            assert values(accel.skip_first_batches(loader, k)) == first[k:]
            assert values(loader) == second


@pytest.mark.parametrize("workers", [0, 2])
def test_an_earlier_state_can_be_loaded_into_loaders_that_have_moved_on(workers):
    def make():
        return prepare(
            DataLoader(Placed(11), 2, num_workers=workers, persistent_workers=workers > 0)
        )

    passes = (lambda loader: [values(loader) for _ in range(2)])(make())
    begin = json.loads(json.dumps(make().state_dict()))
    state = after(make(), 2)
    loader = make()
    for _ in range(2):
        values(loader)
        loader.load_state_dict(state)
        assert values(loader) == passes[0][2:]
        after(loader, 1)
        loader.load_state_dict(begin)
        assert values(loader) == passes[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_look_at_the_first_batch_takes_nothing_away(workers, persistent):
    if persistent and not workers:
        pytest.skip("there are none")
    accel = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(Placed(7), 2, num_workers=workers, persistent_workers=persistent)
    model, optimizer, loader = accel.prepare(model, optimizer, data)
    look = next(iter(loader)).tolist()
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        accel.backward(model(torch.ones(1)).sum())
        optimizer.step()
    assert seen[0] == look
    assert sorted(flat(seen)) == list(range(7))


def train(accel, loader, model, optimizer, stop):
    """Train on a stream, saving in the body of this batch, before and after its step."""
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        yield "before", seen
        accel.backward(model(batch.float().unsqueeze(1)).mean())
        optimizer.step()
        optimizer.zero_grad()
        yield "after", seen


@pytest.mark.parametrize(("place", "workers"), [("before", 0), ("after", 0), ("after", 2)])
def test_a_checkpoint_carries_the_place_in_a_stream(tmp_path, workers, place):
    def make():
        accel = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return accel, *accel.prepare(
            DataLoader(Placed(9), 2, num_workers=workers), model, optimizer
        )

    whole = [list(seen) for _, seen in train(*make(), stop=None)][-1]
    for k in places(4, workers):
        parts = make()
        for when, seen in train(*parts, stop=None):
            if when == place and len(seen) == k:
                parts[0].save_state(str(tmp_path / f"{k}"))
                break
        resumed = make()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed[0].load_state(str(tmp_path / f"{k}"), strict=True)
            assert resumed[0].current_run.epochs_done == 0  # asked: the rest may be empty
            rest = [list(seen) for _, seen in train(*resumed, stop=None)][-1]
        # What was delivered and not trained on is delivered again.
        assert rest == whole[k - 1 :] if place == "before" else rest == whole[k:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_stream_draws_no_base_seed_a_second_time(tmp_path, workers):
    """Dropout goes on with the numbers that it would have had."""

    def prepared():
        accel = Accelerator(cpu=True)
        torch.manual_seed(4)
        model = torch.nn.Linear(1, 1)
        model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        return accel, accel.prepare(DataLoader(Placed(9), 2, num_workers=workers)), model, optimizer

    def drawn(accel, loader, model, optimizer, stop=None):
        numbers = []
        for batch in loader:
            accel.backward(model(batch.float().unsqueeze(1)).mean())
            optimizer.step()
            optimizer.zero_grad()
            numbers.append(torch.rand(()).item())
            if len(numbers) == stop:
                accel.save_state(str(tmp_path / "c"))
                break
        return numbers

    whole = drawn(*prepared())
    drawn(*prepared(), stop=2)
    parts = prepared()
    torch.manual_seed(99)
    parts[0].load_state(str(tmp_path / "c"))
    assert drawn(*parts) == whole[2:]


def test_a_strict_resume_refuses_a_stream_that_cannot_go_on_exactly(tmp_path):
    def make(workers):
        accel = Accelerator(cpu=True)
        return accel, accel.prepare(DataLoader(Placed(16), 2, num_workers=workers))

    accel, loader = make(2)
    for _ in loader:
        accel.save_state(str(tmp_path / "c"))
        break
    other, _ = make(3)
    with pytest.raises(ResumeError, match="2 worker processes and is read with 3"):
        other.load_state(str(tmp_path / "c"), strict=True)
    with pytest.warns(UserWarning, match="does not go on exactly"):
        other.load_state(str(tmp_path / "c"))


# --- workers --------------------------------------------------------------------------------


def test_workers_end_with_a_loop_that_is_left():
    loader = prepare(DataLoader(Stream(50), 2, num_workers=2))
    children = set(torch.multiprocessing.active_children())
    for _ in loader:
        started = set(torch.multiprocessing.active_children()) - children
        assert len(started) == 2
        break
    assert not any(worker.is_alive() for worker in started)


class FailingStream(IterableDataset):
    def __iter__(self):
        yield from range(6)
        raise OSError("cannot be read")


def test_workers_end_with_a_pass_that_fails_although_its_error_is_kept():
    batches = iter(prepare(DataLoader(FailingStream(), 1, num_workers=2)))
    children = set(torch.multiprocessing.active_children())
    next(batches)
    started = set(torch.multiprocessing.active_children()) - children
    with pytest.raises(OSError, match="cannot be read") as kept:
        list(batches)
    assert kept.traceback
    assert len(started) == 2
    assert [worker.exitcode for worker in started] == [0, 0]


@pytest.mark.parametrize("broken_off", [False, True])
def test_workers_that_live_on_are_told_to_end_when_their_accelerator_goes(broken_off):
    accel = Accelerator(cpu=True)
    loader = accel.prepare(DataLoader(range(8), 2, num_workers=2, persistent_workers=True))
    for _ in loader:
        if broken_off:
            break
    workers = list(loader._iterator._workers)
    assert all(worker.is_alive() for worker in workers)
    del loader, accel
    gc.collect()
    # Not killed, and they did not have to find out by themselves.
    assert [worker.exitcode for worker in workers] == [0, 0]


# --- IterableDatasetShard -------------------------------------------------------------------


def shard(count, size, **named):
    return [
        list(IterableDatasetShard(Stream(count), size, False, 2, rank, **named))
        for rank in range(2)
    ]


def test_a_shard_by_hand_yields_the_samples_of_one_process():
    assert shard(8, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shard(8, 4, split_batches=True) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert shard(5, 2) == [[0, 1, 4, 0], [2, 3, 1, 2]]
    assert shard(1, 2) == [[0, 0], [0, 0]]
    assert shard(7, 2, even_batches=False) == [[0, 1, 4, 5], [2, 3, 6]]
    dropped = [list(IterableDatasetShard(range(7), 2, True, 2, rank)) for rank in range(2)]
    assert dropped == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="multiple of 2"):
        IterableDatasetShard(range(7), 3, num_processes=2, split_batches=True)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_a_shard_by_hand_knows_its_length(split, even, drop):
    for count in range(12):
        for rank in range(2):
            one = IterableDatasetShard(range(count), 2, drop, 2, rank, split, even)
            assert len(one) == len(list(one))


def test_a_shard_by_hand_seeds_a_generator_or_tells_the_epoch():
    class Noise(IterableDataset):
        generator = torch.Generator()

        def __iter__(self):
            return iter(torch.rand(4, generator=self.generator).tolist())

    one = IterableDatasetShard(Noise(), 2)
    first = list(one)
    assert list(one) == first
    one.set_epoch(1)
    assert list(one) != first

    class Told(Stream):
        def set_epoch(self, epoch):
            self.epoch = epoch

    told = IterableDatasetShard(Told(3), 2)
    told.set_epoch(4)
    assert told.dataset.epoch == 4


# --- Hugging Face datasets on one process ---------------------------------------------------


@pytest.fixture
def hub_threads():
    """The library's own threads, which load ahead, need a moment to end."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        if not isinstance(thread, TMonitor):  # the progress bar's, which never ends
            thread.join()


def hub_stream(count=10, shards=3):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(count))})
    return rows.to_iterable_dataset(num_shards=shards).with_format("torch")


@pytest.mark.usefixtures("hub_threads")
def test_a_stream_of_the_hub_goes_on_where_it_was():
    def make():
        return prepare(DataLoader(hub_stream().shuffle(seed=3), 2))

    def read(loader):
        return [batch["x"].tolist() for batch in loader]

    whole = make()
    passes = [read(whole) for _ in range(2)]
    assert [sorted(flat(one)) for one in passes] == [list(range(10))] * 2
    for k in range(1, len(passes[0]) + 1):
        state = after(make(), k)
        resumed = make()
        resumed.load_state_dict(state)
        rest = read(resumed)
        # Its shuffle buffer is not part of its state: these samples come in another order.
        assert len(flat(rest)) <= len(flat(passes[0][k:]))
        assert read(resumed) == passes[1]


@pytest.mark.usefixtures("hub_threads")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_ordered_stream_of_the_hub_goes_on_at_the_sample(workers):
    def make():
        return prepare(DataLoader(hub_stream(), 2, num_workers=workers))

    whole = [batch["x"].tolist() for batch in make()]
    for k in places(len(whole), workers):
        state = after(make(), k)
        resumed = make()
        resumed.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [batch["x"].tolist() for batch in resumed] == whole[k:]
        assert sorted(n for batch in resumed for n in batch["x"].tolist()) == list(range(10))


@pytest.mark.parametrize(("world", "copies"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_only_a_single_reader_draws_its_base_seed_as_in_a_plain_loop(world, copies):
    shards = IterableShards(range(5), batch_size=2, drop_last=False, rank=0, world_size=world)
    source = StreamSource(DataLoader(range(5)), shards, copies=copies)
    assert source.base_seed_first is (world == copies == 1)
    assert source.record() is None  # before its first pass
    assert source.first_batch() == 0
    source.begin(seed=0, epoch=0, position=0)
    assert source.draws_base_seed is source.base_seed_first
    assert source.record() == {"base": None}  # without workers there is none


def test_a_pass_that_goes_on_begins_with_a_later_batch_and_draws_nothing():
    shards = IterableShards(range(9), batch_size=2, drop_last=False, rank=0, world_size=1)
    source = StreamSource(DataLoader(range(9)), shards)
    with pytest.warns(UserWarning, match="reads and drops its first 6 samples"):
        source.begin(seed=0, epoch=0, position=6, record={"base": None})
    assert source.first_batch() == 3
    assert source.base_seed_first
    assert source.draws_base_seed is False


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "remainder"),
    [(2, False, 3), (2, True, -1), (None, False, -1), (4, False, 7)],
)
def test_samples_over_the_full_batches_are_counted_unless_dropped(batch_size, drop_last, remainder):
    shards = IterableShards(
        Sized(), batch_size=batch_size, drop_last=drop_last, rank=0, world_size=2
    )
    assert StreamSource(DataLoader(range(5)), shards).remainder == remainder


class Sized(IterableDataset):
    def __len__(self):
        return 7

    def __iter__(self):
        return iter(range(7))


@pytest.mark.parametrize(("batch_size", "padded"), [(2, 4), (None, 4), (2, 3), (None, 3)])
def test_ready_batches_alone_are_repeated_as_a_whole(batch_size, padded):
    shards = IterableShards(Sized(), batch_size=batch_size, drop_last=False, rank=0, world_size=2)
    source = StreamSource(DataLoader(range(5)), shards)
    source.begin(seed=0, epoch=0, position=0)
    _, delivery = next(source.deliver(iter([(None, Part(3, padded))])))
    assert (delivery.kept is not None) is (batch_size is None and padded == 4)
