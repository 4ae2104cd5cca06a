"""Which samples each rank reads at each step: every world, count, batch size and position."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from accel_callbacks.data.iterable import IterableShards
from accel_callbacks.data.order import epoch_order
from accel_callbacks.data.sampler import mix_seed
from accel_callbacks.data.shard import BatchPlan, SamplePlan, fill_up
from tests.support.pairs import pairwise

WORLDS = (1, 2, 3, 4)


def steps_of(plans, order, position):
    """For each step the shares of all ranks; fails if the ranks differ in their number."""
    per_rank = [list(plan.shares(order, position)) for plan in plans]
    assert len({len(shares) for shares in per_rank}) == 1
    return list(zip(*per_rank, strict=True))


def check_step(shares):
    """The samples that the ranks say they really read, in rank order."""
    assert len({(share.real, share.padded) for share in shares}) == 1
    return shares[0].real, shares[0].padded


@pytest.mark.parametrize(
    ("world", "drop_last", "batch_size"), pairwise(WORLDS, [False, True], [1, 2, 3, 4, 5])
)
def test_all_ranks_together_read_the_rest_of_the_order_once(world, drop_last, batch_size):
    size = world * batch_size
    plans = [SamplePlan(batch_size, drop_last, rank, world) for rank in range(world)]
    for count in range(21):
        order = [100 - i for i in range(count)]
        for position in range(count + 1):
            steps = steps_of(plans, order, position)
            seen = []
            for shares in steps:
                real, padded = check_step(shares)
                assert {len(share.indices) for share in shares} == {padded // world}
                assert padded - real < world
                together = [index for share in shares for index in share.indices]
                assert len(together) == padded
                assert set(together[real:]) <= set(order)
                seen += together[:real]
            rest = order[position:]
            assert seen == (rest[: len(rest) // size * size] if drop_last else rest)
            assert {plan.remaining(order, position) for plan in plans} == {len(steps)}
        assert plans[0].steps(count) == len(steps_of(plans, order, 0))


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_split_over_ranks_does_not_change_what_a_step_holds(drop_last):
    order = [(7 * i) % 23 for i in range(23)]

    def steps(world):
        plans = [SamplePlan(12 // world, drop_last, rank, world) for rank in range(world)]
        return [
            [i for share in shares for i in share.indices][: shares[0].real]
            for shares in steps_of(plans, order, 0)
        ]

    assert steps(1) == steps(2) == steps(3) == steps(4)


def varying_batches(count):
    sizes = [(3 * i) % 5 + 1 for i in range(count)]
    return [[f"{i}.{j}" for j in range(size)] for i, size in enumerate(sizes)]


def real_samples(steps, world):
    """What the ranks read, without the batches that fill up the last step."""
    seen = []
    for shares in steps:
        real, padded = check_step(shares)
        together = [sample for share in shares for sample in share.indices]
        assert len(together) == padded
        seen += together[:real]
        assert all(len(share.indices) for share in shares)
    return seen


@pytest.mark.parametrize("world", WORLDS)
def test_whole_batches_go_to_the_ranks_in_turn(world):
    plans = [BatchPlan(rank, world) for rank in range(world)]
    for count in range(21):
        batches = varying_batches(count)
        # Positions that this number of processes stops at: after whole steps.
        for first in range(0, count + world, world):
            position = sum(map(len, batches[:first]))
            steps = steps_of(plans, batches, position)
            rest = [sample for batch in batches[first:] for sample in batch]
            assert real_samples(steps, world) == rest
            assert {plan.remaining(batches, position) for plan in plans} == {len(steps)}
        assert plans[0].steps(count) == -(-count // world) == len(steps_of(plans, batches, 0))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_whole_batches_of_the_start_fill_up_the_last_step(world):
    batches = varying_batches(world + 1)
    (*_, last) = steps_of([BatchPlan(rank, world) for rank in range(world)], batches, 0)
    assert [share.indices for share in last] == [batches[-1], *batches[: world - 1]]
    assert check_step(last) == (len(batches[-1]), sum(len(share.indices) for share in last))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_whole_batches_resume_exactly_on_another_number_of_processes(world):
    plans = [BatchPlan(rank, world) for rank in range(world)]
    batches = varying_batches(9)
    for first in range(10):  # one process stops after any batch
        position = sum(map(len, batches[:first]))
        rest = [sample for batch in batches[first:] for sample in batch]
        assert real_samples(steps_of(plans, batches, position), world) == rest


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_is_split_as_a_sequential_dataset_is(world, drop_last):
    def streamed(count, rank):
        shards = IterableShards(
            range(count), batch_size=3, drop_last=drop_last, rank=rank, world_size=world
        )
        return list(shards)

    for count in range(21):
        plans = [SamplePlan(3, drop_last, rank, world) for rank in range(world)]
        pieces = list(zip(*(streamed(count, rank) for rank in range(world)), strict=True))
        steps = steps_of(plans, range(count), 0)
        assert [step[0][1].real for step in pieces] == [step[0].real for step in steps]
        assert [[len(batch) for batch, _ in step] for step in pieces] == [
            [len(share.indices) for share in step] for step in steps
        ]
        # What fills a stream up is of its tail: its start is gone.
        read = [[n for batch, _ in step for n in batch][: step[0][1].real] for step in pieces]
        assert read == [
            [n for share in step for n in share.indices][: step[0].real] for step in steps
        ]


# --- without repetitions -------------------------------------------------------------------


def plans_without(world, **options):
    return [SamplePlan(rank=rank, world_size=world, even=False, **options) for rank in range(world)]


def read_once(steps):
    """What the ranks read, in rank order; fails where something fills up or a rank has nothing."""
    seen = []
    for shares in steps:
        real, padded = check_step(shares)
        together = [sample for share in shares for sample in share.indices]
        assert len(together) == real == padded
        assert all(share.indices for share in shares)
        seen += together
    return seen


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_without_even_batches_everything_is_read_once_in_as_many_steps_by_all(world, batch_size):
    plans = plans_without(world, batch_size=batch_size, drop_last=False)
    size = world * batch_size
    for count in (0, *range(world, 4 * size + 1)):
        order = [100 - i for i in range(count)]
        plans[0].check(order)
        steps = steps_of(plans, order, 0)
        assert read_once(steps) == order
        assert plans[0].steps(count) == len(steps)
        sizes = [len(share.indices) for shares in steps for share in shares]
        assert max(sizes, default=0) <= batch_size + 1
        assert all(
            max(map(len, step)) - min(map(len, step)) <= 1
            for step in [[share.indices for share in shares] for shares in steps]
        )
        tail = count % size
        assert len(steps) == count // size + (tail >= world or (0 < tail < size and count < size))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_without_even_batches_a_resume_at_any_step_reads_the_rest_once(world):
    plans = plans_without(world, batch_size=2, drop_last=False)
    for count in range(world, 8 * world):
        order = list(range(count))
        whole = steps_of(plans, order, 0)
        for step in range(len(whole) + 1):
            position = plans[0].position_of(order, step)
            assert position == sum(shares[0].real for shares in whole[:step])
            assert steps_of(plans, order, position) == whole[step:]
            assert plans[0].remaining(order, position) == len(whole) - step


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_resume_in_a_tail_that_is_too_short_for_all_still_reads_it(world):
    plans = plans_without(world, batch_size=2, drop_last=False)
    order = list(range(12))
    (shares,) = steps_of(plans, order, 11)  # one process had stopped before the last sample
    assert check_step(shares) == (1, world)
    assert shares[0].indices == [11]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fewer_samples_than_processes_are_refused_without_even_batches(world):
    for plan in plans_without(world, batch_size=2, drop_last=False):
        with pytest.raises(ValueError, match=rf"1 samples for {world} processes.*even_batches"):
            plan.check([0])
    for plan in plans_without(world, batch_size=2, drop_last=True):
        plan.check([0])  # it is dropped by all
        assert list(plan.shares([0], 0)) == []
    for rank in range(world):
        with pytest.raises(ValueError, match="even_batches"):
            BatchPlan(rank, world, even=False).check([["a"]])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("split", [False, True])
def test_whole_batches_without_even_batches_are_read_once(world, split):
    plans = [BatchPlan(rank, world, even=False, split=split) for rank in range(world)]
    for count in range(2, 21):
        batches = varying_batches(count)
        order = [sample for batch in batches for sample in batch]
        if len(order) < world:
            continue
        whole = steps_of(plans, batches, 0)
        assert read_once(whole) == order
        assert plans[0].steps(count) in (None, len(whole))
        if not split:
            full = count // world - (len(whole) == count // world and count % world > 0)
            assert [[share.indices for share in shares] for shares in whole[:full]] == [
                batches[i : i + world] for i in range(0, full * world, world)
            ]
        for step in range(len(whole) + 1):
            position = plans[0].position_of(batches, step)
            rest = steps_of(plans, batches, position)
            assert [share.real for shares in rest for share in shares[:1]] == [
                shares[0].real for shares in whole[step:]
            ]
            assert read_once(rest) == order[position:]


@pytest.mark.parametrize("world", WORLDS)
def test_split_batches_of_any_size_are_filled_up(world):
    plans = [BatchPlan(rank, world, split=True) for rank in range(world)]
    for count in range(12):
        batches = varying_batches(count)
        steps = steps_of(plans, batches, 0)
        assert [shares[0].real for shares in steps] == [len(batch) for batch in batches]
        assert real_samples(steps, world) == [sample for batch in batches for sample in batch]
        assert all(len({len(share.indices) for share in shares}) == 1 for shares in steps)
        assert plans[0].steps(count) == count


def test_several_samples_of_the_start_fill_up_the_last_pieces_in_their_order():
    pieces = [fill_up([5, 6, 7, 8, 9], [0, 1, 2, 3], rank, 4) for rank in range(4)]
    assert pieces == [[5, 6], [7, 8], [9, 0], [1, 2]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_the_position_of_a_step_is_what_the_steps_before_it_read(drop_last, even):
    for world in WORLDS:
        plan = SamplePlan(2, drop_last, 0, world, even)
        for count in range(world, 25):
            real = [share.real for share in plan.shares(range(count), 0)]
            for step in range(len(real) + 3):
                assert plan.position_of(range(count), step) == sum(real[:step])


# --- order ---------------------------------------------------------------------------------


def generators():
    state = np.random.get_state()
    return (torch.get_rng_state().tolist(), random.getstate(), state[1].tolist(), state[2:])


SAMPLERS = {
    "random": lambda: RandomSampler(range(16)),
    "random with a generator": lambda: RandomSampler(range(16), generator=torch.Generator()),
    "with replacement": lambda: RandomSampler(range(16), replacement=True, num_samples=9),
    "weighted": lambda: WeightedRandomSampler([1.0] * 8 + [3.0] * 8, 16),
    "batches": lambda: BatchSampler(RandomSampler(range(16)), 3, drop_last=False),
    "python's random": lambda: Shuffled(lambda items: random.shuffle(items)),
    "numpy's random": lambda: Shuffled(lambda items: np.random.shuffle(items)),
}


class Shuffled:
    """A sampler as users write them, on a global generator."""

    def __init__(self, shuffle):
        self.shuffle = shuffle

    def __iter__(self):
        items = list(range(16))
        self.shuffle(items)
        return iter(items)

    def __len__(self):
        return 16


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_the_order_is_a_function_of_seed_and_epoch_and_draws_from_no_global_generator(make):
    before = generators()
    first = epoch_order(make(), 7, 0)
    assert generators() == before
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    assert epoch_order(make(), 7, 0) == first
    assert epoch_order(make(), 7, 1) != first
    assert epoch_order(make(), 8, 0) != first


def test_a_generator_of_the_program_is_put_back():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    epoch_order(RandomSampler(range(8), generator=generator), 7, 0)
    assert torch.equal(generator.get_state(), before)


def test_a_sampler_that_raises_leaves_all_generators_as_they_were():
    generator = torch.Generator().manual_seed(5)
    own, before = generator.get_state(), generators()

    class Broken(RandomSampler):
        def __iter__(self):
            raise LookupError("no such index file")

    with pytest.raises(LookupError):
        epoch_order(Broken(range(8), generator=generator), 7, 0)
    assert generators() == before
    assert torch.equal(generator.get_state(), own)


def test_a_sampler_with_set_epoch_is_told_the_epoch():
    class Told(Shuffled):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler = Told(lambda items: None)
    epoch_order(sampler, 7, 3)
    assert sampler.epoch == 3


def test_a_subclass_of_the_sequential_sampler_keeps_its_own_order():
    class Reversed(SequentialSampler):
        def __iter__(self):
            return iter(reversed(range(len(self.data_source))))

    assert list(epoch_order(Reversed(range(4)), 0, 0)) == [3, 2, 1, 0]


def test_mixed_seeds_do_not_collide_for_small_numbers():
    seeds = {mix_seed(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 20**3
    assert all(0 <= seed < 1 << 63 for seed in seeds)
