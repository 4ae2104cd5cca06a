"""The journal of two processes: a file of rows for each, and one attempt for both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.addons.journal import recorder
from accel_callbacks.addons.journal.rank_means import rank_means
from accel_callbacks.addons.journal.samples import samples_of
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.cli.main import main
from accel_callbacks.journal import Journal
from accel_callbacks.loop import passes
from tests.support import warm
from tests.support.bound import BOUND
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed


def indices_seen(folder: str) -> list[list[int]]:
    """Train 4 steps an epoch, the last of which is filled up; return what this rank read."""
    accel = Accelerator(cpu=True, project_dir=folder, timeout=BOUND)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.utils.data.DataLoader(torch.arange(15.0)[:, None], batch_size=2, shuffle=True)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    seen = []
    with accel.run("indices") as run:
        for _ in run.epochs(2):
            for batch in data:
                seen.append(batch.flatten().int().tolist())
                accel.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
    return seen


@pytest.mark.first
def test_the_samples_of_a_step_are_told_by_rank(pool: Pool, tmp_path: Path) -> None:
    seen = pool.run(indices_seen, str(tmp_path))
    journal = Journal.read(tmp_path)
    for step in range(1, 9):
        (batch,) = samples_of(journal, step).batches
        assert batch == [seen[rank][step - 1] for rank in range(2)], step


def train_with_a_slow_rank(folder: str) -> None:
    """Train four steps by a clock on which rank 1 takes a second longer than rank 0."""
    now = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "time", lambda: now)
        patch.setattr(passes, "perf_counter", lambda: now)
        accel = Accelerator(cpu=True, project_dir=folder, timeout=BOUND)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        data = torch.utils.data.DataLoader(torch.arange(16.0)[:, None], batch_size=2)
        model, optimizer, data = accel.prepare(model, optimizer, data)
        with accel.run("slow"):
            for batch in data:
                began, loss = now, model(batch).mean()
                now += 0.0 if accel.is_main_process else 1.0
                accel.backward(loss)
                now = began + 1.0  # rank 0 has waited in the backward
                optimizer.step()
                optimizer.zero_grad()


def test_the_wait_for_a_slow_rank_is_told(pool: Pool, tmp_path: Path) -> None:
    pool.run(train_with_a_slow_rank, str(tmp_path))
    fast, slow = rank_means(Journal.read(tmp_path))
    assert (fast.own_s, slow.own_s) == (0.0, 1.0)
    assert (fast.wait_s, slow.wait_s) == (1.0, 0.0)
    # The time of a step tells nothing: both have the wait in it.
    assert fast.step_s == slow.step_s > 0


JOB = """
import os, sys, torch
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint

torch.manual_seed(0)
accel = Accelerator(cpu=True, project_dir=sys.argv[1], callbacks=[Checkpoint(every_n_steps=2)])
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(12, 2), batch_size=2, shuffle=True)
model, optimizer, data = accel.prepare(model, optimizer, data)
with accel.run("two") as run:
    for _ in run.epochs(2):
        for batch in data:
            loss = model(batch).square().mean()
            plant = os.environ.get("PLANT") if run.global_step == 3 else None
            if plant == "loss" and accel.process_index == 1:
                loss = loss + 1e-7
            accel.backward(loss)
            if plant == "bit" and accel.process_index == 1:
                next(model.parameters()).grad.view(torch.int32)[0, 0] ^= 1 << 28
            accel.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes in the folder ``run``, beside its script."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--cpu"]
    command += ["--num_processes", "2", str(folder / "job.py"), str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert warm.run(command, warm_children=True, env=environment).returncode == 0
    return folder


@pytest.fixture
def warm_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a launcher of a replay, and its ranks, in milliseconds."""

    def start(words: list[str], **options: Any) -> Any:
        return warm.run(words, warm_children=True, **options)

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.usefixtures("warm_launches")
def test_a_step_of_two_processes_is_replayed_from_the_recorded_command(
    two: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = ["replay", str(two / "run"), "--step", "4"]
    assert main(replay) == 0
    printed = capsys.readouterr().out
    assert "replaying steps 3 to 4 from" in printed
    assert "ranks: 2" in printed
    assert "all bits are as they were" in printed
    assert "changed since" not in printed
    for plant, named in (("loss", "the loss differs first"), ("bit", "the gradient differs first")):
        monkeypatch.setenv("PLANT", plant)
        assert main(replay) == 1
        assert f"step 4, rank 1: {named}" in capsys.readouterr().out


@pytest.mark.usefixtures("warm_launches")
def test_another_number_of_processes_is_named(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{sys.executable} {two / 'job.py'} {two / 'run'}"
    assert main(["replay", str(two / "run"), "--step", "2", "--command", command]) == 1
    printed = capsys.readouterr().out
    assert "step 1, rank 0: the data differ first" in printed
    assert "world_size: 2 -> 1" in printed


def train(folder: str, epochs: int, fail: bool = False) -> list[float]:
    """Train 3 steps an epoch; return this rank's losses."""
    torch.manual_seed(0)
    accel = Accelerator(
        cpu=True,
        project_dir=folder,
        callbacks=[Checkpoint(every_n_steps=2)],
        timeout=BOUND,
    )
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(12, 2), batch_size=2, shuffle=True)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    losses = []
    try:
        with accel.run("two") as run:
            for _ in run.epochs(epochs):
                for batch in data:
                    loss = model(batch).square().mean()
                    losses.append(loss.item())
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    if fail and run.global_step == 5:
                        raise ValueError("planted")
    except ValueError:
        if not fail:
            raise
    return losses


@pytest.mark.first
def test_each_rank_has_its_own_rows(pool: Pool, tmp_path: Path) -> None:
    losses = pool.run(train, str(tmp_path), 2)
    journal = Journal.read(tmp_path)
    (attempt,) = journal.attempts
    assert attempt.world_size == 2
    assert sorted(attempt.files) == [0, 1]
    for rank in range(2):
        rows = journal.rows(rank)
        assert rows["loss"].tolist() == losses[rank]
        assert rows["position"].tolist() == [4, 8, 12] * 2
    assert losses[0] != losses[1]


def test_an_error_is_an_attempt_that_failed_on_both(pool: Pool, tmp_path: Path) -> None:
    pool.run(train, str(tmp_path), 3, True)
    pool.run(train, str(tmp_path), 3)
    journal = Journal.read(tmp_path)
    ends = [mark for mark in journal.marks if mark["kind"] == "end"]
    assert [end["status"] for end in ends] == ["failed", "success"]
    assert "planted" in ends[0]["error"]
    for rank in range(2):
        assert journal.rows(rank, repeated=False)["step"].tolist() == list(range(1, 10))
        assert journal.rows(rank)["step"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
