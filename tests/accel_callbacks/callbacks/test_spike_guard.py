"""SpikeGuard in real loops: damaged samples, what is left out, resumes, and when it gives up."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import EMA, Checkpoint, SpikeGuard

SAMPLES, BATCH = 800, 8
STEPS = SAMPLES // BATCH


def samples(damaged: list[int]) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5, 3.0])
    targets += torch.randn(SAMPLES, generator=generator)
    for index in damaged:
        targets[index] = 300.0
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES), inputs, targets)


class Killed(Exception):
    """Stands for a process that is gone."""


class Training:
    """One epoch over samples, in order; the ledger has those that each step was made of."""

    def __init__(self, *callbacks: Any, damaged: list[int] | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.ledger: Counter[int] = Counter()
        self.accel = Accelerator(cpu=True, callbacks=callbacks, **options)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
        loader = torch.utils.data.DataLoader(samples(damaged or []), batch_size=BATCH)
        self.model, self.optimizer, self.loader = self.accel.prepare(model, optimizer, loader)

    def run(self, kill_at: int | None = None) -> Any:
        with self.accel.run("spikes") as run:
            for _ in run.epochs(1):
                for step, (ids, inputs, targets) in enumerate(self.loader):
                    if step == kill_at:
                        raise Killed
                    loss = (self.model(inputs).squeeze(1) - targets).square().mean()
                    self.accel.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.ledger.update(ids.tolist())
        return run

    def loss(self) -> float:
        _, inputs, targets = samples([]).tensors
        with torch.no_grad():
            return float((self.model(inputs).squeeze(1) - targets).square().mean())

    def weights(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy(self.model.state_dict())


def guard(**options: Any) -> SpikeGuard:
    return SpikeGuard(**{"warmup": 20, "snapshot_every_n_steps": 5, **options})


def test_a_damaged_sample_ruins_a_run_and_not_a_guarded_one() -> None:
    damaged = [52 * BATCH + 3]
    clean = Training()
    clean.run()
    ruined = Training(damaged=damaged)
    ruined.run()
    watch = guard()
    healed = Training(watch, damaged=damaged)
    run = healed.run()
    assert ruined.loss() > 1.2 * clean.loss()
    assert abs(healed.loss() - clean.loss()) < 0.01 * clean.loss()
    assert (watch.rollbacks, run.global_step) == (1, STEPS - 1)
    assert set(healed.ledger.values()) == {1}
    assert len(healed.ledger) == SAMPLES
    (sentence,) = watch.story
    assert sentence.startswith("step 53: the loss is ")
    assert sentence.endswith("went back to the weights of step 50 in host memory")


def test_weights_are_those_of_a_run_without_the_samples_that_are_left_out() -> None:
    """Those of steps 51 and 52, after the copy, and of step 53, the spike."""
    healed = Training(guard(), damaged=[52 * BATCH])
    healed.run()
    plain = Training(damaged=[52 * BATCH])
    for step, (_, inputs, targets) in enumerate(plain.loader):
        if step not in (50, 51, 52):
            loss = (plain.model(inputs).squeeze(1) - targets).square().mean()
            plain.accel.backward(loss)
            plain.optimizer.step()
            plain.optimizer.zero_grad()
    for name, value in plain.weights().items():
        assert torch.equal(value, healed.weights()[name])


def test_nothing_changes_where_there_is_no_spike() -> None:
    watch = guard()
    guarded, plain = Training(watch), Training()
    guarded.run()
    plain.run()
    assert watch.rollbacks == 0
    for name, value in plain.weights().items():
        assert torch.equal(value, guarded.weights()[name])


def test_gradients_alone_are_a_spike() -> None:
    """Of a loss whose value hides it."""
    watch = guard()
    training = Training(watch)
    with training.accel.run("spikes") as run:
        for _ in run.epochs(1):
            for step, (_, inputs, targets) in enumerate(training.loader):
                loss = (training.model(inputs).squeeze(1) - targets).square().mean()
                factor = 1e4 if step == 60 else 1.0
                training.accel.backward(loss * factor - loss.detach() * (factor - 1))
                training.optimizer.step()
                training.optimizer.zero_grad()
    assert watch.rollbacks == 1
    assert watch.story[0].startswith("step 61: the gradient norm is ")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_a_spike_before_the_warmup(value: float) -> None:
    watch = guard()
    training = Training(watch)
    training.loader.dataset.tensors[1][3 * BATCH] = value
    training.run()
    assert watch.rollbacks == 1
    assert watch.story[0].startswith("step 4: the loss is nan")
    assert watch.story[0].endswith("step 0 in host memory")


def test_a_run_that_is_resumed_within_a_recovery_ends_like_one_that_was_not(
    tmp_path: Path,
) -> None:
    damaged = [52 * BATCH, 58 * BATCH]

    def training(name: str) -> tuple[SpikeGuard, EMA, Training]:
        watch, average = guard(), EMA(decay=0.9)
        saver = Checkpoint(every_n_steps=18)
        folder = tmp_path / name
        return watch, average, Training(watch, average, saver, damaged=damaged, project_dir=folder)

    watch, average, unbroken = training("unbroken")
    unbroken.run()
    assert watch.rollbacks == 2
    *_, killed = training("killed")
    with pytest.raises(Killed):
        killed.run(kill_at=56)  # between the two
    watch, resumed_average, resumed = training("killed")
    run = resumed.run()
    assert run.resumed_from.endswith("step-00000054")
    assert watch.rollbacks == 2
    assert len(watch.story) == 2
    for name, value in unbroken.weights().items():
        assert torch.equal(value, resumed.weights()[name])
    expected, result = average.state_dict(), resumed_average.state_dict()
    for name, value in expected["average"].items():
        assert torch.equal(value, result["average"][name])


def test_checkpoints_serve_where_no_copies_are_made(tmp_path: Path) -> None:
    watch = guard(snapshot_every_n_steps=None)
    saver = Checkpoint(every_n_steps=10)
    healed = Training(watch, saver, damaged=[52 * BATCH], project_dir=tmp_path)
    healed.run()
    assert watch.rollbacks == 1
    assert "step-00000050" in watch.story[0]


def test_without_copies_and_checkpoints_there_is_nothing_to_go_back_to() -> None:
    training = Training(guard(snapshot_every_n_steps=None))
    with pytest.raises(ValueError, match=r"SpikeGuard\(snapshot_every_n_steps=None\) needs check"):
        training.run()


def test_it_gives_up_with_the_whole_story() -> None:
    training = Training(guard(max_rollbacks=2), damaged=[step * BATCH for step in (52, 55, 57)])
    with pytest.raises(FloatingPointError) as raised:
        training.run()
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("step 56: the loss is ")
    assert "after 2 rollbacks" in lines[0]
    assert [line.split(":")[0] for line in lines[1:]] == ["  step 53", "  step 55"]


def test_rollbacks_far_from_each_other_are_not_added_up() -> None:
    watch = guard(max_rollbacks=1, window=25)
    training = Training(watch, damaged=[40 * BATCH, 80 * BATCH])
    training.run()
    assert watch.rollbacks == 2


class Ranks(Callback):
    """Notes the values of a metric."""

    def __init__(self) -> None:
        self.rollbacks: list[float] = []

    def on_log(self, run: Any, model: Any, values: dict[str, Any], step: int) -> None:
        if "rollbacks" in values:
            self.rollbacks.append(values["rollbacks"])


def test_trackers_get_the_number_of_rollbacks() -> None:
    note = Ranks()
    Training(guard(), note, damaged=[52 * BATCH]).run()
    assert note.rollbacks == [1]


@pytest.mark.parametrize(
    "options",
    [{"window": 0}, {"warmup": 1}, {"warmup": 50, "window": 20}, {"snapshot_every_n_steps": 0}],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at"):
        SpikeGuard(**options)
