"""Callbacks that stop and save by a vote: a signal or a clock on one process moves both."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint, EarlyStopping, Timer
from tests.support import warm
from tests.support.bound import BOUND
from tests.support.ports import free_port

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "preempted.py"
SPEC = importlib.util.spec_from_file_location("preempted", SCRIPT)
preempted = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(preempted)

pytestmark = pytest.mark.distributed


def signalled(folder: str | None, rank: int, at: int) -> list:
    """Where a run ends of which one process gets a signal, and how."""
    last = 0

    def each_step(step: int) -> None:
        nonlocal last
        last = step
        if step == at and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        weights = preempted.train(folder, each_step)
    except SystemExit as stop:
        return [last, stop.code, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL]
    return [last, weights]


@pytest.mark.first
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_is_a_checkpoint_of_both_that_goes_on_bitwise(pool, tmp_path, rank):
    folder = str(tmp_path / "checkpoints")
    assert pool.run(signalled, folder, rank, 9) == [[10, 75, True]] * 2
    resumed = pool.run(signalled, folder, rank, 0)
    assert resumed == pool.run(signalled, None, rank, 0)
    assert [last for last, _ in resumed] == [18, 18]


class Paths(Callback):
    """Notes the steps that were saved, by folder."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    def on_checkpoint_saved(self, run, model, path):
        self.saved.append("/".join(path.split("/")[-2:]))


def fit(*callbacks: Callback, steps: int = 8, epochs: int = 1, each_step=lambda run: None) -> list:
    accel = Accelerator(cpu=True, callbacks=callbacks, timeout=BOUND)
    model = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(torch.ones(2 * steps, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accel.prepare(model, sgd, loader)
    with accel.run("fit", resume=False) as run:
        for _ in run.epochs(epochs):
            for batch in loader:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                each_step(run)
    return [run.global_step, run.stop_reason]


def saves_by_the_clock(folder: str) -> list:
    """Only the main process's clock counts, and only the Checkpoint whose clock it is saves."""
    rank, paths = int(os.environ["RANK"]), Paths()
    mine = Checkpoint(f"{folder}/clock", every="1 h", keep_last=None)
    other = Checkpoint(f"{folder}/other", every="2 h", keep_last=None)

    def each_step(run) -> None:
        if run.global_step == 3 and rank == 0:
            mine.schedule._clock._last_due -= 3600
        if run.global_step == 5 and rank == 1:
            mine.schedule._clock._last_due -= 3600

    fit(mine, other, paths, each_step=each_step)
    return paths.saved


def test_a_clock_saves_on_all_processes_at_the_step_of_the_main_one(pool, tmp_path):
    expected = ["clock/step-00000004", "clock/step-00000008", "other/step-00000008"]
    for saved in pool.run(saves_by_the_clock, str(tmp_path)):
        assert sorted(saved) == expected


def asked_by_one(folder: str) -> list:
    """One process asks for a checkpoint; a Timer gives the votes."""
    paths = Paths()

    def each_step(run) -> None:
        if run.global_step == 2 and run.global_rank == 1:
            run.save_now("rank 1 wants one")

    saver = Checkpoint(f"{folder}/asked", every="100 steps", keep_last=None)
    fit(saver, paths, Timer("1 h"), each_step=each_step)
    return paths.saved


def test_a_process_that_asks_for_a_checkpoint_gets_it_on_all(pool, tmp_path):
    saved = pool.run(asked_by_one, str(tmp_path))
    assert saved == [["asked/step-00000003", "asked/step-00000008"]] * 2


def out_of_time() -> list:
    timer = Timer("1 h")

    def each_step(run) -> None:
        if run.global_step == 3 and run.global_rank == 1:
            timer.load_state_dict({"elapsed": {"train": 3600.0}})

    return fit(timer, each_step=each_step)


def test_the_time_of_one_process_stops_both_at_one_step(pool):
    assert pool.run(out_of_time) == [[4, "the time is up: trained for 1:00:00"]] * 2


def logged_on_the_main_process() -> list:
    def each_step(run) -> None:
        if run.is_global_zero:
            run.accelerator.log({"loss": 1.0})

    return fit(EarlyStopping("loss", patience=2), each_step=each_step)


def test_a_metric_of_the_main_process_alone_is_no_missed_metric(pool):
    assert (
        pool.run(logged_on_the_main_process) == [[4, "loss did not improve on 1 in 2 checks"]] * 2
    )


def missed() -> list:
    return fit(EarlyStopping("loss"), epochs=2)


def test_a_missed_metric_ends_both(pool):
    first, second = pool.outcomes(missed)
    assert first[0] == "RuntimeError"
    assert "EarlyStopping watches 'loss'" in first[1]
    assert second[0] == "RemoteError"
    assert "EarlyStopping watches 'loss'" in second[1]


def failing(folder: str) -> None:
    Accelerator(cpu=True, timeout=BOUND)  # the pool keeps the group of another test: a warning

    def each_step(run) -> None:
        if run.global_step == 3:
            raise ValueError("bad batch")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(Checkpoint(folder, on_exception=True, every="100 steps"), each_step=each_step)


def test_after_an_error_two_processes_save_nothing(pool, tmp_path):
    first, second = pool.outcomes(failing, str(tmp_path))
    assert "bad batch" in first[1]
    assert "bad batch" in second[1]
    assert [path.name for path in tmp_path.iterdir()] == [".lease.json"]


def best_of(folder: str, everybody: bool) -> str | None:
    """Three epochs; the main process finds the second the best, the other one the first."""
    accel = Accelerator(cpu=True, timeout=BOUND)
    saver = Checkpoint(folder, every_n_epochs=1, monitor="loss")
    accel.add_callback(saver)
    data = accel.prepare(torch.utils.data.DataLoader(torch.ones(4, 1)))
    losses = [3.0, 1.0, 2.0] if accel.is_main_process else [1.0, 2.0, 3.0]
    with accel.run("best") as run:
        for epoch in run.epochs(3):
            list(data)
            run.global_step += 1
            if everybody or accel.is_main_process:
                accel.log({"loss": losses[epoch]})
    return saver.best_path


@pytest.mark.parametrize("everybody", [True, False])
def test_the_best_checkpoint_is_the_same_on_all_processes(pool, tmp_path, everybody):
    assert pool.run(best_of, str(tmp_path), everybody) == [str(tmp_path / "step-00000002")] * 2


# --- processes of their own -------------------------------------------------------------------


def start(folder: Path, pace: float) -> list[subprocess.Popen]:
    port = str(free_port())
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **world, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "ab") as log:
        return [
            warm.Popen(
                [sys.executable, str(SCRIPT), str(folder), str(pace)],
                stdout=log,
                stderr=log,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]


@pytest.mark.slow
def test_two_scripts_end_with_the_code_and_go_on_when_they_are_started_again(pool, tmp_path):
    processes = start(tmp_path, 0.05)
    steps = tmp_path / "steps-1"
    while not steps.exists() or len(steps.read_text().splitlines()) < 4:
        assert processes[1].poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    assert [process.wait() for process in processes] == [75, 75], (tmp_path / "log").read_text()
    again = start(tmp_path, 0.0)
    assert [process.wait() for process in again] == [0, 0], (tmp_path / "log").read_text()
    for rank in range(2):
        told = [int(line) for line in (tmp_path / f"steps-{rank}").read_text().split()]
        assert told == list(range(1, 19))
    for rank, (_, undisturbed) in enumerate(pool.run(signalled, None, 0, 0)):
        assert json.loads((tmp_path / f"weights-{rank}").read_text()) == undisturbed
