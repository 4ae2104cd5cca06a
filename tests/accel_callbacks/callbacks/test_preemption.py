"""Preemption: real signals to real processes, and what is left for the next start."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint, Preemption
from accel_callbacks.callbacks.preemption import SignalCatcher, parse_signals, requeue_slurm
from tests.support import warm

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "preempted.py"
SPEC = importlib.util.spec_from_file_location("preempted", SCRIPT)
preempted = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(preempted)

pytestmark = pytest.mark.usefixtures("default_sigterm")

FAKE_SCONTROL = """#!/bin/sh
echo "$@" >> {log}
ls {folder}/checkpoints >> {log}
"""


def start(folder: Path, hold: int, **environment: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with open(folder / "log", "ab") as log:
        return warm.Popen(
            [sys.executable, str(SCRIPT), str(folder), "0", str(hold)],
            stdout=log,
            stderr=log,
            env=environment,
        )


def wait_for_step(folder: Path, step: int, process: subprocess.Popen, rank: int = 0) -> None:
    steps = folder / f"steps-{rank}"
    while not steps.exists() or len(steps.read_text().splitlines()) < step:
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.01)


@pytest.mark.first
def test_a_signal_saves_requeues_and_the_next_start_ends_as_if_nothing_had_been(tmp_path):
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(FAKE_SCONTROL.format(log=tmp_path / "queue", folder=tmp_path))
    scontrol.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    process = start(tmp_path, 5, **slurm)
    wait_for_step(tmp_path, 5, process)
    process.send_signal(signal.SIGUSR1)
    (tmp_path / "go").touch()
    assert process.wait() == 75, (tmp_path / "log").read_text()
    stopped_at = int((tmp_path / "steps-0").read_text().split()[-1])
    assert stopped_at in (5, 6)
    name = f"step-{stopped_at:08d}"
    assert (tmp_path / "queue").read_text().split() == ["requeue", "4711", name]
    assert not (tmp_path / "weights-0").exists()
    assert f"stopped at step {stopped_at}: SIGUSR1" in (tmp_path / "log").read_text()
    checkpoint_io.verify(tmp_path / "checkpoints" / name)  # raises unless it is whole

    steps = []
    resumed = preempted.train(tmp_path / "checkpoints", steps.append)
    assert steps == list(range(stopped_at + 1, 37))
    assert resumed == preempted.train(None)


# --- in this process --------------------------------------------------------------------------


class Notes(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_preempt(self, run, model, reason):
        self.events.append(f"preempt {reason} {run.global_step}")

    def on_checkpoint_saved(self, run, model, path):
        self.events.append(f"saved {path.rsplit('-', 1)[1]}")


def fit(*callbacks: Callback, window: int = 1, signal_at: int | None = None, body=None):
    """Two epochs of four batches; a signal comes in the body of one batch."""
    accel = Accelerator(cpu=True, gradient_accumulation_steps=window, callbacks=callbacks)
    model = torch.nn.Linear(1, 1)
    parts = (torch.optim.SGD(model.parameters(), lr=0.1), range_loader(4))
    model, optimizer, loader = accel.prepare(model, *parts)
    seen = 0
    with accel.run("fit") as run:
        for _ in run.epochs(2):
            for batch in loader:
                with accel.accumulate(model):
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                seen += 1
                if seen == signal_at:
                    signal.raise_signal(signal.SIGTERM)
            if body is not None:
                body(run)
    return accel


def range_loader(length: int):
    return torch.utils.data.DataLoader(torch.ones(length, 1))


def test_the_window_that_is_open_is_finished_first_and_the_save_is_durable_before_the_code(
    tmp_path,
):
    notes = Notes()
    seen = []

    def requeue(run):
        seen.extend([run.global_step, *notes.events])

    preemption = Preemption(requeue=requeue, exit_code=99)
    with pytest.raises(SystemExit) as stop:
        fit(preemption, notes, Checkpoint(tmp_path), window=2, signal_at=3)
    assert stop.value.code == 99
    assert notes.events == ["preempt SIGTERM 2", "saved 00000002"]
    assert seen == [2, "preempt SIGTERM 2", "saved 00000002"]
    assert preemption.received is None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_without_a_code_the_script_goes_on(tmp_path):
    accel = fit(Preemption(exit_code=None), Checkpoint(tmp_path), signal_at=3)
    assert accel.current_run.preempted
    assert accel.current_run.stop_reason == "SIGTERM"
    assert [e.name for e in checkpoint_io.CheckpointFolder(tmp_path).list()] == ["step-00000003"]


def test_a_signal_in_the_validation_is_met_at_the_end_of_the_epoch(tmp_path):
    notes = Notes()
    with pytest.raises(SystemExit) as stop:
        fit(
            Preemption(),
            notes,
            Checkpoint(tmp_path, every_n_steps=1000),
            body=lambda run: signal.raise_signal(signal.SIGTERM),
        )
    assert stop.value.code == 75
    assert notes.events == ["preempt SIGTERM 4", "saved 00000004"]


def test_a_signal_after_the_last_step_makes_the_next_run_give_way(capfd):
    preemption = Preemption(exit_code=None)
    accel = Accelerator(cpu=True, callbacks=[preemption])
    with accel.run("first"):
        signal.raise_signal(signal.SIGTERM)
    assert "SIGTERM came too late" in capfd.readouterr().err
    epochs = []
    with accel.run("second") as run:
        epochs.extend(run.epochs(3))
    assert epochs == []
    assert run.preempted
    with accel.run("third") as run:
        epochs.extend(run.epochs(2))
    assert epochs == [0, 1]


def test_the_first_signal_of_a_second_run_is_a_first_one():
    catcher = SignalCatcher(parse_signals(["SIGTERM"]))
    for _ in range(2):
        catcher.caught = None
        catcher.install()
        signal.raise_signal(signal.SIGTERM)
        assert catcher.caught is signal.SIGTERM
        catcher.restore()


def test_what_a_script_has_set_for_a_signal_comes_back_after_an_error_too():
    heard = []

    def fails():
        preemption = Preemption(exit_code=None)  # with one, the run would be left here
        with Accelerator(cpu=True, callbacks=[preemption]).run("fails"):
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)  # the same one, passed on
            assert heard == []
            preemption._catcher.echo = 0.0
            signal.raise_signal(signal.SIGUSR1)  # another one
            assert heard == ["mine"]
            raise ValueError("in the loop")

    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("mine"))
    try:
        with pytest.raises(ValueError, match="in the loop"):
            fails()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["mine", "mine"]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("requeue", "says"),
    [("slurm", "scontrol requeue 12_3: .*No such file"), (lambda run: 1 / 0, "ZeroDivisionError")],
)
def test_a_requeue_that_fails_is_said_and_the_code_stays(tmp_path, monkeypatch, requeue, says):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match=says), pytest.raises(SystemExit) as stop:
        fit(Preemption(requeue=requeue), signal_at=1)
    assert stop.value.code == 75
    monkeypatch.undo()


@pytest.mark.parametrize("job", ["7\nreboot", "--help", "7_"])
def test_a_job_id_that_slurm_does_not_write_is_one_line(monkeypatch, job):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    with pytest.raises(RuntimeError, match="is not the id of a SLURM job") as caught:
        requeue_slurm()
    assert "\n" not in str(caught.value)


def test_off_the_main_thread_nothing_is_caught_and_a_warning_says_so():
    told = []

    def work():
        with pytest.warns(UserWarning, match="main thread"):
            fit(Preemption())
        told.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told == [True]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"signals": ["SIGTREM"]}, "Did you mean 'SIGTERM'"),
        ({"signals": ["SIGKILL"]}, "cannot be caught"),
        ({"exit_code": 256}, "exit_code=256"),
        ({"requeue": "lsf"}, "requeue='lsf'"),
        ({"grace_period": "3 steps"}, "grace_period='3 steps' must be a time"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Preemption(**options)


# --- signals, without a training --------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from accel_callbacks.callbacks.preemption import SignalCatcher, parse_signals
catcher = SignalCatcher(parse_signals(["SIGTERM", "SIGUSR1"]), {patience})
catcher.install()
{body}
"""
SECOND = """
signal.raise_signal(15)
signal.raise_signal(15)
print(catcher.caught.name, flush=True)
catcher.echo = 0.0
signal.raise_signal(15)
"""
STUCK = """
import ctypes
from accel_callbacks.callbacks import preemption
preemption._HANDLER_TIMEOUT = 0.1
signal.raise_signal(15)
print("stuck", flush=True)
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
library.pthread_mutex_lock(mutex)  # for ever, as in a collective: no handler of Python runs
"""
GRACE = "signal.raise_signal(15); print('waits', flush=True); time.sleep(60)"
RESTORED = """
timer = (signal.raise_signal(15), catcher._deadline)[1]
catcher.restore()
timer.join()  # it would send the signal before it ends
print("restored", flush=True)
"""
FIRST_DEADLINE = """
signal.raise_signal(15)
timer = catcher._deadline
signal.raise_signal(10)
print(catcher._deadline is timer, flush=True)
catcher.restore()
"""
NO_DEADLINE = """
import threading
signal.raise_signal(15)
print(catcher._deadline, threading.active_count(), flush=True)
"""
CHILD = """
child = os.fork()
if not child:
    signal.raise_signal(10)  # SIGUSR1 does nothing to a child
    signal.raise_signal(10)
    signal.raise_signal(15)
    os._exit(0)
print(os.waitpid(child, 0)[1], catcher.caught, flush=True)
"""


