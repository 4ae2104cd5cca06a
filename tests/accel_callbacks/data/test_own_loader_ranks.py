"""A loader as the script has set it, on two processes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, DataLoaderConfiguration
from tests.accel_callbacks.data.test_own_loader import Endless, Normalized, values
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def normalized(dispatch):
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accel = Accelerator(cpu=True, timeout=BOUND, dataloader_config=config)
    return values(accel.prepare(Normalized(torch.arange(8.0), 2)))


@pytest.mark.parametrize("dispatch", [None, True])
def test_the_iter_of_a_class_of_the_script_is_kept(pool, dispatch):
    first, second = pool.run(normalized, dispatch)
    assert [first, second] == [[[-0.5, -0.375], [0.0, 0.125]], [[-0.25, -0.125], [0.25, 0.375]]]


def endless():
    try:
        Accelerator(cpu=True, timeout=BOUND).prepare(Endless(torch.arange(8), 4))
    except ValueError as error:
        return str(error)


def test_batches_without_an_end_that_several_are_to_share_are_an_error(pool):
    for text in pool.run(endless):
        assert text.startswith("Endless has an __iter__ of its own over batches of Repeat")


def grown(split):
    config = DataLoaderConfiguration(split_batches=split)
    accel = Accelerator(cpu=True, timeout=BOUND, dataloader_config=config)
    loader = accel.prepare(DataLoader(range(16), 4 if split else 2))
    before = values(loader)
    loader.batch_sampler.batch_size = 4
    return before[0], values(loader)


@pytest.mark.parametrize("split", [False, True])
def test_a_batch_size_that_is_set_is_that_of_one_process(pool, split):
    assert pool.run(grown, split) == [
        ([0, 1], [[0, 1, 2, 3], [8, 9, 10, 11]]),
        ([2, 3], [[4, 5, 6, 7], [12, 13, 14, 15]]),
    ]


def zipped():
    torch.manual_seed(1)
    accel = Accelerator(cpu=True, timeout=BOUND)
    size = 4 // accel.num_processes
    loaders = [DataLoader(torch.arange(16) + 100 * k, size, shuffle=True) for k in (0, 1)]
    first, second = accel.prepare(*loaders)
    pairs = zip(first, second, strict=True)
    return [[accel.gather(batch).tolist() for batch in pair] for _ in range(2) for pair in pairs]


def test_loaders_side_by_side_read_what_one_process_reads(pool):
    torch.manual_seed(1)
    plain = [DataLoader(torch.arange(16) + 100 * k, 4, shuffle=True) for k in (0, 1)]
    expected = [values(pair) for pair in zip(*plain, strict=True)]
    assert pool.run(zipped) == [expected, expected]
