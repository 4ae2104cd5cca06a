"""skip_first_batches: the rest of an epoch, and then the next one as if nothing had happened."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from accel_callbacks import (
    Accelerator,
    DataLoaderConfiguration,
    prepare_data_loader,
    skip_first_batches,
)

SEEDED = DataLoaderConfiguration(seeded_order=True)


def prepare(loader, **options):
    return Accelerator(cpu=True, dataloader_config=SEEDED, **options).prepare(loader)


def values(batches):
    return [batch.tolist() for batch in batches]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


class Counted(Dataset):
    """Counts what is read."""

    def __init__(self, count):
        self.count, self.reads = count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.reads += 1
        return index


class Own(BatchSampler):
    """Batches of 1, 2, 1, 2, ... shuffled samples."""

    def __iter__(self):
        order = list(self.sampler)
        while order:
            size = 1 + len(order) % 2
            yield order[:size]
            order = order[size:]

    def __len__(self):
        return 5


KINDS = {
    "shuffled": lambda: DataLoader(range(7), 2, shuffle=True),
    "workers": lambda: DataLoader(range(7), 2, shuffle=True, num_workers=2),
    "drop_last": lambda: DataLoader(range(7), 2, shuffle=True, drop_last=True),
    "own batches": lambda: DataLoader(
        range(7), batch_sampler=Own(RandomSampler(range(7)), 2, False)
    ),
    "ready batches": lambda: DataLoader(torch.arange(5), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 2),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
quiet = pytest.mark.filterwarnings("ignore:.*iterable dataset")


def some(counts, make):
    """All of these; where workers have to start, the first, the last and one between."""
    counts = list(counts)
    return [counts[0], counts[len(counts) // 2], counts[-1]] if make().num_workers else counts


@quiet
@every_kind
def test_a_pass_over_the_view_is_an_epoch_without_its_first_batches(make):
    loader = prepare(make())
    whole = [values(loader) for _ in range(4)]
    for count in some(range(len(whole[0]) + 2), make):
        torch.manual_seed(0)
        loader = prepare(make())
        view = skip_first_batches(loader, count)
        assert values(view) == whole[0][count:]
        assert (loader.epoch, loader.finished) == (0, True)
        assert values(loader) == whole[1]
        assert values(view) == whole[2][count:]
        assert values(loader) == whole[3]


@quiet
@every_kind
def test_the_usual_recipe_of_a_resume_gives_the_exact_rest_and_then_the_next_epoch(make, tmp_path):
    loader = prepare(make())
    whole = [values(loader) for _ in range(4)]
    for taken in some(range(1, len(whole[0]) + 1), make):
        torch.manual_seed(0)
        accel = Accelerator(cpu=True, dataloader_config=SEEDED)
        loader = accel.prepare(make())
        values(loader)
        for step, _ in enumerate(loader, start=1):
            if step == taken:
                accel.save_state(tmp_path / "c")
                break
        torch.manual_seed(99)
        accel = Accelerator(cpu=True, dataloader_config=SEEDED)
        loader = accel.prepare(make())
        accel.load_state(tmp_path / "c")
        assert values(accel.skip_first_batches(loader, taken)) == whole[1][taken:]
        assert values(loader) == whole[2]
        assert values(loader) == whole[3]


def test_a_checkpoint_from_inside_of_a_view_leads_to_its_rest(tmp_path):
    whole = values(prepare(KINDS["shuffled"]()))
    torch.manual_seed(0)
    accel = Accelerator(cpu=True, dataloader_config=SEEDED)
    loader = accel.prepare(KINDS["shuffled"]())
    for _ in accel.skip_first_batches(loader, 1):
        accel.save_state(tmp_path / "c")
        break
    torch.manual_seed(99)
    accel = Accelerator(cpu=True, dataloader_config=SEEDED)
    loader = accel.prepare(KINDS["shuffled"]())
    accel.load_state(tmp_path / "c")
    assert values(loader) == whole[2:]


def test_a_recipe_that_counts_on_from_a_finished_epoch_gets_the_next_one():
    whole = [values(one) for one in [prepare(KINDS["shuffled"]())] * 2]
    torch.manual_seed(0)
    first = prepare(KINDS["shuffled"]())
    for _ in first:
        state = first.state_dict()  # of the last batch: the script counts the epoch as done
    second = prepare(KINDS["shuffled"]())
    second.load_state_dict(state)
    assert values(skip_first_batches(second, 0)) == whole[1]
    second.load_state_dict(state)
    assert values(skip_first_batches(second, 1)) == whole[1][1:]


def test_the_place_is_absolute_in_the_epoch_that_was_resumed():
    whole = values(prepare(KINDS["shuffled"]()))
    torch.manual_seed(0)
    first = prepare(KINDS["shuffled"]())
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    for count in range(4):
        second = prepare(KINDS["shuffled"]())
        second.load_state_dict(state)
        assert values(skip_first_batches(second, count)) == whole[count:]


def test_set_epoch_and_a_look_at_the_first_batch_do_as_without_a_view():
    loader = prepare(KINDS["shuffled"]())
    whole = [values(loader) for _ in range(4)]
    torch.manual_seed(0)
    loader = prepare(KINDS["shuffled"]())
    view = skip_first_batches(loader, 1)
    view.set_epoch(3)
    assert values(view) == whole[3][1:]
    torch.manual_seed(0)
    accel = Accelerator(cpu=True, dataloader_config=SEEDED)
    model = torch.nn.Linear(1, 1)
    _, _, loader = accel.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), KINDS["shuffled"]()
    )
    view = accel.skip_first_batches(loader, 1)
    assert next(iter(view)).tolist() == whole[0][1]
    assert values(view) == whole[0][1:]


def test_a_view_that_was_not_begun_leaves_the_loader_alone():
    whole = values(prepare(KINDS["shuffled"]()))
    torch.manual_seed(0)
    loader = prepare(KINDS["shuffled"]())
    iterator = iter(skip_first_batches(loader, 2))
    assert values(loader) == whole
    assert len(values(iterator)) == 2


def test_counts_and_hooks_are_right_in_a_view(training):
    made = training(batches=4)
    view = made.accel.skip_first_batches(made.train, 2)
    seen = [(made.train.batch_index, made.train.left, made.train.on_last) for _ in view]
    assert seen == [(2, 2, False), (3, 1, True)]
    trace = made.recorder.take()
    assert [line for line in trace if line.startswith("train_batch_start")] == [
        "train_batch_start 2",
        "train_batch_start 3",
    ]
    assert trace.count("train_epoch_end 0") == 1
    assert not made.accel.loop.position.active
    for _ in view:
        break
    assert not made.accel.loop.position.active


def test_a_break_in_a_view_ends_the_epoch():
    loader = prepare(KINDS["shuffled"]())
    whole = [values(loader) for _ in range(2)]
    torch.manual_seed(0)
    loader = prepare(KINDS["shuffled"]())
    for _ in skip_first_batches(loader, 1):
        break
    assert values(loader) == whole[1]


def test_nothing_is_read_to_be_skipped():
    data = Counted(100_000)
    for loader in (prepare(DataLoader(data, 10, shuffle=True)), DataLoader(data, 10, shuffle=True)):
        data.reads = 0
        assert len(next(iter(skip_first_batches(loader, 9_000)))) == 10
        assert data.reads == 10


@every_kind
def test_the_length_is_what_is_left(make):
    for loader in (prepare(make()), make()):
        view = skip_first_batches(loader, 2)
        if isinstance(make().dataset, IterableDataset):
            with pytest.raises(TypeError):
                len(view)
        else:
            assert len(view) == len(loader) - 2
            assert len(skip_first_batches(loader, 100)) == 0


@every_kind
def test_a_plain_loader_can_be_skipped_too(make):
    torch.manual_seed(0)
    whole = values(make())
    for count in range(len(whole) + 1):
        torch.manual_seed(0)
        view = skip_first_batches(make(), count)
        assert values(view) == whole[count:]


def test_a_view_can_be_prepared_and_skipped_again():
    accel = Accelerator(cpu=True, dataloader_config=SEEDED)
    view = skip_first_batches(DataLoader(range(8), 2), 1)
    prepared = accel.prepare(view)
    assert accel.loop.position.active == []
    assert values(prepared) == [[2, 3], [4, 5], [6, 7]]
    assert accel.loaders == [prepared.loader]
    assert values(accel.skip_first_batches(prepared, 2)) == [[6, 7]]
    assert prepared.dataset == range(8)
    assert prepared.batch_sampler.batch_size == 2


def test_every_sample_is_counted_once_after_a_skip():
    loaders = [
        prepare_data_loader(DataLoader(range(9), 2), num_processes=2, process_index=rank)
        for rank in range(2)
    ]
    steps = list(zip(*(skip_first_batches(loader, 2) for loader in loaders), strict=True))
    assert [[batch.tolist() for batch in step] for step in steps] == [[[8], [0]]]
    assert [(loader.real, loader.padded) for loader in loaders] == [(1, 2)] * 2


def test_a_view_of_an_epoch_that_is_done_leaves_nothing_to_the_pass_after_it():
    whole = values(prepare(KINDS["shuffled"]()))
    torch.manual_seed(0)
    loader = prepare(KINDS["shuffled"]())
    loader.skip_next_pass()
    assert values(skip_first_batches(loader, 2)) == []
    assert values(loader) == whole


def test_a_negative_count_is_an_error():
    with pytest.raises(ValueError, match="num_batches=-1 must be 0 or more"):
        skip_first_batches(DataLoader(range(2)), -1)
