"""A loader goes on exactly where it stopped, on the same or another number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from accel_callbacks import Accelerator, DataLoaderConfiguration
from tests.support.bound import BOUND

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

WORLDS = [(1, 1), (2, 2), (1, 2), (2, 1), (2, 4), (4, 2)]
every_change = pytest.mark.parametrize(("before", "after"), WORLDS)
COUNT, GLOBAL_BATCH = 27, 8


class Counted(Dataset):
    """Counts how often each sample is read, in worker processes too."""

    def __init__(self) -> None:
        self.reads = torch.zeros(COUNT, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        self.reads[index] += 1
        return index


class Varying(BatchSampler):
    """Shuffled batches of 1, 2, 3, 1, 2, 3, ... samples."""

    def __iter__(self):
        order, size = list(self.sampler), 0
        while order:
            size = size % 3 + 1
            yield order[:size]
            order = order[size:]

    def __len__(self) -> int:
        return 14


def prepared(batch_size: int | None, workers: int, even: bool, seeded: bool = True) -> tuple:
    config = DataLoaderConfiguration(even_batches=even, seeded_order=seeded)
    accel = Accelerator(cpu=True, timeout=BOUND, dataloader_config=config)
    options: dict = {"batch_size": batch_size, "shuffle": True}
    if batch_size is None:
        options = {"batch_sampler": Varying(RandomSampler(range(COUNT)), 2, False)}
    return accel, accel.prepare(DataLoader(Counted(), num_workers=workers, **options))


def stops_everywhere(
    batch_size: int | None, workers: int, even: bool, seeded: bool = True
) -> tuple[list, list]:
    """The global batches of three epochs, and the state after each batch of the second."""
    torch.manual_seed(11)
    accel, loader = prepared(batch_size, workers, even, seeded)
    epochs, states = [], []
    for epoch in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(accel.gather_for_metrics(batch).tolist())
            if epoch == 1:
                states.append(json.loads(json.dumps(loader.state_dict())))
    return epochs, states


def goes_on(
    states: list, batch_size: int | None, workers: int, even: bool, seeded: bool = True
) -> list:
    """For each state the rest of its epoch, the next one, and whether only these were read."""
    torch.manual_seed(99)
    results = []
    for state in states:
        accel, loader = prepared(batch_size, workers, even, seeded)
        loader.load_state_dict(state)
        epochs: list = [[], []]
        own: set = set()
        for batches in epochs:
            for batch in loader:
                own |= set(batch.tolist())
                batches.append(accel.gather_for_metrics(batch).tolist())
            if batches is epochs[0]:
                read = set(loader.dataset.reads.nonzero()[:, 0].tolist())
                nothing_else = read == own
        results.append([*epochs, nothing_else])
    return results


@pytest.fixture(scope="module")
def run_on(pool, pool_of_4) -> Callable[..., Any]:
    """Runs a function on one (this), two or four processes; they live as long as the module."""
    pools = {2: pool, 4: pool_of_4}

    def run(world: int, function: Callable[..., Any], *args: Any) -> Any:
        results = [function(*args)] if world == 1 else pools[world].run(function, *args)
        assert all(result == results[0] for result in results)
        return results[0]

    return run


def flat(batches: list) -> list:
    return [sample for batch in batches for sample in batch]


# Each change with each of both, and both with each other.
half = pytest.mark.parametrize(
    ("before", "after", "even", "seeded"),
    [
        (before, after, even, (number + even) % 2 == 1)
        for number, (before, after) in enumerate(WORLDS)
        for even in (True, False)
    ],
)


@half
def test_the_rest_and_the_next_epoch_are_exact_from_every_batch_on(
    run_on, before, after, even, seeded
):
    epochs, states = run_on(before, stops_everywhere, GLOBAL_BATCH // before, 0, even, seeded)
    assert all(sorted(flat(epoch)) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(flat(epoch)) for epoch in epochs}) == 3
    results = run_on(after, goes_on, states, GLOBAL_BATCH // after, 0, even, seeded)
    for taken, (rest, following, nothing_else) in enumerate(results, start=1):
        assert nothing_else
        if not seeded:  # drawn from the generators of the process, which are not restored here
            following = epochs[2]
        if even:  # the same global batches; how a tail is joined depends on the processes
            assert rest == epochs[1][taken:]
            assert following == epochs[2]
        else:
            assert flat(rest) == flat(epochs[1][taken:])
            assert flat(following) == flat(epochs[2])
    assert len(results) == len(epochs[1]) == (4 if even or before < 4 else 3)


@every_change
def test_with_another_global_batch_the_rest_is_still_read_once(run_on, before, after):
    epochs, states = run_on(before, stops_everywhere, 3, 0, True)
    results = run_on(after, goes_on, states, 3, 0, True)
    for taken, (rest, following, nothing_else) in enumerate(results, start=1):
        assert nothing_else
        assert flat(rest) == flat(epochs[1][taken:])
        assert flat(following) == flat(epochs[2])
        assert all(len(batch) == 3 * after for batch in rest[:-1])


@half
def test_batches_of_varying_sizes_go_on_exactly(run_on, before, after, even, seeded):
    epochs, states = run_on(before, stops_everywhere, None, 0, even, seeded)
    results = run_on(after, goes_on, states, None, 0, even, seeded)
    for taken, (rest, following, nothing_else) in enumerate(results, start=1):
        assert nothing_else
        assert flat(rest) == flat(epochs[1][taken:])
        assert not seeded or flat(following) == flat(epochs[2])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_four_loader_workers_change_nothing(run_on, before, after):
    epochs, states = run_on(before, stops_everywhere, GLOBAL_BATCH // before, 0, True)
    with_workers = run_on(before, stops_everywhere, GLOBAL_BATCH // before, 4, True)
    assert with_workers == (epochs, states)
    ((rest, following, nothing_else),) = run_on(
        after, goes_on, states[1:2], GLOBAL_BATCH // after, 4, True
    )
    assert nothing_else
    assert (rest, following) == (epochs[1][2:], epochs[2])


def saves(folder: str, taken: int) -> list:
    torch.manual_seed(11)
    accel, loader = prepared(GLOBAL_BATCH // 2, 0, True)
    seen = []
    for index, batch in enumerate(loader, start=1):
        seen.append(accel.gather_for_metrics(batch).tolist())
        if index == taken:
            accel.save_state(f"{folder}/{taken}")
    return [seen, [accel.gather_for_metrics(batch).tolist() for batch in loader]]


def loads(folder: str, taken: int) -> list:
    torch.manual_seed(99)
    accel, loader = prepared(GLOBAL_BATCH // 4, 0, True)
    accel.load_state(f"{folder}/{taken}")
    return [[accel.gather_for_metrics(batch).tolist() for batch in loader] for _ in range(2)]


@pytest.mark.filterwarnings("ignore:the checkpoint was saved by 2 processes")
@pytest.mark.parametrize("taken", [1, 3])
def test_a_checkpoint_of_two_processes_goes_on_on_four(run_on, tmp_path, taken):
    epoch, following = run_on(2, saves, str(tmp_path), taken)
    assert run_on(4, loads, str(tmp_path), taken) == [epoch[taken:], following]
