"""The options of prepared loaders, one after the other: each changes what a loader delivers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accel_callbacks import Accelerator, DataLoaderConfiguration, prepare_data_loader


def accelerator(**options):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def shard(loader, rank=0, world=2, **options):
    return prepare_data_loader(loader, num_processes=world, process_index=rank, **options)


def on_all(make, world=2, **options):
    """The batches of each of several processes, which only read."""
    loaders = [shard(make(), rank, world, **options) for rank in range(world)]
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(one) for one in batches]
    return batches


class Sized:
    """Batches of given sizes, one sample after the other."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def __iter__(self):
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self):
        return len(self.sizes)


# --- the configuration itself --------------------------------------------------------------


def test_the_options_are_there_with_their_defaults_and_cannot_be_changed():
    config = DataLoaderConfiguration()
    assert dataclasses.asdict(config) == {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
        "non_blocking": True,
        "use_stateful_dataloader": True,
        "seeded_order": None,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.split_batches = True


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"split_batches": "yes"}, TypeError),
        ({"even_batches": None}, TypeError),
        ({"use_seedable_sampler": 1}, TypeError),
        ({"non_blocking": "no"}, TypeError),
        ({"use_stateful_dataloader": 0}, TypeError),
        ({"dispatch_batches": "auto"}, TypeError),
        ({"data_seed": 1.5}, TypeError),
        ({"data_seed": True}, TypeError),
        ({"data_seed": -1}, ValueError),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_option(option, error):
    with pytest.raises(error, match=next(iter(option))):
        DataLoaderConfiguration(**option)


def test_the_accelerator_shows_the_options():
    accel = accelerator(
        split_batches=True,
        dispatch_batches=False,
        even_batches=False,
        use_seedable_sampler=True,
        non_blocking=False,
        use_stateful_dataloader=False,
    )
    shown = (
        accel.split_batches,
        accel.dispatch_batches,
        accel.even_batches,
        accel.use_seedable_sampler,
        accel.non_blocking,
        accel.use_stateful_dataloader,
    )
    assert shown == (True, False, False, True, False, False)
    default = Accelerator(cpu=True)
    assert default.dispatch_batches is None
    assert default.dataloader_config == DataLoaderConfiguration()


def test_a_configuration_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="must be a DataLoaderConfiguration"):
        Accelerator(cpu=True, dataloader_config={"split_batches": True})


def test_an_option_of_the_loaders_is_not_one_of_the_accelerator():
    with pytest.raises(TypeError, match=r"DataLoaderConfiguration\(split_batches=\.\.\.\)"):
        Accelerator(cpu=True, split_batches=True)


# --- split_batches -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["batch size", "torch's", "own"])
def test_split_batches_takes_the_batch_size_as_that_of_all(kind):
    def make():
        sampler = BatchSampler(range(10), 4, False)
        if kind == "own":
            sampler = type("Own", (BatchSampler,), {})(range(10), 4, False)
        options = {"batch_size": 4} if kind == "batch size" else {"batch_sampler": sampler}
        return DataLoader(range(10), **options)

    together = on_all(make, split_batches=True)
    assert together == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    assert shard(make(), split_batches=True).total_batch_size == 4
    assert shard(make()).total_batch_size == 8
    assert len(on_all(make)[0]) == 2


@pytest.mark.parametrize("own", [False, True])
def test_a_batch_that_cannot_be_split_is_refused_with_what_to_give(own):
    sampler = (type("Own", (BatchSampler,), {}) if own else BatchSampler)(range(9), 3, False)
    with pytest.raises(ValueError, match="multiple of 2 as its batch_size"):
        shard(DataLoader(range(9), batch_sampler=sampler), split_batches=True)


def test_batches_of_varying_sizes_are_split_and_filled_up():
    together = on_all(
        lambda: DataLoader(range(6), batch_sampler=Sized(1, 2, 3)), split_batches=True
    )
    assert together == [[[0], [1], [3, 4]], [[0], [2], [5, 0]]]


# --- even_batches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (9, [[[0, 1], [4, 5, 6]], [[2, 3], [7, 8]]]),  # one sample joins the batch before
        (10, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]),
        (11, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]),
        (3, [[[0, 1]], [[2]]]),
    ],
)
def test_without_even_batches_nothing_is_read_twice(count, expected):
    def make():
        return DataLoader(range(count), 2)

    assert on_all(make, even_batches=False) == expected
    filled = [n for rank in on_all(make) for batch in rank for n in batch]
    assert len(filled) > count or count % 2 == 0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2, 1, 3), [[[0, 1], [3, 4]], [[2], [5]]]),
        ((2, 1, 1), [[[0, 1]], [[2, 3]]]),
        ((3,), [[[0, 1]], [[2]]]),
        ((2, 1, 3, 1), [[[0, 1], [3, 4, 5]], [[2], [6]]]),
    ],
)
def test_without_even_batches_leftover_batches_are_split(sizes, expected):
    def make():
        return DataLoader(range(sum(sizes)), batch_sampler=Sized(*sizes))

    assert on_all(make, even_batches=False) == expected


