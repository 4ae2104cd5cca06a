"""Several processes read together what one process with the whole batch reads."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from tests.support.bound import BOUND
from tests.support.samplers import BATCH, SAMPLERS, dataset, own, seed

pytestmark = pytest.mark.distributed

# Where two processes take a batch each, one with twice the batch size reads as much.
BY_SAMPLE = [name for name in SAMPLERS if "batch" not in name and name != "lists of indices"]
# With and without a generator take turns.
by_turns = pytest.mark.parametrize(
    ("sampler", "own_generator"),
    [
        pytest.param(sampler, bool(number % 2), id=sampler)
        for number, sampler in enumerate(BY_SAMPLE)
    ],
)


def orders(
    sampler: str,
    own_generator: bool,
    workers: int,
    world: int,
    *,
    alike: bool = True,
    state: Any = None,
    taken: int | None = None,
) -> Any:
    """Return the samples of each step of three epochs, and the generators that are left.

    Args:
        sampler: its name.
        own_generator: the loader has a generator of its own.
        workers: number of loader workers.
        world: number of processes.
        alike: the ranks begin with the same seed.
        state: of the loader, to be resumed.
        taken: return the state after this many batches of the second epoch.
    """
    rank = int(os.environ["RANK"]) if world > 1 else 0
    seed(3 if alike or not rank else 50 + rank)
    options = SAMPLERS[sampler]() | {"num_workers": workers}
    if own_generator:
        options["generator"] = own()
    if not options.get("batch_sampler"):
        options["batch_size"] = BATCH * 2 // world
    accel = Accelerator(cpu=True, timeout=BOUND)
    assert accel.num_processes == world
    loader = accel.prepare(DataLoader(dataset(), **options))
    held_out = accel.prepare(DataLoader(dataset(), 8, shuffle=True))
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for epoch in range(3):
        loader.set_epoch(epoch) if state is None else None
        steps = []
        for number, (ids, _) in enumerate(loader, start=1):
            together = accel.gather_for_metrics(ids)
            steps.append(together.tolist())
            if epoch == 1 and number == taken:
                return steps, loader.state_dict()
        found.append(steps)
        for _ in held_out:
            pass
        if state is not None:
            break
    return found, torch.get_rng_state().tolist()


@by_turns
def test_two_processes_read_together_what_one_reads(pool, sampler, own_generator):
    alone, generators = orders(sampler, own_generator, 0, 1)
    for together, left in pool.run(orders, sampler, own_generator, 0, 2):
        assert together == alone
        # One process may ask the sampler a little later than two; both have asked it all.
        assert left == generators


@pytest.mark.parametrize("sampler", ["batches", "late batches"])
def test_two_processes_take_batches_in_the_order_that_one_draws(pool, sampler):
    def in_turn(epochs: list[list[list[int]]]) -> list[list[int]]:
        return [[sample for step in epoch for sample in step] for epoch in epochs]

    alone, generators = orders(sampler, False, 0, 1)
    for together, left in pool.run(orders, sampler, False, 0, 2):
        assert in_turn(together) == in_turn(alone)
        assert left == generators


def test_workers_change_nothing_of_it(pool):
    assert pool.run(orders, "shuffle", False, 2, 2)[1][0] == orders("shuffle", False, 0, 1)[0]


def apart(sampler: str) -> Any:
    return orders(sampler, False, 0, 2, alike=False)


@pytest.mark.parametrize("sampler", ["shuffle", "python", "own numpy", "batches"])
def test_ranks_with_other_seeds_go_by_rank_0(pool, sampler):
    first, second = pool.run(apart, sampler)
    assert first[0] == second[0]
    assert first[1] != second[1]  # and keep their own numbers
    if sampler != "batches":
        assert first[0] == orders(sampler, False, 0, 1)[0]


def begun(sampler: str, own_generator: bool, taken: int) -> Any:
    return orders(sampler, own_generator, 0, 2, taken=taken)


def resumed(sampler: str, own_generator: bool, state: Any) -> Any:
    return orders(sampler, own_generator, 0, 2, state=state)[0][0]


@by_turns
def test_a_resume_goes_on_in_the_same_order_on_another_number_of_processes(
    pool, sampler, own_generator
):
    whole = orders(sampler, own_generator, 0, 1)[0][1]
    (seen, state), (_, other) = pool.run(begun, sampler, own_generator, 2)
    assert seen == whole[:2]
    assert other["order"]["record"] == state["order"]["record"]
    told = sampler == "told"  # the record is not all that it goes by
    if not told:
        alone = orders(sampler, own_generator, 0, 1, state=state)[0][0]
        assert alone == whole[2:]
        assert pool.run(resumed, sampler, own_generator, state) == [whole[2:]] * 2
    seen, state = orders(sampler, own_generator, 0, 1, taken=1)
    if not told:
        found = pool.run(resumed, sampler, own_generator, state)
        assert found[0] == found[1]
        if sampler not in DRAWN_LATE:
            assert seen + found[0] == whole


# What one process had not drawn yet, two draw from their own generators at the resume.
DRAWN_LATE = ("python, one by one", "numpy", "torch, one by one", "own replacement", "rounds")
