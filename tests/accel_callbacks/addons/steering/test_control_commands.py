"""`accel ctl` on two processes: both act between the same two steps, and a replay does so too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_callbacks.addons.journal.state import holder_of, state_of
from accel_callbacks.cli.main import main
from accel_callbacks.journal import Journal
from tests.support import warm

pytestmark = pytest.mark.distributed

JOB = """
import os, sys, time, torch
from datetime import timedelta
from pathlib import Path
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint, Control

folder, pace = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(0)

def evaluate(run):
    with run.accelerator.evaluate(run.model):
        for batch in val:
            run.model(batch)
    pace.with_name("evaluating").touch()
    while pace.read_text() == "wait in the evaluation":
        time.sleep(0.01)

saver = Checkpoint(f"{folder}/checkpoints", every_n_steps=5, keep_last=None)
control = Control(evaluate)
patience = timedelta(minutes=10)
accel = Accelerator(cpu=True, project_dir=folder, callbacks=[saver, control], timeout=patience)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(24, 2), batch_size=2, shuffle=True)
val = torch.utils.data.DataLoader(torch.randn(4, 2), batch_size=2, shuffle=True)
model, optimizer, data, val = accel.prepare(model, optimizer, data, val)
scheduler = accel.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.999**n))
with accel.run("steered") as run:
    for _ in run.epochs(10000):
        for batch in data:
            accel.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            time.sleep(0 if "ACCEL_REPLAY" in os.environ else 0.02)
"""


class Job:
    """Two processes that train until they are told to stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder / "run")
        self.pace = folder / "pace"
        self.pace.write_text("go on")
        (folder / "job.py").write_text(JOB)
        launch = [sys.executable, "-m", "accel_callbacks.cli", "launch", "--cpu"]
        words = [str(folder / "job.py"), self.folder, str(self.pace)]
        self.command = [*launch, "--num_processes", "2", *words]
        self.log = folder / "log"
        self.process: Any = None

    def start(self) -> None:
        with self.log.open("wb") as log:
            self.process = warm.Popen(
                self.command,
                warm_children=True,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait_for(self, condition: Callable[[Journal], bool]) -> None:
        while True:
            ended = self.process.poll() is not None
            try:
                if condition(Journal.read(self.folder)):
                    return
            except ValueError:  # not written yet
                pass
            assert not ended, self.log.read_text()
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda journal: bool((journal.rows()["step"] >= step).any()))

    def text(self) -> str:
        """What the job has logged, on one line."""
        return " ".join(self.log.read_text().split())

    def wait_for_line(self, part: str) -> None:
        self.wait_for(lambda journal: part in self.text())

    def kill(self) -> None:
        """Kill rank 0; the launcher ends the other one."""
        if self.process is not None and self.process.poll() is None:
            (folder,) = Path(self.folder, "journal").iterdir()
            holder = holder_of(str(folder))
            os.kill(self.process.pid if holder is None else holder.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Any:
    job = Job(tmp_path)
    yield job
    job.kill()


COMMANDS = [
    (["set", "lr=1e-2"], "set lr=0.01, which was 0."),
    (["evaluate"], "evaluate (after step"),
    (["save"], "saved "),
    (["set", "rate=1"], "'rate' cannot be set"),
]


def test_commands_take_effect_on_both_at_one_step_and_are_replayed(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start()
    job.wait_for_step(7)
    for words, done in COMMANDS:
        assert main(["ctl", job.folder, *words]) == 0, job.log.read_text()
        job.wait_for_line(done)
    assert "This run can set: lr" in job.text()
    # Two at once.
    for _ in range(2):
        assert main(["ctl", job.folder, "set", "lr=2e-2"]) == 0
    job.wait_for(lambda journal: job.text().count("set lr=0.02") == 2)
    last = int(Journal.read(job.folder).rows()["step"].max())
    job.wait_for_step(last + 3)
    assert main(["ctl", job.folder, "stop"]) == 0
    assert ": stop; its log says what it does" in capsys.readouterr().out
    assert job.process.wait() == 0, job.log.read_text()
    assert "stopped at step" in job.log.read_text()
    journal = Journal.read(job.folder)
    assert state_of(journal) == "ended"
    commands = [mark for mark in journal.marks if mark["kind"] == "control"]
    assert [mark["action"] for mark in commands] == [
        "set",
        "evaluate",
        "save",
        "set",
        "set",
        "stop",
    ]
    first, both = commands[0], [journal.rows(rank) for rank in range(2)]
    for rows in both:
        following = rows["learning_rate"][rows["step"] == first["step"] + 1]
        assert following.tolist() == [0.01]
        assert rows["step"][-1] == commands[-1]["step"]
    assert both[0]["learning_rates"].tolist() == both[1]["learning_rates"].tolist()
    assert main(["ctl", job.folder, "save"]) == 1
    assert "is alive and can be steered: `accel report` shows" in capsys.readouterr().err
    # From before the first command, over all of them, to after the last one that changed a rate.
    step = commands[4]["step"] + 2
    for saved in Path(job.folder, "checkpoints").glob("step-*"):
        if int(saved.name.removeprefix("step-")) > first["step"]:
            (saved / "manifest.json").unlink()

    def start(words: list[str], **options: Any) -> Any:
        return warm.run(words, warm_children=True, **options)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(subprocess, "run", start)
    replay = ["replay", job.folder, "--step", str(step), "--command", " ".join(job.command)]
    code = main(replay)
    captured = capsys.readouterr()
    assert code == 0, captured.out + captured.err
    assert "all bits are as they were" in captured.out


def test_a_command_to_a_killed_run_does_not_stop_the_next_start(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start()
    job.wait_for_step(2)
    job.pace.write_text("wait in the evaluation")
    assert main(["ctl", job.folder, "evaluate"]) == 0
    job.wait_for(lambda journal: job.pace.with_name("evaluating").exists())
    assert main(["ctl", job.folder, "stop"]) == 0
    job.kill()
    assert main(["ctl", job.folder, "stop"]) == 1
    assert "is alive and can be steered: `accel report` shows" in capsys.readouterr().err
    assert state_of(Journal.read(job.folder)) == "killed"
    job.pace.write_text("go on")
    job.start()
    job.wait_for(lambda journal: len(journal.attempts) == 2)
    last = int(Journal.read(job.folder).rows()["step"].max())
    job.wait_for_step(last + 8)
    assert "commands to an earlier start of the run are ignored: evaluate, stop" in job.text()
    assert main(["ctl", job.folder, "stop"]) == 0
    assert job.process.wait() == 0, job.log.read_text()
