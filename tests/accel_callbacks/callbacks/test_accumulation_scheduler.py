"""GradientAccumulationScheduler: which window is used where, and after a resume."""

from __future__ import annotations

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint, GradientAccumulationScheduler


def steps_taken(schedule, *callbacks, stop_at=None, epochs=3, batches=8, **options):
    """After which batches of which epoch the optimizer stepped."""
    accel = Accelerator(
        cpu=True, callbacks=[GradientAccumulationScheduler(schedule), *callbacks], **options
    )
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 1)
    data = torch.utils.data.DataLoader(torch.arange(float(batches)).reshape(-1, 1))
    model, optimizer, data = accel.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), data)
    taken = []
    with accel.run("windows") as run:
        for epoch in run.epochs(epochs):
            for index, batch in enumerate(data):
                with accel.accumulate(model):
                    accel.backward(model(batch).mean())
                    before = run.global_step
                    optimizer.step()
                    optimizer.zero_grad()
                if run.global_step > before:
                    taken.append((epoch, int(run.batch_idx)))
                if run.global_step == stop_at:
                    run.stop("cut")
                del index
    return taken, accel, [p.detach().clone() for p in net.parameters()]


def test_epochs():
    taken, accel, _ = steps_taken({1: 4, 2: 8}, gradient_accumulation_steps=2)
    assert taken == [(0, 1), (0, 3), (0, 5), (0, 7), (1, 3), (1, 7), (2, 7)]
    assert accel.gradient_accumulation_steps == 2  # as it was given


def test_steps():
    taken, *_ = steps_taken({"step": {0: 1, 3: 2, 5: 4}}, epochs=2)
    assert taken == [(0, 0), (0, 1), (0, 2), (0, 4), (0, 6), (0, 7), (1, 3), (1, 7)]


@pytest.mark.parametrize("schedule", [{0: 1, 1: 2, 2: 4}, {"step": {0: 1, 5: 2, 10: 4}}])
def test_a_resumed_run_has_the_window_of_its_place(schedule, tmp_path):
    whole, _, expected = steps_taken(schedule)
    first, *_ = steps_taken(schedule, Checkpoint(tmp_path, every_n_steps=10), stop_at=10)
    second, _, weights = steps_taken(schedule, Checkpoint(tmp_path, every_n_steps=10))
    assert first + second == whole
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


@pytest.mark.parametrize(
    ("schedule", "error"),
    [
        ({}, ValueError),
        ({"step": {}}, ValueError),
        ({0: 0}, ValueError),
        ({-1: 2}, ValueError),
        ({0: 2.5}, TypeError),
        ({"0": 2}, TypeError),
        ({0: True}, TypeError),
        ([4, 2], TypeError),
    ],
)
def test_bad_schedules_are_refused(schedule, error):
    with pytest.raises(error, match="schedule"):
        GradientAccumulationScheduler(schedule)