@pytest.mark.parametrize(
    ("body", "patience", "says", "code"),
    [
        (SECOND, None, "SIGTERM", -15),
        (GRACE, 0.1, "waits", -15),
        (RESTORED, 60, "restored", 0),
        (FIRST_DEADLINE, 60, "True", 0),
        (NO_DEADLINE, None, "None 1", 0),
        (STUCK, 0.1, "stuck", 143),
        (CHILD, None, "15 None", 0),
    ],
    ids=[
        "second signal",
        "end of the grace period",
        "restored in the grace period",
        "another signal in the grace period",
        "no grace period",
        "stuck at the end of it",
        "forked child",
    ],
)
def test_a_process_ends_by_its_signal_after_all(body, patience, says, code):
    program = PROGRAM.format(patience=patience, body=body)
    done = warm.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (says, code), done.stderr
    assert ("this process is still at" in done.stderr) == (body in (GRACE, STUCK))


SLOW_STORE = """
import pathlib, signal, sys, fsspec, torch
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint, Preemption
from tests.support.gated_files import GatedFileSystem
fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
folder, gate = sys.argv[1], pathlib.Path(sys.argv[1], "gate")
store = {"storage_options": {"gate": str(gate)}, "memory_every_n_steps": 100}
saver = Checkpoint(f"gated://{folder}/store", **store)
accel = Accelerator(cpu=True, callbacks=[saver, Preemption(grace_period=4)])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(8, 2))
model, optimizer, data = accel.prepare(model, optimizer, data)
with accel.run("demo") as run:
    for batch in data:
        accel.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if run.global_step == 3:
            gate.touch()
            signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm")
def test_where_the_time_is_too_short_for_the_store_the_state_is_in_memory(tmp_path):
    memory = tmp_path / "launch"
    memory.mkdir(mode=0o700)
    done = warm.run(
        [sys.executable, "-c", SLOW_STORE, str(tmp_path)],
        env={**os.environ, "ACCEL_LAUNCH_MEMORY": str(memory)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -15, done.stderr
    message = " ".join(done.stderr.split())
    assert "still at" in message
    assert "a restart resumes from the state in memory, if it is of this launch" in message
    assert list(memory.glob("memory/*/snapshot-00000003/manifest.json"))
    assert not list(tmp_path.glob("store/*/manifest.json"))