def test_fewer_samples_than_processes_are_an_error_where_they_are_read():
    loader = shard(DataLoader(range(2), 1), world=3, even_batches=False)
    with pytest.raises(ValueError, match="2 samples for 3 processes"):
        next(iter(loader))
    assert on_all(lambda: DataLoader(range(0), 1), world=3, even_batches=False) == [[], [], []]


def test_even_batches_can_be_set_between_passes():
    accel = accelerator()
    loader = accel.prepare(DataLoader(range(9), 2))
    assert loader.even_batches
    accel.even_batches = False
    assert not accel.even_batches
    assert not loader.even_batches
    assert not accel.prepare(DataLoader(range(9), 2)).even_batches
    alone = shard(DataLoader(range(9), 2))
    for even in (True, False, True):
        alone.even_batches = even
        sizes = [len(batch) for batch in alone]
        assert sizes == ([2, 2, 1] if even else [2, 3])
        assert len(alone) == len(sizes)


def test_a_change_in_the_middle_of_a_pass_is_for_the_next_one():
    loader = shard(DataLoader(range(9), 2))
    sizes = []
    for batch in loader:
        loader.even_batches = False
        sizes.append((len(batch), loader.left))
    assert sizes == [(2, 3), (2, 2), (1, 1)]
    assert [len(batch) for batch in loader] == [2, 3]


def test_ready_batches_cannot_do_without_even_batches_nor_be_split():
    accel = accelerator()
    loader, ready = accel.prepare(DataLoader(range(4), 2), DataLoader(range(4), batch_size=None))
    with pytest.raises(ValueError, match="batch_size=None"):
        accel.even_batches = False
    assert accel.even_batches
    assert loader.even_batches
    assert ready.even_batches
    for option in ({"even_batches": False}, {"split_batches": True}):
        with pytest.raises(ValueError, match="batch_size=None"):
            accelerator(**option).prepare(DataLoader(range(4), batch_size=None))


# --- rng_types -----------------------------------------------------------------------------


def test_rng_types_are_checked_when_they_are_given():
    assert Accelerator(cpu=True, rng_types=["torch", "generator"]).rng_types == (
        "torch",
        "generator",
    )
    assert Accelerator(cpu=True).rng_types == ()
    with pytest.raises(ValueError, match="Did you mean 'torch'"):
        Accelerator(cpu=True, rng_types=["torhc"])
    with pytest.raises(TypeError, match="must be a list"):
        Accelerator(cpu=True, rng_types="torch")


# --- prepare_data_loader, and what a prepared loader tells ---------------------------------


def test_it_works_without_an_accelerator_and_goes_on_as_one_does():
    torch.manual_seed(3)
    loader = prepare_data_loader(DataLoader(range(7), 2, shuffle=True), data_seed=3)
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert sorted(n for batch in epochs[0] for n in batch) == list(range(7))
    torch.manual_seed(3)
    loader = prepare_data_loader(DataLoader(range(7), 2, shuffle=True), data_seed=3)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    second = prepare_data_loader(DataLoader(range(7), 2, shuffle=True), data_seed=4)
    second.load_state_dict({**state, "trained": True})
    assert [batch.tolist() for batch in second] == epochs[0][1:]
    assert [batch.tolist() for batch in second] == epochs[1]


def test_what_is_over_is_unknown_where_the_sampler_has_no_length():
    class Sampler:
        def __iter__(self):
            return iter([2, 0, 1])

    accel = Accelerator(cpu=True)
    loader = accel.prepare(DataLoader(range(3), 2, sampler=Sampler()))
    assert [batch.tolist() for batch in loader] == [[2, 0], [1]]
    assert loader.remainder == -1
    assert "remainder=-1" in repr(accel.gradient_state)


def test_it_moves_batches_only_if_asked_to():
    moved = prepare_data_loader(DataLoader(range(2), 2), device="meta", put_on_device=True)
    assert [batch.device.type for batch in moved] == ["meta"]
    left = prepare_data_loader(DataLoader(range(2), 2), device="meta")
    assert [batch.device.type for batch in left] == ["cpu"]
    with pytest.raises(ValueError, match="pass device="):
        prepare_data_loader(DataLoader(range(2), 2), put_on_device=True)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_place_outside_of_the_processes_is_refused(rank, world):
    with pytest.raises(ValueError, match="must be below"):
        shard(DataLoader(range(2), 2), rank, world)


