"""The main process reads for all: the same batches as without, and errors that reach everybody."""

from __future__ import annotations

import collections
import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from accel_callbacks import Accelerator
from accel_callbacks.data.config import DataLoaderConfiguration
from accel_callbacks.data.dispatch import DataLoaderDispatcher
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(dispatch=True, **named):
    config = DataLoaderConfiguration(dispatch_batches=dispatch, **named)
    return Accelerator(cpu=True, timeout=BOUND, dataloader_config=config)


class Rows(Dataset):
    """Remembers, also across worker processes, how often it was read."""

    def __init__(self, count, fails_at=None):
        self.count, self.fails_at = count, fails_at
        self.reads = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.reads += 1
        if index == self.fails_at:
            raise OSError(f"row {index} cannot be read")
        return index


class Stream(IterableDataset):
    """The same as a stream, and it knows where it is."""

    def __init__(self, count, fails_at=None):
        self.rows = Rows(count, fails_at)
        self.reads = self.rows.reads
        self.place = 0

    def __iter__(self):
        while self.place < self.rows.count:
            self.place += 1
            yield self.rows[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Varying(BatchSampler):
    """Batches of 1, 2, 3, ... shuffled indices."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        order, first, size = torch.randperm(self.count).tolist(), 0, 1
        while first < self.count:
            yield order[first : first + size]
            first, size = first + size, size + 1

    def __len__(self):
        return len(list(iter(self)))


class Ready(Stream):
    def __iter__(self):
        return (torch.full((n % 2 + 1,), n) for n in super().__iter__())


KINDS = {
    "in order": lambda w: DataLoader(Rows(7), 2, num_workers=w),
    "shuffled": lambda w: DataLoader(Rows(9), 2, shuffle=True, num_workers=w),
    "drop_last": lambda w: DataLoader(Rows(9), 2, shuffle=True, drop_last=True, num_workers=w),
    "batch sampler": lambda w: DataLoader(Rows(12), batch_sampler=Varying(12), num_workers=w),
    "own batch sampler": lambda w: DataLoader(
        Rows(7), batch_sampler=BatchSampler(RandomSampler(range(7)), 2, False), num_workers=w
    ),
    "no batching": lambda w: DataLoader(Rows(5), batch_size=None, num_workers=w),
    "stream": lambda w: DataLoader(Stream(7), 2, num_workers=w),
    "stream, drop_last": lambda w: DataLoader(Stream(7), 2, drop_last=True, num_workers=w),
    "ready batches": lambda w: DataLoader(Ready(5), batch_size=None, num_workers=w),
}


def plain(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def two_passes(kind, workers, dispatch, named):
    """For each batch what it is and what is known of it; and how often the dataset was read."""
    torch.manual_seed(3)
    accel = accelerator(dispatch, **named)
    raw = KINDS[kind](workers)
    loader = accel.prepare(raw)
    assert isinstance(loader, DataLoaderDispatcher) == bool(dispatch)
    seen = [
        (plain(batch), loader.real, loader.padded, loader.kept, loader.left, loader.on_last)
        for _ in range(2)
        for batch in loader
    ]
    try:
        length = len(loader)
    except TypeError:
        length = None
    return seen, length, raw.dataset.reads.item()


EVEN = pytest.mark.parametrize("named", [{}, {"even_batches": False}, {"split_batches": True}])


@pytest.mark.first
@EVEN
@pytest.mark.parametrize("kind", KINDS)
def test_dispatched_batches_are_those_that_each_process_would_read(pool, kind, named):
    if named and kind in ("no batching", "ready batches"):
        pytest.skip("refused, and tested where that is")
    alone = pool.run(two_passes, kind, 0, None, named)
    sent = pool.run(two_passes, kind, 0, True, named)
    for (seen, length, _), (expected, known, _) in zip(sent, alone, strict=True):
        assert seen == expected
        assert length == known
    assert sent[0][2] > 0
    assert sent[1][2] == 0, "only the main process reads"


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_workers_of_the_main_process_may_read(pool, kind):
    alone = pool.run(two_passes, kind, 0 if kind == "shuffled" else 2, False, {})
    sent = pool.run(two_passes, kind, 2, True, {})
    assert [seen for seen, *_ in sent] == [seen for seen, *_ in alone]
    assert sent[1][2] == 0


def idle_workers():
    loader = accelerator().prepare(DataLoader(Rows(6), 1, num_workers=2, persistent_workers=True))
    list(loader)
    return loader.num_workers, len(torch.multiprocessing.active_children())


def test_only_the_main_process_starts_workers(pool):
    assert pool.run(idle_workers) == [(2, 2), (0, 0)]


Point = collections.namedtuple("Point", "x label")


def structured(samples):
    """Everything that a batch may be made of; texts and sizes differ from batch to batch."""
    numbers = torch.tensor(samples)
    return {
        "point": Point(numbers.double() / 2, [f"row {n}" for n in samples]),
        "mask": numbers.unsqueeze(1) > torch.arange(int(numbers.max()) + 1),
        "count": len(samples),
        3: (numbers.to(torch.bfloat16), torch.tensor(samples[0]), torch.empty(0, 4)),
        "complex": torch.complex(numbers.float(), numbers.float()),
        "sparse": torch.eye(2).to_sparse(),
        "nothing": None,
    }


def as_text(batch):
    parts = {key: value for key, value in batch.items() if key != "sparse"}
    return repr(parts) + repr(batch["sparse"].to_dense()), type(batch["point"]).__name__


def read_structured(dispatch):
    loader = accelerator(dispatch).prepare(DataLoader(Rows(11), 2, collate_fn=structured))
    return [as_text(batch) for batch in loader]


def test_any_structure_arrives_as_it_was(pool):
    assert pool.run(read_structured, True) == pool.run(read_structured, False)


def count_structures():
    """How often the structure was sent."""
    from accel_callbacks.data import dispatch as scattering

    sent = []
    original = scattering.Sender._structures

    def counting(self, layouts):
        sent.append(len(layouts))
        original(self, layouts)

    scattering.Sender._structures = counting
    try:
        loader = accelerator().prepare(DataLoader(Rows(21), 2))
        batches = len(list(loader))
    finally:
        scattering.Sender._structures = original
    return batches, len(sent)


def test_the_structure_is_sent_only_when_it_changes(pool):
    # The last batch is a smaller one.
    assert pool.run(count_structures) == [(6, 2), (6, 0)]


def slices(batch, part, process_index=None, num_processes=None):
    assert num_processes == 2
    return batch[part] + 1000 * process_index


def read_sliced(make, named):
    accel = accelerator(**named)
    loader = accel.prepare_data_loader(
        DataLoader({"rows": Rows, "stream": Stream}[make](5), 2), slice_fn_for_dispatch=slices
    )
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("make", ["rows", "stream"])
def test_the_users_own_function_slices_the_batch(pool, make):
    first, second = pool.run(read_sliced, make, {})
    assert first == [[0, 1], [4]]
    assert second == [[1002, 1003], [1000 if make == "rows" else 1004]]
    uneven = pool.run(read_sliced, make, {"even_batches": False})
    assert uneven == [[[0, 1, 2]], [[1003, 1004]]]


def fail(kind, workers):
    data = Rows(9, fails_at=6) if kind == "rows" else Stream(9, fails_at=6)
    loader = accelerator().prepare(DataLoader(data, 2, num_workers=workers))
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_an_error_of_the_dataset_is_one_of_all_processes(pool, kind, workers):
    (first, own), (second, told) = pool.outcomes(fail, kind, workers)
    assert (first, second) == ("OSError", "RemoteError")
    assert "row 6 cannot be read" in own
    assert "rank 0 failed in reading the data" in told
    assert "row 6 cannot be read" in told


def unsendable(samples):
    return {"numbers": torch.tensor(samples), "function": lambda: samples}


def send_what_cannot_be_sent():
    loader = accelerator().prepare(DataLoader(Rows(4), 2, collate_fn=unsendable))
    return list(loader)


def test_what_cannot_be_sent_is_an_error_of_all_processes(pool):
    (first, own), (second, told) = pool.outcomes(send_what_cannot_be_sent)
    assert first != "ok"
    assert "unsendable" in own
    assert second == "RemoteError"
    assert "a batch cannot be sent" in told


class BrokenSampler(RandomSampler):
    def __iter__(self):
        raise LookupError("no such index file")


def fail_in_the_sampler():
    data = Rows(4)
    loader = accelerator().prepare(DataLoader(data, 2, sampler=BrokenSampler(data)))
    return list(loader)


def test_an_error_of_the_sampler_is_one_of_all_processes(pool):
    (first, _), (second, told) = pool.outcomes(fail_in_the_sampler)
    assert (first, second) == ("LookupError", "RemoteError")
    assert "no such index file" in told


def leave_and_go_on():
    accel = accelerator()
    loader = accel.prepare(DataLoader(Rows(9), 2))
    for _ in loader:
        break
    gathered = []
    with accel.evaluate():
        for batch in loader:
            gathered += accel.gather_for_metrics(batch).tolist()
    return gathered


def test_after_a_break_comes_a_whole_pass_and_metrics_count_once(pool):
    assert pool.run(leave_and_go_on) == [list(range(9))] * 2


def train(accel, loader, folder, save_at):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accel.prepare(model, optimizer)
    if save_at is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            accel.load_state(folder, strict=True)
            assert accel.current_run.epochs_done == 0  # asked: the rest may be empty
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        accel.backward(model(batch.float().unsqueeze(1)).mean())
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) == save_at:
            accel.save_state(folder)
    return seen, [batch.tolist() for batch in loader]


def resume_everywhere(kind, workers, folder):
    def prepare():
        torch.manual_seed(7)
        accel = accelerator()
        return accel, accel.prepare(KINDS[kind](workers))

    whole, following = train(*prepare(), folder, save_at=-1)
    for k in range(1, len(whole) + 1):
        train(*prepare(), f"{folder}/{k}", save_at=k)
        rest, after = train(*prepare(), f"{folder}/{k}", save_at=None)
        assert (rest, after) == (whole[k:], following), k
    return len(whole)


@pytest.mark.first
@pytest.mark.parametrize(("kind", "workers"), [("shuffled", 0), ("stream", 0), ("stream", 2)])
def test_a_dispatched_pass_goes_on_where_it_was(pool, tmp_path, kind, workers):
    assert pool.run(resume_everywhere, kind, workers, str(tmp_path))[0] >= 2


def wrong_number():
    from accel_callbacks import prepare_data_loader

    prepare_data_loader(
        DataLoader(Rows(4)), num_processes=3, process_index=0, dispatch_batches=True
    )


def test_batches_go_to_the_processes_that_there_are(pool):
    for kind, text in pool.outcomes(wrong_number):
        assert kind == "ValueError"
        assert "leave num_processes=3 out" in text


def numbers_after_a_resume(folder):
    def made():
        accel = accelerator()
        model = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        return accel, *accel.prepare(model, sgd, DataLoader(Stream(12), 2))

    accel, model, optimizer, loader = made()
    for batch in loader:
        accel.backward(model(batch.float().reshape(-1, 1)).sum())
        optimizer.step()
        if accel.current_run.batch_idx == 1:
            accel.save_state(folder)
    accel, model, optimizer, loader = made()
    accel.load_state(folder)
    return [accel.current_run.batch_idx for _ in loader]


def test_batches_have_the_same_number_on_all_processes_after_a_resume(pool, tmp_path):
    assert pool.run(numbers_after_a_resume, str(tmp_path)) == [[2], [2]]


def test_the_layout_of_a_dispatched_pass_is_that_of_its_shares():
    layouts = []
    for dispatch in (False, True):
        loader = accelerator(dispatch).prepare(DataLoader(Rows(5), 2))
        assert [plain(batch) for batch in loader] == [[0, 1], [2, 3], [4]]
        layouts.append(loader.layout())
    assert layouts[1].pop("source") == "WholeShares"
    assert layouts[0].pop("source") == "ShareSource"
    assert layouts[1] == layouts[0]
