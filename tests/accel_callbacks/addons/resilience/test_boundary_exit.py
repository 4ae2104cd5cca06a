"""A signal anywhere in a run of one process: it ends at the next place, and repeats no step."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import EMA, Checkpoint, Preemption
from tests.support import left

pytestmark = pytest.mark.usefixtures("default_sigterm")


@pytest.fixture(scope="module")
def unbroken() -> list:
    return left.train(None)


def signal_at(place: str, number: int, log: list):
    """A visit that raises the signal where it first comes to a place."""

    def visit(now: str, here: int) -> None:
        log.append((now, here))
        if log.count((now, here)) == 1 and (now, here) == (place, number):
            signal.raise_signal(signal.SIGTERM)

    return visit


@pytest.mark.parametrize(
    ("place", "number", "stops_at", "following"),
    [
        ("fit start", 0, 0, []),
        ("sanity", 2, 0, ["forward"]),
        ("forward", 0, 0, []),
        ("step", 3, 3, None),
        ("between", 0, 8, []),
        ("validation 0", 0, 8, ["forward"]),
        ("validation 0", 4, 8, ["forward"]),
        ("validation end", 1, 16, None),
        ("epoch end", 0, 8, None),
        ("save", 8, 8, None),
        ("epoch", 1, 9, None),
        ("validation 1", 3, 16, ["forward"]),
        ("test", 5, 16, ["forward"]),
    ],
)
def test_a_signal_anywhere_loses_no_step_and_repeats_none(
    tmp_path, unbroken, place, number, stops_at, following
):
    log: list = []
    with pytest.raises(SystemExit) as stop:
        left.train(tmp_path, signal_at(place, number, log))
    assert stop.value.code == 75
    saves = [entry for entry in log if entry[0] == "save"]
    ours = [entry for entry in log if entry[0] not in ("save", "validation end", "epoch end")]
    if following is not None:  # it is left; elsewhere the loops end
        assert [name for name, _ in ours[ours.index((place, number)) + 1 :]] == following
    assert len(saves) == len(set(saves))  # none is saved twice
    newest = checkpoint_io.CheckpointFolder(tmp_path).list()[-1]
    assert newest.name == f"step-{stops_at:08d}"
    checkpoint_io.verify(newest.path)
    again: list = []
    steps, weights = left.train(tmp_path, lambda *here: again.append(here))
    assert steps == list(range(stops_at + 1, 17))
    assert weights == unbroken[1]
    if following == ["forward"] and place != "sanity":
        assert again.count((place, 5)) == 1  # the evaluation is repeated, once


@contextlib.contextmanager
def kernel_of_fake_tensors():
    with FakeTensorMode() as mode, in_kernel_invocation_manager(mode):
        yield


@pytest.mark.parametrize("mode", [FakeTensorMode, kernel_of_fake_tensors])
def test_a_signal_among_tensors_without_data_waits_for_the_next_batch(tmp_path, unbroken, mode):
    """A compilation works with such tensors, and here the model holds averaged weights."""
    seen = []

    def visit(place: str, number: int) -> None:
        seen.append((place, number))
        if (place, number) == ("validation 0", 4):
            with mode():
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as stop:
        left.train(tmp_path, visit)
    assert stop.value.code == 75
    assert ("validation 0", 4) in seen
    assert ("validation 0", 5) not in seen
    steps, weights = left.train(tmp_path)
    assert steps == list(range(9, 17))
    assert weights == unbroken[1]


def train_by_hand(folder, at_epoch_end, **options) -> None:
    """Train for an epoch of two steps, with what comes at its end."""
    accel = Accelerator(cpu=True, callbacks=[Preemption(**options), Checkpoint(folder)])
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.ones(2, 1))
    model, optimizer, data = accel.prepare(model, sgd, data)
    with accel.run("by hand") as run:
        for _ in run.epochs(1):
            for batch in data:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                if at_epoch_end is None and run.global_step == 1:
                    signal.raise_signal(signal.SIGTERM)
            if at_epoch_end is not None:
                at_epoch_end(accel, model)


def evaluate_by_hand(accel, model) -> None:
    with accel.evaluate(model):
        for number in range(3):
            if number == 1:
                signal.raise_signal(signal.SIGTERM)


def sample(accel, model) -> None:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1)  # another one is part of the same preemption


@pytest.mark.parametrize(
    ("at_epoch_end", "options", "says"),
    [
        (evaluate_by_hand, {}, "SIGTERM: the evaluation goes on to the next place where"),
        (sample, {}, "SIGTERM: the code between two steps goes on to the next place where"),
        (sample, {"exit_code": None}, "SIGTERM: the code between two steps goes on"),
        (sample, {"grace_period": "90 s"}, "saved there, or it ends 90 s after the signal"),
        (None, {}, ""),
    ],
    ids=["evaluation", "code", "without a code", "with a grace period", "in a step"],
)
def test_what_goes_on_before_the_run_can_stop_is_said_once(
    tmp_path, capsys, at_epoch_end, options, says
):
    with contextlib.suppress(SystemExit):
        train_by_hand(tmp_path, at_epoch_end, **options)
    told = [line for line in capsys.readouterr().err.splitlines() if "goes on to" in line]
    assert len(told) == (at_epoch_end is not None)
    assert says in "".join(told)
    (entry,) = checkpoint_io.CheckpointFolder(tmp_path).list()
    assert entry.name == f"step-{1 if at_epoch_end is None else 2:08d}"


def test_an_error_after_a_signal_is_an_error(tmp_path):
    def visit(place: str, number: int) -> None:
        if (place, number) == ("epoch", 0):
            signal.raise_signal(signal.SIGTERM)
        if (place, number) == ("step", 1):
            raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        left.train(tmp_path, visit)


def average_by_callback(model, callbacks):
    callbacks.append(EMA(decay=0.5))
    return lambda: None


def average_by_hand(model, callbacks):
    return lambda: model.weight.data.copy_(torch.full((1, 1), 7.0))


@pytest.mark.parametrize(
    ("average", "left_at"), [(average_by_callback, [0]), (average_by_hand, [0, 1, 2, 3])]
)
def test_averaged_weights_in_the_model_are_never_saved_as_its_weights(tmp_path, average, left_at):
    """Where they are copied into the model, the evaluation is finished first."""
    batches = []
    model = torch.nn.Linear(1, 1)
    callbacks = [Preemption(), Checkpoint(tmp_path)]
    swap_in = average(model, callbacks)
    accel = Accelerator(cpu=True, callbacks=callbacks)
    data = torch.utils.data.DataLoader(torch.ones(4, 1))
    val = torch.utils.data.DataLoader(torch.ones(4, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data, val = accel.prepare(model, sgd, data, val)
    kept = []

    def train() -> None:
        with accel.run("average") as run:
            for _ in run.epochs(2):
                for batch in data:
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                kept.append(model.weight.detach().clone())
                swap_in()
                with accel.evaluate(model):
                    for index, _ in enumerate(val):
                        batches.append(index)
                        if index == 0:
                            signal.raise_signal(signal.SIGTERM)
                model.weight.data.copy_(kept[-1])

    with pytest.raises(SystemExit):
        train()
    (weights,) = kept
    assert batches == left_at
    reader = checkpoint_io.open_checkpoint(checkpoint_io.CheckpointFolder(tmp_path).list()[-1].path)
    assert torch.equal(reader.state["models"]["0"]["weight"].read(), weights)


class SignalledAgain(Callback):
    """Gets the signal a second time while the preemption is carried out."""

    def on_preempt(self, run, model, reason):
        signal.raise_signal(signal.SIGTERM)


def test_a_second_signal_in_the_save_loses_nothing(tmp_path):
    preemption = Preemption()
    preemption._catcher.echo = 0.0
    accel = Accelerator(cpu=True, callbacks=[preemption, SignalledAgain(), Checkpoint(tmp_path)])
    data = accel.prepare(torch.utils.data.DataLoader(torch.ones(4, 1)))

    def train() -> None:
        with accel.run("again") as run:
            for _ in run.epochs(1):
                for _ in data:
                    run.global_step += 1
                    if run.global_step == 2:
                        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as stop:
        train()
    assert stop.value.code == 75
    assert [e.name for e in checkpoint_io.CheckpointFolder(tmp_path).list()] == ["step-00000002"]


def test_a_script_that_catches_the_exit_saves_where_it_stops_after_all(tmp_path):
    accel = Accelerator(cpu=True, callbacks=[Preemption(), Checkpoint(tmp_path)])
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.ones(4, 1))
    val = torch.utils.data.DataLoader(torch.ones(4, 1))
    model, optimizer, data, val = accel.prepare(model, sgd, data, val)
    evaluated = []

    def train() -> None:
        with accel.run("catches") as run:
            for _ in run.epochs(1):
                with contextlib.suppress(BaseException), accel.evaluate(model):
                    for batch in val:
                        evaluated.append(batch)
                        signal.raise_signal(signal.SIGTERM)
                for batch in data:
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(SystemExit):
        train()
    assert len(evaluated) == 1
    (entry,) = checkpoint_io.CheckpointFolder(tmp_path).list()
    assert entry.name == "step-00000001"
    reader = checkpoint_io.open_checkpoint(entry.path)
    assert reader.state["run"]["global_step"] == 1
    assert torch.equal(reader.state["models"]["0"]["weight"].read(), model.weight)


class Stuck(torch.utils.data.Dataset):
    """Eight items. The worker that has read so many sends a signal, and delivers no more."""

    def __init__(self, at) -> None:
        self.at, self.read = at, multiprocessing.Value("i", 0)
        self.used = multiprocessing.Value("i", 0)  # counted by whoever uses them

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.read.value == self.at:
            while self.used.value < self.at:
                time.sleep(0.01)
            time.sleep(0.3)  # until the run waits, mostly
            os.kill(os.getppid(), signal.SIGTERM)
            signal.pause()  # whoever waited for it would wait for ever
        self.read.value += 1
        return torch.full((1,), float(index))


def train_from_workers(folder, seen, *, data_at=None, val_at=None, counted=True) -> list:
    """Train and evaluate for two epochs, with a worker each; returns the weights."""
    torch.manual_seed(3)
    accel = Accelerator(cpu=True, callbacks=[Preemption(), EMA(decay=0.5), Checkpoint(folder)])
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.3))
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    trained, validated = Stuck(data_at), Stuck(val_at)
    data = torch.utils.data.DataLoader(trained, num_workers=1, shuffle=True)
    val = torch.utils.data.DataLoader(validated, num_workers=1, shuffle=True)
    model, optimizer, data, val = accel.prepare(model, adam, data, val)
    with accel.run("workers") as run:
        for _ in run.epochs(2) if counted else range(run.first_epoch, 2):
            for batch in data:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                seen.append(int(batch))
                trained.used.value += 1
            if counted:
                with accel.evaluate(model):
                    for batch in val:
                        model(batch)
                        validated.used.value += 1
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"data_at": 0}, 0),
        ({"data_at": 5}, 5),
        ({"data_at": 8}, 8),
        ({"data_at": 11, "counted": False}, 11),
        ({"data_at": 8, "counted": False}, 8),
        ({"val_at": 3}, 8),
        ({"val_at": 8}, 16),
    ],
    ids=[
        "first batch",
        "batch",
        "second epoch",
        "batch of a plain loop",
        "second pass of a plain loop",
        "evaluation",
        "second evaluation",
    ],
)
def test_a_wait_for_the_workers_of_a_loader_is_left(tmp_path, options, steps):
    counted = options.get("counted", True)
    undisturbed, before, after = [], [], []
    weights = train_from_workers(tmp_path / "whole", undisturbed, counted=counted)
    with pytest.raises(SystemExit) as stop:
        train_from_workers(tmp_path / "left", before, **options)
    assert stop.value.code == 75
    assert before == undisturbed[:steps]
    assert train_from_workers(tmp_path / "left", after, counted=counted) == weights
    assert after == undisturbed[steps:]
