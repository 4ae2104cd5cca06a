"""Streams on real processes: replicated reading, and shards of their own that are uneven."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_callbacks import Accelerator
from accel_callbacks.data.config import DataLoaderConfiguration
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(**named):
    config = DataLoaderConfiguration(**named)
    return Accelerator(cpu=True, timeout=BOUND, dataloader_config=config)


class Sharded(IterableDataset):
    """Lists of numbers; what each process reads of them is told by ``shard``."""

    def __init__(self, parts, fails_at=None):
        self.parts, self.fails_at, self.place, self.epoch = parts, fails_at, 0, 0
        self.read = []

    @property
    def num_shards(self):
        return len(self.parts)

    def shard(self, num_shards, index):
        return type(self)(self.parts[index::num_shards], self.fails_at)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        parts = self.parts[info.id :: info.num_workers] if info else self.parts
        own = [1000 * self.epoch + n for part in parts for n in part]
        while self.place < len(own):
            self.place += 1
            number = own[self.place - 1]
            if number == self.fails_at:
                raise OSError(f"number {number} cannot be read")
            self.read.append(number)
            yield number
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def numbers(loader):
    return [batch.tolist() for batch in loader]


UNEVEN = [[0, 1, 2, 3, 4, 5, 6], [10, 11, 12], [20], [30, 31, 32, 33]]


def pass_over(parts, workers, epochs, named):
    """(own batches, gathered metrics, flags of the last batch, what was read) of the last pass."""
    drop_last = named.pop("drop_last", False)
    accel = accelerator(**named)
    loader = accel.prepare(DataLoader(Sharded(parts), 2, num_workers=workers, drop_last=drop_last))
    for _ in range(epochs):
        own, gathered, objects, last = [], [], [], []
        with accel.evaluate():
            for batch in loader:
                own.append(batch.tolist())
                last.append(loader.on_last)
                gathered += accel.gather_for_metrics(batch).tolist()
                objects += accel.gather_for_metrics(batch.tolist(), use_gather_object=True)
    return own, gathered, objects, last


@pytest.mark.parametrize("workers", [0, 2])
def test_uneven_shards_are_read_once_and_metrics_count_each_sample_once(pool, workers):
    everything = sorted(n for part in UNEVEN for n in part)
    results = pool.run(pass_over, UNEVEN, workers, 1, {})
    for _, gathered, objects, last in results:
        assert sorted(gathered) == sorted(objects) == everything
        assert last == [False] * (len(last) - 1) + [True]
    assert len(results[0][0]) == len(results[1][0])
    mine = [{n for batch in own for n in batch} for own, *_ in results]
    assert mine[0] == {0, 1, 2, 3, 4, 5, 6, 20}
    assert mine[1] == {10, 11, 12, 30, 31, 32, 33}


def test_without_even_batches_shards_lose_no_sample_either(pool):
    results = pool.run(pass_over, [[0, 1, 2, 3, 4, 5, 6], [10]], 0, 1, {"even_batches": False})
    assert [own for own, *_ in results] == [[[0, 1], [2, 3], [4, 5], [6]], [[10]] * 4]
    assert [gathered for _, gathered, *_ in results] == [[0, 1, 10, 2, 3, 4, 5, 6]] * 2


def test_a_process_whose_shards_are_empty_gets_something_to_repeat(pool):
    results = pool.run(pass_over, [[0, 1, 2], []], 0, 1, {})
    assert [own for own, *_ in results] == [[[0, 1], [2]], [[0, 1], [0, 1]]]
    assert [gathered for _, gathered, *_ in results] == [[0, 1, 2]] * 2
    results = pool.run(pass_over, [[], []], 0, 1, {})
    assert [own for own, *_ in results] == [[], []]


def test_drop_last_drops_what_is_no_full_global_batch(pool):
    results = pool.run(pass_over, [[0, 1, 2, 3, 4], [10, 11, 12]], 0, 1, {"drop_last": True})
    assert [own for own, *_ in results] == [[[0, 1]], [[10, 11]]]
    assert [last for *_, last in results] == [[True]] * 2


def test_shards_are_told_the_epoch(pool):
    results = pool.run(pass_over, [[0, 1], [10, 11]], 0, 3, {})
    assert [own for own, *_ in results] == [[[2000, 2001]], [[2010, 2011]]]


def too_few_shards():
    accel = accelerator()
    data = Sharded([[0, 1, 2, 3, 4, 5]])
    loader = accel.prepare(DataLoader(data, 2))
    return numbers(loader), data.read


def test_with_fewer_shards_than_processes_each_reads_the_whole_stream(pool):
    results = pool.run(too_few_shards)
    assert [own for own, _ in results] == [[[0, 1], [4]], [[2, 3], [5]]]
    assert [read for _, read in results] == [[0, 1, 2, 3, 4, 5]] * 2


def split_already():
    data = Sharded(UNEVEN)
    data._distributed = "config"
    accelerator().prepare(DataLoader(data, 2))


def test_a_dataset_that_is_split_already_is_refused(pool):
    for kind, text in pool.outcomes(split_already):
        assert kind == "ValueError"
        assert "give the loader the whole dataset" in text


def read_what_fails(workers):
    loader = accelerator().prepare(DataLoader(Sharded(UNEVEN, fails_at=12), 2, num_workers=workers))
    return numbers(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_one_process_is_one_of_all(pool, workers):
    (first, told), (second, own) = pool.outcomes(read_what_fails, workers)
    assert (first, second) == ("RemoteError", "OSError")
    assert "rank 1 failed in reading the data" in told
    assert "number 12 cannot be read" in told
    assert "number 12 cannot be read" in own


def leave_early():
    accel = accelerator()
    loader = accel.prepare(DataLoader(Sharded(UNEVEN), 2))
    for _ in loader:
        break
    return numbers(loader)


def test_a_pass_that_was_left_is_followed_by_another(pool):
    results = pool.run(leave_early)
    assert all(results)


def train(accel, loader, folder, save_at):
    """Train to the end, saving once in the body; returns the batches of this process."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accel.prepare(model, optimizer)
    if os.path.exists(folder) and save_at is None:
        accel.load_state(folder, strict=True)
        assert accel.current_run.epochs_done == 0  # asked: the rest may be empty
    seen = []
    for batch in loader:
        seen.append(batch[: loader.kept[accel.process_index] if loader.kept else None].tolist())
        accel.backward(model(batch.float().unsqueeze(1)).mean())
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) == save_at:
            accel.save_state(folder)
    following = numbers(loader)
    return seen, following


