"""The samplers that are used alone; the expected orders were read off Accelerate 1.15."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accel_callbacks import Accelerator, BatchSamplerShard, SeedableRandomSampler
from accel_callbacks.data.config import DataLoaderConfiguration
from accel_callbacks.data.sampler import mix_seed

# torch.randperm(6) after manual_seed(5), 6 and 7
ORDERS = [[5, 0, 1, 3, 4, 2], [2, 0, 5, 1, 4, 3], [3, 0, 1, 5, 2, 4]]


def test_the_seedable_sampler_shuffles_by_seed_plus_epoch():
    sampler = SeedableRandomSampler(range(6), data_seed=5)
    assert [list(sampler) for _ in range(3)] == ORDERS
    sampler.set_epoch(1)
    assert list(sampler) == ORDERS[1]
    assert len(sampler) == 6


@pytest.mark.parametrize(
    ("seed", "first"), [(0, 0xE220A8397B1DCDAF), (1, 0x910A2DEC89025CC1), (2, 0x975835DE1C9756CE)]
)
def test_seeds_are_mixed_by_splitmix64_in_every_version(seed, first):
    """A checkpoint has the seed and not the order, which must be the same ever after."""
    assert mix_seed(seed) == first >> 1
    assert mix_seed(seed, 3) != mix_seed(3, seed)


def test_a_pass_that_is_broken_off_is_the_same_epoch_again():
    sampler = SeedableRandomSampler(range(6), data_seed=5)
    assert next(iter(sampler)) == 5
    assert list(sampler) == ORDERS[0]


def test_it_takes_its_seed_from_the_argument_the_generator_or_torch_and_draws_from_none():
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(7)
    before = (torch.get_rng_state(), generator.get_state())
    assert list(SeedableRandomSampler(range(6), generator=generator)) == ORDERS[0]
    assert list(SeedableRandomSampler(range(6))) == ORDERS[2]
    assert list(SeedableRandomSampler(range(6), generator=generator, data_seed=6)) == ORDERS[1]
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], generator.get_state())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_samples": 8}, [5, 0, 1, 3, 4, 2, 4, 3]),
        ({"replacement": True, "num_samples": 8}, [5, 0, 1, 3, 2, 4, 4, 5]),
    ],
)
def test_the_number_of_samples_and_replacement_are_those_of_a_random_sampler(options, expected):
    assert list(SeedableRandomSampler(range(6), data_seed=5, **options)) == expected


def order_of(loader, **options):
    accel = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, **options)
    )
    prepared = accel.prepare(loader)
    return [[n for batch in prepared for n in batch.tolist()] for _ in range(3)]


def random_batches():
    return BatchSampler(RandomSampler(range(6)), 4, drop_last=False)


class OwnBatches(BatchSampler):
    pass


SHUFFLED = {
    "shuffle": lambda: DataLoader(range(6), 4, shuffle=True),
    "generator": lambda: DataLoader(range(6), 4, shuffle=True, generator=torch.Generator()),
    "batch sampler": lambda: DataLoader(range(6), batch_sampler=random_batches()),
    "own batch sampler": lambda: DataLoader(
        range(6), batch_sampler=OwnBatches(RandomSampler(range(6)), 4, False)
    ),
}


@pytest.mark.parametrize("make", SHUFFLED.values(), ids=SHUFFLED)
def test_prepared_loaders_shuffle_as_accelerate_does_where_that_is_asked_for(make):
    loader = make()
    assert order_of(loader, data_seed=5) == ORDERS
    torch.manual_seed(6)
    assert order_of(make())[:2] == ORDERS[1:]
    # The loader itself was not changed, but for its generator, of which base seeds are drawn.
    for generator in (torch.default_generator, loader.generator):
        if generator is not None:
            generator.manual_seed(0)
    plain = [n for batch in loader for n in batch.tolist()]
    loader = make()
    for generator in (torch.default_generator, loader.generator):
        if generator is not None:
            generator.manual_seed(0)
    assert plain == [n for batch in loader for n in batch.tolist()]


def test_without_it_the_order_is_another_and_follows_the_data_seed():
    def order(**options):
        config = DataLoaderConfiguration(**options)
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(
            DataLoader(range(6), 4, shuffle=True)
        )
        return [[n for batch in loader for n in batch.tolist()] for _ in range(3)]

    first = order(data_seed=5)
    torch.manual_seed(99)
    assert order(data_seed=5) == first
    assert order(data_seed=6) != first
    assert first != ORDERS


def test_two_loaders_with_a_data_seed_are_shuffled_independently_but_not_if_to_be_compared():
    def two(**options):
        accel = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
        loaders = accel.prepare(*(DataLoader(range(32), 8, shuffle=True) for _ in range(2)))
        return [[n for batch in loader for n in batch.tolist()] for loader in loaders]

    first, second = two(data_seed=5)
    assert first != second
    first, second = two(data_seed=5, use_seedable_sampler=True)
    assert first == second


@pytest.mark.parametrize("wrap", [False, True])
def test_a_seedable_sampler_of_the_user_is_resumed_with_the_seed_of_the_checkpoint(wrap):
    def prepare(seed):
        sampler = SeedableRandomSampler(range(6), data_seed=seed)
        options = {"batch_size": 2, "sampler": sampler}
        if wrap:
            options = {"batch_sampler": OwnBatches(sampler, 2, False)}
        return Accelerator(cpu=True).prepare(DataLoader(range(6), **options))

    first = prepare(5)
    assert [n for batch in first for n in batch.tolist()] == ORDERS[0]
    iterator = iter(first)
    next(iterator)
    second = prepare(77)
    second.load_state_dict(first.state_dict())
    assert [n for batch in second for n in batch.tolist()] == ORDERS[1][2:]
    assert [n for batch in second for n in batch.tolist()] == ORDERS[2]


# --- BatchSamplerShard ---------------------------------------------------------------------


class Batches:
    """A batch sampler without a batch size."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def shards(sampler, world=2, **options):
    made = [BatchSamplerShard(sampler, world, rank, **options) for rank in range(world)]
    batches = [list(shard) for shard in made]
    assert [len(shard) for shard in made] == [len(one) for one in batches]
    return batches


