"""Workers that each read the whole stream are told once; streams that split themselves are not."""

from __future__ import annotations

import itertools
import warnings

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_callbacks import Accelerator

WORDS = "each of the 2 loader workers reads all samples"


def told_by(loader: DataLoader, passes: int = 1) -> list[tuple[str, str]]:
    """File and text of the warnings of some passes."""
    prepared = Accelerator(cpu=True).prepare(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(passes):
            for _ in itertools.islice(prepared, 8):
                pass
    return [(one.filename, str(one.message)) for one in caught]


class Whole(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Split(Whole):
    def __iter__(self):
        info = get_worker_info()
        return itertools.islice(self.samples, info.id, None, info.num_workers)


class Random(Whole):
    def __iter__(self):
        for _ in self.samples:
            yield torch.rand(())


def split_in_init(worker: int) -> None:
    dataset = get_worker_info().dataset.dataset
    dataset.samples = dataset.samples[worker::2]


def hub() -> IterableDataset:
    return datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2)


def hub_of_one_shard() -> IterableDataset:
    return datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=1)


@pytest.mark.parametrize(
    "samples",
    [range(8), [torch.arange(2) + i for i in range(8)], [{"x": str(i)} for i in range(8)], [1, 2]],
    ids=["numbers", "tensors", "dicts", "one batch"],
)
def test_d_a_stream_that_each_worker_reads_whole_is_told_once(samples):
    (found,) = told_by(DataLoader(Whole(samples), 2, num_workers=2), passes=2)
    assert found[0] == __file__
    assert found[1].startswith(f"{WORDS} of Whole")


def test_d_a_stream_of_one_worker_is_no_mistake():
    assert told_by(DataLoader(Whole(range(8)), 2, num_workers=1)) == []
    assert told_by(DataLoader(Whole(range(8)), 2)) == []


@pytest.mark.parametrize(
    "dataset",
    [
        Split(range(8)),
        Random(range(8)),
        Whole([torch.zeros(2)] * 8),
        hub(),
        hub_of_one_shard(),
    ],
    ids=["split", "random", "constant", "hub", "hub_of_one_shard"],
)
def test_d_streams_that_differ_between_workers_raise_no_alarm(dataset):
    texts = [text for _, text in told_by(DataLoader(dataset, 2, num_workers=2))]
    assert [text for text in texts if WORDS in text] == []


def test_d_a_split_by_worker_init_fn_raises_no_alarm():
    loader = DataLoader(Whole(range(8)), 2, num_workers=2, worker_init_fn=split_in_init)
    assert told_by(loader) == []
