"""Loaders, metrics and normalizers ask the strategy which ranks read different data."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.engines import DDP, DataRanks
from tests.support.bound import BOUND
from tests.support.strategies import strategy

pytestmark = pytest.mark.distributed

SHORT = BOUND


class Paired(DDP):
    """Two ranks of one model, as in tensor parallelism: both read the same samples."""

    def __init__(self, topology, handlers=None, parallelism=None):
        super().__init__(topology, handlers, parallelism)
        world = topology.world_size // 2
        self.data = DataRanks(topology.rank // 2, world, topology.device, 2, world, world)


def counted():
    """The samples of this rank, and what metrics count of the last, uneven batch."""
    with strategy(Paired):
        accel = Accelerator(cpu=True, timeout=SHORT)
    loader = accel.prepare(DataLoader(torch.arange(7), batch_size=2))
    own, whole, objects = [], [], []
    for batch in loader:
        own += batch.tolist()
        gathered = accel.gather_for_metrics({"x": batch, "names": [str(int(n)) for n in batch]})
        whole += gathered["x"].tolist()
        objects += gathered["names"]
    names = accel.gather_for_metrics(["a", "b"], use_gather_object=True)
    return own, whole, objects, names, accel.data_world, accel.current_run.data_world


def test_ranks_of_one_model_read_the_same_samples_and_each_counts_once(pool):
    numbers = list(range(7))
    texts = [str(number) for number in numbers]
    for outcome in pool.run(counted):
        assert outcome == (numbers, numbers, texts, ["a", "b"], 1, 1)


def trained(kind):
    """The weight after one step on sums over 3 and 1 tokens, with a normalizer."""
    with strategy(kind):
        accel = Accelerator(cpu=True, gradient_accumulation_steps=2, timeout=SHORT)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    rank = accel.strategy.data.rank
    for tokens in (torch.ones(3, 1), torch.full((1, 1), 5.0 + rank)):
        with accel.accumulate(model):
            accel.backward(model(tokens).sum(), normalizer=len(tokens))
            optimizer.step()
            optimizer.zero_grad()
    return accel.unwrap_model(model).weight.item()


def test_a_normalizer_counts_each_sample_once(pool):
    # The mean gradient over four tokens is (1 + 1 + 1 + 5) / 4, on whichever rank they are.
    assert pool.run(trained, Paired) == [0.0, 0.0]
    # Eight tokens, where the ranks read different ones: (3 + 5 + 3 + 6) / 8.
    assert pool.run(trained, DDP) == [2.0 - 17 / 8] * 2


def test_a_normalizer_counts_each_sample_once_where_two_pairs_read_different_ones(pool_of_4):
    assert pool_of_4.run(trained, Paired) == [2.0 - 17 / 8] * 4


class Together(DDP):
    """Records what one `prepare` sets up, and replaces the optimizer, as an engine does."""

    def setup(self, models, optimizers, schedulers):
        self.seen = [len(models), len(optimizers), len(schedulers)]
        done = super().setup(models, optimizers, schedulers)
        replaced = [torch.optim.SGD(one.param_groups, lr=0.5) for one in optimizers]
        return done._replace(optimizers=replaced)


def set_up_together():
    with strategy(Together):
        accel = Accelerator(cpu=True, timeout=SHORT)
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    prepared = accel.prepare(optimizer, first, second)
    seen = accel.strategy.seen
    accel.prepare_model(torch.nn.Linear(1, 1))
    wrapped = [type(model).__name__ for model in accel.models]
    return seen, accel.strategy.seen, prepared[0].optimizer is optimizer, wrapped


def test_a_strategy_sees_all_that_one_prepare_was_given(pool):
    expected = ([2, 1, 0], [1, 0, 0], False, ["DistributedDataParallel"] * 3)
    assert pool.run(set_up_together) == [expected] * 2