def of_two(count, size=2, drop_last=False, **options):
    return shards(BatchSampler(range(count), size, drop_last), **options)


@pytest.mark.parametrize(
    ("count", "even", "uneven"),
    [
        (0, [[], []], [[], []]),
        (1, [[[0, 0]], [[0, 0]]], [[[0]], []]),
        (3, [[[0, 1]], [[2, 0]]], [[[0, 1]], [[2]]]),
        (5, [[[0, 1], [4, 0]], [[2, 3], [1, 2]]], [[[0, 1], [4]], [[2, 3]]]),
        (6, [[[0, 1], [4, 5]], [[2, 3], [0, 1]]], [[[0, 1], [4, 5]], [[2, 3]]]),
        (8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    ],
)
def test_batches_go_to_the_processes_in_turn_and_the_last_ones_are_filled_up(count, even, uneven):
    assert of_two(count) == even
    assert of_two(count, even_batches=False) == uneven
    full = [rank[: count // 4] for rank in even]
    assert (
        of_two(count, drop_last=True) == of_two(count, drop_last=True, even_batches=False) == full
    )


@pytest.mark.parametrize(
    ("count", "even", "uneven"),
    [
        (1, [[[0, 0]], [[0, 0]]], [[[0]], []]),
        (3, [[[0, 1]], [[2, 0]]], [[[0, 1]], [[2]]]),
        (5, [[[0, 1], [4, 0]], [[2, 3], [1, 2]]], [[[0, 1], [4]], [[2, 3]]]),
        (6, [[[0, 1], [4, 5]], [[2, 3], [0, 1]]], [[[0, 1], [4, 5]], [[2, 3]]]),
    ],
)
def test_split_batches_are_cut_into_slices(count, even, uneven):
    assert of_two(count, size=4, split_batches=True) == even
    assert of_two(count, size=4, split_batches=True, even_batches=False) == uneven


@pytest.mark.parametrize(
    ("batches", "even", "uneven"),
    [
        (([0], [1, 2], [3, 4, 5]), [[[0], [3, 4, 5]], [[1, 2], [0]]], [[[0], [3, 4, 5]], [[1, 2]]]),
        (([0, 1, 2], [3]), [[[0, 1, 2]], [[3]]], [[[0, 1, 2]], [[3]]]),
        (([0],), [[[0]], [[0]]], [[[0]], []]),
    ],
)
def test_batches_of_any_size_are_taken_whole(batches, even, uneven):
    assert shards(Batches(*batches)) == even
    assert shards(Batches(*batches), even_batches=False) == uneven


@pytest.mark.parametrize("sampler", [BatchSampler(range(5), 3, False), Batches([0, 1])])
def test_what_cannot_be_split_is_refused(sampler):
    with pytest.raises(ValueError, match="a round multiple of 2"):
        BatchSamplerShard(sampler, 2, 0, split_batches=True)


def test_a_shard_works_in_a_plain_loader_and_passes_the_epoch_on():
    sampler = SeedableRandomSampler(range(6), data_seed=5)
    shard = BatchSamplerShard(BatchSampler(sampler, 1, False), 2, 1)
    shard.set_epoch(1)
    loader = DataLoader(range(6), batch_sampler=shard)
    assert [batch.item() for batch in loader] == ORDERS[1][1::2]
    assert (shard.batch_size, shard.drop_last, shard.total_length) == (1, False, 6)


def test_a_loader_that_has_a_shard_already_is_not_sharded_again():
    shard = BatchSamplerShard(BatchSampler(range(6), 2, False), 2, 0)
    with pytest.raises(ValueError, match="BatchSamplerShard, and prepare"):
        Accelerator(cpu=True).prepare(DataLoader(range(6), batch_sampler=shard))
