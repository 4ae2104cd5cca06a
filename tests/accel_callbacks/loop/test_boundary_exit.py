"""A signal wherever it comes in a run of one process: nothing is lost, and no step is repeated."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import EMA, Checkpoint, Preemption
from tests.support import left


@pytest.fixture(autouse=True)
def nobody_else_listens():
    """Whatever trackers that another test left open have set."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


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
    ("place", "number", "stops_at", "is_last"),
    [
        ("fit start", 0, 0, False),
        ("sanity", 2, 0, True),
        ("forward", 0, 0, True),
        ("step", 3, 3, False),
        ("between", 0, 8, True),
        ("validation 0", 0, 8, True),
        ("validation 0", 4, 8, True),
        ("validation end", 1, 16, False),
        ("epoch end", 0, 8, False),
        ("save", 8, 8, False),
        ("epoch", 1, 8, True),
        ("validation 1", 3, 16, True),
        ("test", 5, 16, True),
    ],
)
def test_a_signal_anywhere_loses_no_step_and_repeats_none(
    tmp_path, unbroken, place, number, stops_at, is_last
):
    log: list = []
    with pytest.raises(SystemExit) as stop:
        left.train(tmp_path, signal_at(place, number, log))
    assert stop.value.code == 75
    saves = [entry for entry in log if entry[0] == "save"]
    ours = [entry for entry in log if entry[0] not in ("save", "validation end", "epoch end")]
    assert not is_last or ours[-1] == (place, number)  # it is left here, and not later
    assert len(saves) == len(set(saves))  # none is saved twice
    newest = checkpoint_io.CheckpointFolder(tmp_path).list()[-1]
    assert newest.name == f"step-{stops_at:08d}"
    checkpoint_io.verify(newest.path)
    again: list = []
    steps, weights = left.train(tmp_path, lambda *here: again.append(here))
    assert steps == list(range(stops_at + 1, 17))
    assert weights == unbroken[1]
    if place.startswith(("validation", "test")) and is_last:
        assert again.count((place, 5)) == 1  # the evaluation is repeated, once


@contextlib.contextmanager
def kernel_of_fake_tensors():
    with FakeTensorMode() as mode, in_kernel_invocation_manager(mode):
        yield


@pytest.mark.parametrize("mode", [FakeTensorMode, kernel_of_fake_tensors])
def test_a_signal_among_tensors_without_data_leaves_the_weights_as_they_are(
    tmp_path, unbroken, mode
):
    """A compilation works with such tensors, and here the model holds averaged weights."""

    def visit(place: str, number: int) -> None:
        if (place, number) == ("validation 0", 4):
            with mode():
                signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the run was not left")

    with pytest.raises(SystemExit) as stop:
        left.train(tmp_path, visit)
    assert stop.value.code == 75
    steps, weights = left.train(tmp_path)
    assert steps == list(range(9, 17))
    assert weights == unbroken[1]


@pytest.mark.parametrize("place", ["forward", "validation 0"])
def test_an_exit_that_comes_out_as_another_error_leaves_the_run_as_well(
    tmp_path, unbroken, capsys, place
):
    """As from a guard of torch.compile, for which an error means that it does not hold."""

    def visit(now: str, number: int) -> None:
        if (now, number) == (place, 0 if place == "forward" else 4):
            try:
                signal.raise_signal(signal.SIGTERM)
            except SystemExit:
                raise AssertionError("guard failed") from None

    with pytest.raises(SystemExit) as stop:
        left.train(tmp_path, visit)
    assert stop.value.code == 75
    assert "inside of what then failed: AssertionError: guard failed" in capsys.readouterr().err
    assert left.train(tmp_path)[1] == unbroken[1]


def test_an_error_after_the_way_back_has_closed_is_an_error(tmp_path):
    def visit(place: str, number: int) -> None:
        with contextlib.suppress(SystemExit):
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
    model, optimizer, data = accel.prepare(model, sgd, data)

    def train() -> None:
        with accel.run("catches") as run:
            for _ in run.epochs(1):
                with contextlib.suppress(BaseException):
                    signal.raise_signal(signal.SIGTERM)
                for batch in data:
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(SystemExit):
        train()
    (entry,) = checkpoint_io.CheckpointFolder(tmp_path).list()
    assert entry.name == "step-00000001"
    reader = checkpoint_io.open_checkpoint(entry.path)
    assert reader.state["run"]["global_step"] == 1
    assert torch.equal(reader.state["models"]["0"]["weight"].read(), model.weight)


class Stuck(torch.utils.data.Dataset):
    """Items of which one does not come in the first run."""

    def __init__(self, folder) -> None:
        self.gate = os.path.join(folder, "gate")

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5 and not os.path.exists(self.gate):
            time.sleep(60)
        return torch.full((1,), float(index))


def test_a_wait_for_the_workers_of_a_loader_is_left(tmp_path):
    def train() -> list:
        accel = Accelerator(cpu=True, callbacks=[Preemption(), Checkpoint(tmp_path / "saved")])
        model = torch.nn.Linear(1, 1)
        data = torch.utils.data.DataLoader(Stuck(tmp_path), num_workers=1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, data = accel.prepare(model, sgd, data)
        with accel.run("stuck") as run:
            for _ in run.epochs(1):
                for batch in data:
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append(int(batch))
                    if run.global_step == 5 and not run.resumed_from:
                        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return seen

    seen: list = []
    with pytest.raises(SystemExit) as stop:
        train()
    assert (stop.value.code, seen) == (75, [0, 1, 2, 3, 4])
    (tmp_path / "gate").touch()
    seen.clear()
    assert train() == [5, 6, 7]
