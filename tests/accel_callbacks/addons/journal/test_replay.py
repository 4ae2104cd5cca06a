"""A past step again, bit by bit, and what differs named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from accel_callbacks.addons.journal.replay import Replay, changes, first_difference
from accel_callbacks.cli.main import main
from accel_callbacks.journal import Journal, JournalError
from tests.support import warm

JOB = """
import sys, torch
from pathlib import Path
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint

def main(folder, data_file, lr):
    torch.manual_seed(0)
    # A folder of the run's own, beside the project: a replay is not to write there.
    saver = Checkpoint(f"{folder}/ck", every_n_steps=4, keep_last=2)
    accel = Accelerator(cpu=True, project_dir=f"{folder}/project", log_with="jsonl",
                        gradient_accumulation_steps=2, callbacks=[saver])
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    samples = torch.tensor([[float(number) for number in line.split()]
                            for line in Path(data_file).read_text().splitlines()])
    data = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    scheduler = accel.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    with accel.run("job", config={"lr": lr}) as run:
        for epoch in run.epochs(2):
            for batch in data:
                with accel.accumulate(model):
                    loss = model(batch).square().mean()
                    accel.backward(loss)
                    accel.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    Path(folder, "ended").write_text("the script came to its end")

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(Path(sys.argv[3]).read_text()))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of 12 steps, in windows of 2 batches with a tail, which ended by itself; and a copy."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(JOB)
    lines = [" ".join(f"{(i * 7 + j * 3) % 11 / 10:.1f}" for j in range(4)) for i in range(21)]
    (folder / "data.txt").write_text("\n".join(lines))
    (folder / "lr.txt").write_text("0.01")
    start(folder)
    kept = tmp_path_factory.mktemp("kept") / "job"
    shutil.copytree(folder, kept)
    return folder, kept


@pytest.fixture
def job(recorded: tuple[Path, Path]) -> Path:
    """That run in its place, which its journal names, whatever the test before did to it."""
    folder, kept = recorded
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    return folder


def start(folder: Path) -> None:
    words = [folder / "job.py", folder, folder / "data.txt", folder / "lr.txt"]
    done = warm.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the replay's processes in milliseconds."""

    def run(command: list[str], **options: Any) -> Any:
        # What a warm process names as its command line is not how it is started.
        return warm.run(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def replay(job: Path, step: int, *words: str) -> int:
    names = ("job.py", "", "data.txt", "lr.txt")
    command = " ".join([sys.executable, *(str(job / name) for name in names)])
    return main(["replay", str(job / "project"), "--step", str(step), "--command", command, *words])


@pytest.mark.first
def test_a_step_is_replayed_from_the_nearest_checkpoint_and_nothing_is_written(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job / "ended").unlink()
    before = content(job)
    assert replay(job, 11, "--dump", str(job.parent / f"{job.name}-dump")) == 0
    printed = capsys.readouterr().out
    assert "replaying steps 9 to 11 from" in printed
    assert "step-00000008" in printed
    assert "all bits are as they were" in printed
    assert "changed since" not in printed
    assert content(job) == before
    (dump,) = (job.parent / f"{job.name}-dump").iterdir()
    with safe_open(str(dump), "pt") as tensors:
        names = set(tensors.keys())
    assert {"activations/0/0", "activations/0/1", "activations/0/1#2"} <= names
    assert {"gradients/0/0.weight", "gradients/0/2.bias"} <= names


def test_two_replays_that_differ_are_no_change_of_the_run(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(job, 2, "--check") == 0
    assert "same bits on all ranks" in capsys.readouterr().out
    script = job / "job.py"
    broken = script.read_text().replace(
        "loss = model(batch)", "import time; loss = (1 + time.time() % 1) * model(batch)"
    )
    script.write_text(broken)
    assert replay(job, 2, "--check") == 1
    assert "two replays differ, step 1, rank 0: the loss differs first" in capsys.readouterr().out


def test_a_script_that_does_not_come_to_the_step_shows_its_output(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job / "data.txt").unlink()
    assert replay(job, 2) == 1
    error = capsys.readouterr().err
    assert "did not come to step 2" in error
    assert "FileNotFoundError" in error
    assert replay(job, 99) == 1
    assert "has no step 99" in capsys.readouterr().err


def test_a_run_without_its_checkpoints_is_replayed_from_its_beginning(job: Path) -> None:
    journal = Journal.read(job / "project")
    assert Replay(journal, 11).first == 9
    for manifest in job.glob("ck/*/manifest.json"):
        manifest.unlink()
    assert (Replay(journal, 11).checkpoint, Replay(journal, 11).first) == (None, 1)
    start_mark = journal.attempts[0].start
    start_mark["step"] = 3
    with pytest.raises(JournalError, match="copy a checkpoint"):
        Replay(journal, 11)


def test_a_secret_in_the_command_line_is_asked_for(job: Path) -> None:
    journal = Journal.read(job / "project")
    journal.attempts[0].start["command"] = ["python", "job.py", "--token", "(set, not shown)"]
    with pytest.raises(JournalError, match="had a secret"):
        Replay(journal, 2)._words()


def test_the_recorded_command_line_is_started_on_as_many_processes(job: Path) -> None:
    journal = Journal.read(job / "project")
    replayed = Replay(journal, 2)
    replayed.start["command"] = ["/old/python", "-u", "-X", "dev", "job.py", "-m", "x"]
    assert replayed._words() == [sys.executable, "-u", "-X", "dev", "job.py", "-m", "x"]
    object.__setattr__(replayed.attempt, "world_size", 3)
    launch = ["-m", "accel_callbacks.cli", "launch", "--num_processes", "3"]
    launch += ["--num_machines", "1", "--cpu"]
    assert replayed._words() == [sys.executable, *launch, "job.py", "-m", "x"]
    replayed.start["command"] = ["python", "-m", "package.train", "--lr", "1"]
    assert replayed._words()[-4:] == ["-m", "package.train", "--lr", "1"]
    worker = ["/old/python", "-u", "/old/accel_callbacks/launch/worker.py"]  # of our launcher
    replayed.start["command"] = [*worker, "script", "job.py", "-m", "x"]
    assert replayed._words() == [sys.executable, *launch, "job.py", "-m", "x"]
    replayed.start["command"] = [*worker, "module", "package.train", "--lr", "1"]
    assert replayed._words() == [sys.executable, *launch, "-m", "package.train", "--lr", "1"]


def test_what_has_changed_is_listed() -> None:
    then = {"versions": {"torch": "2.12", "numpy": "1"}, "config": {"lr": 1}, "world_size": 2}
    now = {"versions": {"torch": "2.13", "numpy": "1"}, "config": {"lr": 2}, "world_size": 1}
    assert changes(then, now) == [
        "versions torch: 2.12 -> 2.13",
        "config lr: 1 -> 2",
        "world_size: 2 -> 1",
    ]
    assert changes(then, json.loads(json.dumps(then))) == []


def test_a_journal_is_equal_to_itself(job: Path) -> None:
    journal = Journal.read(job / "project")
    assert first_difference(journal, journal, 1, 12) is None
    assert str(first_difference(journal, journal, 12, 13)) == "None"