def saved_and_resumed(folder, workers, parts):
    def prepare():
        accel = accelerator()
        return accel, accel.prepare(DataLoader(Sharded(parts), 2, num_workers=workers))

    whole, following = train(*prepare(), f"{folder}/none", save_at=-1)
    for k in range(1, len(whole) + 1):
        target = f"{folder}/{k}"
        train(*prepare(), target, save_at=k)
        rest, after = train(*prepare(), target, save_at=None)
        assert rest == whole[k:], (k, rest, whole)
        assert after == following
    return len(whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_process_goes_on_in_its_own_shards(pool, tmp_path, workers):
    parts = UNEVEN if workers == 0 else [part[:4] for part in UNEVEN]
    steps = pool.run(saved_and_resumed, str(tmp_path), workers, parts)
    assert steps[0] == steps[1] > 2


def save_sharded(folder, k):
    accel = accelerator()
    loader = accel.prepare(DataLoader(Sharded(UNEVEN), 2))
    seen = []
    for batch in loader:
        seen += accel.gather_for_metrics(batch).tolist()
        if loader.batch_index + 1 == k:
            accel.save_state(folder)
            return seen
    return seen


def load_with(folder, strict):
    accel = accelerator()
    loader = accel.prepare(DataLoader(Sharded(UNEVEN), 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accel.load_state(folder, strict=strict)
        rest = numbers(loader)
    return rest, [str(one.message) for one in caught]


def test_shards_on_another_number_of_processes_are_told_not_to_be_exact(pool, tmp_path):
    from accel_callbacks import ResumeError

    folder = str(tmp_path / "sharded")
    seen = pool.run(save_sharded, folder, 2)
    assert len(seen[0]) == 8
    with pytest.raises(ResumeError, match="own shards"):
        load_with(folder, True)
    rest, told = load_with(folder, False)
    assert sum(map(len, rest)) == sum(map(len, UNEVEN)) - 8
    assert any("a stream does not go on exactly" in text for text in told)
    assert not any("order of samples goes on exactly" in text for text in told)
    # and the other way round
    folder = str(tmp_path / "whole")
    save_alone(folder)
    for outcome in pool.outcomes(load_with, folder, True):
        assert outcome[0] == "ResumeError"
    for rest, told in pool.run(load_with, folder, False):
        assert any("now reads its own shards" in text for text in told)
        assert len(rest) < 5


def save_alone(folder):
    accel = Accelerator(cpu=True)
    loader = accel.prepare(DataLoader(Sharded(UNEVEN), 2))
    for _ in loader:
        accel.save_state(folder)
        break


def hub(workers):
    import datasets

    accel = accelerator()
    rows = datasets.Dataset.from_dict({"x": list(range(11))})
    data = rows.to_iterable_dataset(num_shards=4).with_format("torch")
    loader = accel.prepare(DataLoader(data, 2, num_workers=workers))
    own, gathered = [], []
    with accel.evaluate():
        for batch in loader:
            own += batch["x"].tolist()
            gathered += accel.gather_for_metrics(batch)["x"].tolist()
    return own, gathered


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_of_the_hub_is_sharded_at_the_source(pool, workers):
    pytest.importorskip("datasets")
    (first, gathered), (second, _) = pool.run(hub, workers)
    assert sorted(gathered) == list(range(11))
    assert not set(first) & set(second)


class Ready(Sharded):
    """Its items are batches."""

    def __iter__(self):
        return (torch.tensor(part) for part in self.parts)


def read_ready():
    accel = accelerator()
    loader = accel.prepare(DataLoader(Ready([[0, 1], [10, 11, 12], [20]]), batch_size=None))
    gathered = []
    with accel.evaluate():
        for batch in loader:
            gathered.append(accel.gather_for_metrics(batch).tolist())
    return gathered


def test_ready_batches_of_shards_are_counted_as_a_whole(pool):
    assert pool.run(read_ready) == [[[0, 1, 10, 11, 12], [20]]] * 2


class Whole(IterableDataset):
    """Not sharded."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return (torch.tensor(item) for item in self.items)


def read_whole(items, batch_size, named):
    accel = accelerator(**named)
    loader = accel.prepare(DataLoader(Whole(items), batch_size=batch_size))
    gathered = []
    with accel.evaluate():
        for batch in loader:
            gathered.append(accel.gather_for_metrics(batch).tolist())
    return gathered


def test_each_sample_of_a_stream_is_counted_once(pool):
    assert pool.run(read_whole, list(range(5)), 2, {}) == [[[0, 1, 2, 3], [4]]] * 2
    uneven = pool.run(read_whole, list(range(5)), 2, {"even_batches": False})
    assert uneven == [[[0, 1, 2, 3, 4]]] * 2
    ready = [[0], [0, 1], [0, 1, 2]]
    assert pool.run(read_whole, ready, None, {}) == [[[0, 0, 1], [0, 1, 2]]] * 2
