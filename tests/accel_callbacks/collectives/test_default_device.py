"""What ranks exchange stays on the host whatever the default device is; "meta" stands in for one.

A tensor of control that lands on it has no value, and the collective or the reading of it fails.
"""

from __future__ import annotations

import pytest
import torch

from accel_callbacks import Accelerator, SeedableRandomSampler
from accel_callbacks.collectives import any_process
from accel_callbacks.collectives.tensors import sum_of
from accel_callbacks.data import sharded_stream
from accel_callbacks.data.iterable import IterableShards
from accel_callbacks.distributed.votes import Votes
from accel_callbacks.loop.gradient_window import _sum_over_ranks

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


def collectives():
    accel = Accelerator(cpu=True)
    mine = float(accel.process_index + 1)
    with torch.device("meta"):
        tensor = torch.full((accel.process_index + 1,), mine, device=CPU)
        return {
            "gather": accel.gather(torch.full((1,), mine, device=CPU)).tolist(),
            "numbers": accel.gather(mine).tolist(),
            "uneven": accel.pad_across_processes(tensor).tolist(),
            "reduce": accel.reduce(torch.tensor(mine, device=CPU)).item(),
            "object": any_process(mine == 2),
            "sum": sum_of(mine).item(),
        }


def test_collectives(pool):
    one, other = pool.run(collectives)
    assert one["uneven"] == [1.0, 0.0]
    assert other["uneven"] == [2.0, 2.0]
    assert one["gather"] == one["numbers"] == [1.0, 2.0]
    assert (one["reduce"], one["object"], one["sum"]) == (3.0, True, 3.0)


def votes():
    accel = Accelerator(cpu=True)
    asked = Votes()
    with torch.device("meta"):
        if accel.process_index == 1:
            asked.ask("stop", "enough")
            accel.set_trigger()
        return accel.check_trigger(), asked.agree()


def test_votes(pool):
    assert pool.run(votes) == [(True, {"stop": ("enough", 1)})] * 2


def counts_of_tokens():
    accel = Accelerator(cpu=True)
    with torch.device("meta"):
        return _sum_over_ranks(accel.process_index + 1.0)


def test_counts_of_tokens(pool):
    assert pool.run(counts_of_tokens) == [3.0, 3.0]


def uneven_steps():
    accel = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = [torch.ones(1, 1) for _ in range(accel.process_index + 1)]
    with torch.device("meta"), accel.join_uneven_inputs([model]):
        for batch in inputs:
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    return model.module.weight.item()


def test_uneven_steps(pool):
    one, other = pool.run(uneven_steps)
    assert one == other


def stream_from_shards():
    accel = Accelerator(cpu=True)
    with torch.device("meta"):
        return sharded_stream._exchange(accel.process_index, 7)


def test_the_counts_of_shards(pool):
    assert pool.run(stream_from_shards) == [[[0, 7], [1, 7]]] * 2


def test_the_order_of_a_seedable_sampler_is_the_same_on_any_device():
    def order() -> list[int]:
        return list(SeedableRandomSampler(range(9), data_seed=5))

    plain = order()
    with torch.device("meta"):
        assert order() == plain
        assert list(SeedableRandomSampler(range(9), replacement=True, data_seed=5))


def test_the_length_of_a_stream_is_shared_with_its_workers():
    with torch.device("meta"):
        shards = IterableShards(
            iter([]), batch_size=1, drop_last=False, rank=0, world_size=1, every_rank=False
        )
        shards.even = True
        assert shards.even is True
