"""SpikeGuard on four processes, one of which gets a damaged sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import SpikeGuard
from tests.support.bound import BOUND
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

SAMPLES, GLOBAL_BATCH = 1280, 16
STEPS = SAMPLES // GLOBAL_BATCH
SPIKE = 52  # the batch, from 0
DAMAGED = SPIKE * GLOBAL_BATCH + 9  # of the third rank
LEFT_OUT = (50, 51, 52)  # after the copy at step 50, up to the spike


class Trained(NamedTuple):
    """What a rank has at the end: loss over the undamaged samples, weights, and its ledger."""

    loss: float
    weights: list[float]
    samples: dict[int, list[int]]  # by batch
    story: list[str]
    steps: int


def data(damaged: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5, 3.0])
    targets += torch.randn(SAMPLES, generator=generator)
    if damaged:
        targets[DAMAGED] = 3000.0
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs, targets)


def train(damaged: bool, guarded: bool, leave_out: Collection[int] = ()) -> tuple[Any, ...]:
    torch.manual_seed(0)
    guard = SpikeGuard(warmup=20, snapshot_every_n_steps=5)
    accel = Accelerator(cpu=True, callbacks=[guard] if guarded else [], timeout=BOUND)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    loader = torch.utils.data.DataLoader(data(damaged), batch_size=GLOBAL_BATCH // 4)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    samples = {}
    with accel.run("spikes") as run:
        for _ in run.epochs(1):
            for number, (ids, inputs, targets) in enumerate(loader):
                if number in leave_out:
                    continue
                accel.backward((model(inputs).squeeze(1) - targets).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                samples[number] = ids.tolist()
    _, inputs, targets = data(damaged=False).tensors
    with torch.no_grad():
        loss = (accel.unwrap_model(model)(inputs).squeeze(1) - targets).square().mean()
    weights = [p.tolist() for p in accel.unwrap_model(model).parameters()]
    return float(loss), weights, samples, list(guard.story), run.global_step


def test_a_damaged_sample_of_one_of_four_ranks_is_passed_by_all(pool_of_4: Pool) -> None:
    clean = Trained(*pool_of_4.run(train, False, False)[0])
    ruined = Trained(*pool_of_4.run(train, True, False)[0])
    healed = [Trained(*result) for result in pool_of_4.run(train, True, True)]
    assert ruined.loss > 1.2 * clean.loss
    assert abs(healed[0].loss - clean.loss) < 0.01 * clean.loss
    assert all(rank.weights == healed[0].weights for rank in healed)
    assert all(rank.story == healed[0].story for rank in healed)
    (sentence,) = healed[0].story
    assert sentence.startswith(f"step {SPIKE + 1}: the loss is ")
    assert sentence.endswith("went back to the weights of step 50 in host memory")
    assert healed[0].steps == STEPS - 1
    read = Counter(i for rank in healed for batch in rank.samples.values() for i in batch)
    assert read == Counter(range(SAMPLES))
    assert DAMAGED in healed[2].samples[SPIKE]


def test_the_weights_are_those_of_a_run_without_what_is_left_out(pool_of_4: Pool) -> None:
    """So each other sample counts once, on each rank."""
    healed = [Trained(*result) for result in pool_of_4.run(train, True, True)]
    plain = [Trained(*result) for result in pool_of_4.run(train, True, False, LEFT_OUT)]
    for rank in range(4):
        assert healed[rank].weights == plain[rank].weights
        assert plain[rank].samples == {
            number: ids for number, ids in healed[rank].samples.items() if number not in LEFT_OUT
        }