@pytest.mark.parametrize(
    ("make", "total", "remainder"),
    [
        (lambda: DataLoader(range(10), 3), 6, 4),
        (lambda: DataLoader(range(12), 3), 6, 0),
        (lambda: DataLoader(range(10), 3, drop_last=True), 6, -1),
        (lambda: DataLoader(range(5), 3, sampler=RandomSampler(range(5), num_samples=7)), 6, 1),
        (lambda: DataLoader(range(6), batch_sampler=Sized(1, 2, 3)), None, -1),
        (lambda: DataLoader(torch.arange(5), batch_size=None), 2, 1),
    ],
)
def test_a_loader_tells_its_global_batch_and_what_is_over(make, total, remainder):
    loader = shard(make())
    assert (loader.total_batch_size, loader.remainder) == (total, remainder)
    assert loader.total_dataset_length == len(make().dataset)


def test_the_end_is_known_with_the_last_batch_and_forgotten_after_it():
    loader = shard(DataLoader(range(10), 2))
    assert not loader.end_of_dataloader
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert not loader.end_of_dataloader
    for _ in loader:
        if loader.end_of_dataloader:
            break
    assert not loader.end_of_dataloader


def test_the_sampler_can_be_reached_and_replaced():
    sampler = RandomSampler(range(6))
    loader = shard(DataLoader(range(6), 2, sampler=sampler, drop_last=True), world=1)
    assert loader.batch_sampler.sampler is sampler
    assert loader.get_sampler() is sampler
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (2, True)
    assert len(loader.batch_sampler) == 3
    loader.set_sampler([5, 4, 3, 2])
    assert [batch.tolist() for batch in loader] == [[5, 4], [3, 2]]
    own = Sized(1, 2)
    assert shard(DataLoader(range(3), batch_sampler=own)).batch_sampler.sampler is own


def test_a_loader_of_another_accelerator_is_prepared_anew_and_ones_own_is_not():
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    bare = DataLoader(range(4), 2)
    mine = first.prepare(bare)
    assert first.prepare(mine) is mine
    assert first.prepare(bare) is mine
    other = second.prepare(mine)
    assert other is not mine
    assert second.prepare(bare) is other
    for _ in mine:
        assert [batch.tolist() for batch in other] == [[0, 1], [2, 3]]
        assert (first.loop.position.active, second.loop.position.active) == ([mine], [])


# --- what else a loader may be -------------------------------------------------------------


def as_pairs(samples):
    return {"text": [f"n{n}" for n in samples], "n": torch.tensor(samples)}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (4, False), (4, True)])
def test_workers_and_a_collate_function_work_in_every_kind_of_loader(workers, persistent):
    options = {
        "num_workers": workers,
        "collate_fn": as_pairs,
        "persistent_workers": persistent,
    }
    loader = shard(DataLoader(range(9), 2, **options), rank=1)
    for _ in range(2):
        assert [batch["text"] for batch in loader] == [["n2", "n3"], ["n6", "n7"], ["n0"]]
    varying = shard(DataLoader(range(6), batch_sampler=Sized(1, 2, 3), **options), rank=1)
    assert [batch["n"].tolist() for batch in varying] == [[1, 2], [0]]
    for one in (loader, varying):
        if persistent:
            one._iterator._shutdown_workers()


def test_the_options_of_torch_are_kept():
    def init(worker):
        pass

    bare = DataLoader(
        range(4), 2, num_workers=2, prefetch_factor=3, timeout=7, worker_init_fn=init,
        pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    loader = shard(bare)
    for name in ("num_workers", "prefetch_factor", "timeout", "worker_init_fn", "pin_memory"):
        assert getattr(loader, name) == getattr(bare, name)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_pin_memory_is_passed_on():
    loader = shard(DataLoader(range(4), 2, pin_memory=True))
    assert loader.pin_memory
    assert [batch.tolist() for batch in loader] == [[0, 1]]


@pytest.mark.parametrize("even", [False, True])
def test_a_dataset_of_hugging_face_is_one_like_others(even):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(9)), "s": [f"n{i}" for i in range(9)]})
    bare = [DataLoader(data.with_format("torch"), 2, shuffle=True) for _ in range(2)]
    torch.manual_seed(1)
    options = {"even_batches": even, "data_seed": 1}
    loaders = [shard(loader, rank, **options) for rank, loader in enumerate(bare)]
    steps = list(zip(*loaders, strict=True))
    seen = [n for step in steps for batch in step for n in batch["x"].tolist()][:9]
    assert sorted(seen) == list(range(9)) != seen
    assert all(
        batch["s"] == [f"n{n}" for n in batch["x"].tolist()] for step in steps for batch in step
    )
    assert loaders[0].total_dataset_length == 9
