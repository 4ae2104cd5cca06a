"""The lease of a run's folders on two processes: rank 0 holds it, and all hear of it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
import torch

from accel_callbacks import Accelerator, ProjectConfiguration
from accel_callbacks.callbacks import Checkpoint
from checkpoint_io import Lease
from checkpoint_io.storage.lease import LEASE
from loggers import read_jsonl
from tests.support import warm
from tests.support.bound import BOUND
from tests.support.pool import Pool

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.distributed


#: Its rank 0 is killed in the second step of the first attempt.
SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint

accel = Accelerator(
    cpu=True,
    project_dir=sys.argv[1],
    log_with="jsonl",
    callbacks=[Checkpoint(every_n_steps=1, async_save=False)],
    timeout=timedelta(minutes=10),
)
model = torch.nn.Linear(1, 1)
data = torch.utils.data.DataLoader(torch.ones(8, 1), 1)
model, optimizer, data = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
with accel.run("restarts") as run:
    for epoch in run.epochs(1):
        for batch in data:
            accel.backward(model(batch).mean())
            if accel.is_main_process and run.global_step == 1 and run.resumed_from is None:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            accel.log({"loss": 1.0})
accel.print("ended at", run.global_step)
accel.end_training()
"""


def test_a_restart_after_a_kill_waits_for_nobody(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--cpu", "--num_processes", "2", "--max_restarts", "1"]
    done = warm.run(
        [sys.executable, "-m", "accel_callbacks.cli", "launch", *options, str(script), "runs"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        warm_children=True,
    )
    assert "ended at 4" in done.stdout, done.stderr
    assert "waiting" not in done.stderr
    assert [row["step"] for row in read_jsonl(tmp_path / "runs/metrics.jsonl")] == [1, 2, 3, 4]
    number = json.loads((tmp_path / "runs" / LEASE).read_text())["number"]
    assert number == 2  # the second attempt followed the first


def accelerator(folder: str, on_conflict: str = "refuse", **options) -> Accelerator:
    config = ProjectConfiguration(folder, on_conflict=on_conflict)  # type: ignore[arg-type]
    accel = Accelerator(
        cpu=True,
        project_config=config,
        callbacks=[Checkpoint()],
        timeout=BOUND,
        **options,
    )
    accel.prepare(torch.nn.Linear(1, 1))
    return accel


def start(folder: str, on_conflict: str = "refuse") -> int:
    with accelerator(folder, on_conflict).run("ranks"):
        return Lease(f"{folder}/checkpoints").find_holder().pid


@pytest.mark.first
def test_a_refusal_is_the_same_error_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    with Lease(tmp_path / "checkpoints", run_name="rival"):
        outcomes = pool.outcomes(start, str(tmp_path))
    texts = {text.partition("\n")[0] for _, text in outcomes}
    assert [kind for kind, _ in outcomes] == ["LeaseError"] * 2
    assert len(texts) == 1
    assert "checkpoints is in use by run 'rival' in process " in texts.pop()
    assert pool.run(start, str(tmp_path)) == [pool.processes[0].pid] * 2  # rank 0 holds it
    assert pool.run(start, str(tmp_path)) == [pool.processes[0].pid] * 2  # and gave it back


def test_a_damaged_record_is_the_same_error_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / LEASE).write_text("[1]")
    outcomes = pool.outcomes(start, str(tmp_path))
    assert [kind for kind, _ in outcomes] == ["LeaseError"] * 2
    texts = {text.partition("\n")[0] for _, text in outcomes}
    assert len(texts) == 1
    assert f"{tmp_path}/checkpoints/{LEASE} says which process " in texts.pop()


def test_all_ranks_wait_for_the_end_of_the_other(pool: Pool, tmp_path: Path) -> None:
    lease = Lease(tmp_path / "checkpoints").acquire()

    def release() -> None:
        time.sleep(1)
        lease.release()

    thread = Thread(target=release)
    thread.start()
    assert pool.run(start, str(tmp_path), "wait") == [pool.processes[0].pid] * 2
    thread.join()


def train(folder: str) -> None:
    accel = accelerator(folder, log_with="jsonl")
    with accel.run("loses"):
        for step in range(1, 400):
            accel.log({"step": step}, step=step)
            time.sleep(0.05)
            accel.wait_for_everyone()


def test_all_ranks_end_when_the_folder_is_taken_over(pool: Pool, tmp_path: Path) -> None:
    rows: list[list[int]] = []

    def written() -> list[int]:
        return [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")]

    def take_over() -> None:
        while not (tmp_path / "metrics.jsonl").exists() or not written():
            time.sleep(0.05)
        lease.acquire("take_over")
        rows.append(written())

    lease = Lease(tmp_path, run_name="rival")
    thread = Thread(target=take_over)
    thread.start()
    first, second = pool.outcomes(train, str(tmp_path))
    thread.join()
    assert first[0] == "LeaseError"
    assert "was taken over by run 'rival'" in first[1]
    assert second[0] == "RemoteError"
    assert "was taken over by run 'rival'" in second[1]
    # A look at the record counts for 0.2 s, in which four steps are taken at most, and one row is
    # on its way.
    assert len(written()) <= len(rows[0]) + 6
    lease.release()


def test_a_commit_of_a_lost_folder_is_the_same_error_on_all_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(start_and_lose, str(tmp_path)) == [["LeaseError", "LeaseError"]] * 2
    assert not list((tmp_path / "checkpoints").glob("step-*/manifest.json"))


def start_and_lose(folder: str) -> list[str]:
    """Save, in both ways, after another process has the folder."""
    accel, kinds = accelerator(folder), []
    accel.loop.leases.hold([(f"{folder}/checkpoints", None)], accel.current_run)
    if accel.is_main_process:
        record = Path(folder, "checkpoints", LEASE)
        text = record.read_text()
        record.write_text(text.replace('"number": 1', '"number": 2').replace('"pid": ', '"pid": 1'))
    accel.wait_for_everyone()
    for async_save in (False, True):
        try:
            accel.save_state(async_save=async_save)
            accel.wait_for_save()
        except Exception as error:
            kinds.append(type(error).__name__)
    return kinds
