"""The journal: what a row says, what a kill leaves, and what a reader refuses."""

from __future__ import annotations

import errno
import math
import os
import random
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.addons.journal.format import HEADER_SIZE, ROW_SIZE, SKIPPED, UNKNOWN
from accel_callbacks.callbacks import Callback, Checkpoint
from accel_callbacks.journal import Journal, JournalError
from accel_callbacks.precision.base import StepFinding
from loggers.trackers import line_file
from tests.support import warm

ROOT = Path(__file__).resolve().parents[4]
_GENERATORS = ("generators", "host_generators")


def train(folder: Path, *, stop_after: int = 0, epochs: int = 2, **options: Any) -> Accelerator:
    """Train 6 steps an epoch over 21 samples, in windows of 2 batches of 2."""
    torch.manual_seed(0)
    accel = Accelerator(cpu=True, project_dir=folder, gradient_accumulation_steps=2, **options)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(21, 4), batch_size=2, shuffle=True)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    scheduler = accel.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2))
    with accel.run("demo", config={"lr": 0.1, "token": "secret"}) as run:
        for _ in run.epochs(epochs):
            for batch in data:
                with accel.accumulate(model):
                    accel.backward(model(batch).square().mean())
                    accel.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if stop_after and run.global_step >= stop_after:
                    raise KeyboardInterrupt
            with accel.evaluate(model):
                pass
    return accel


class Losses(Callback):
    """Keeps what the loop saw."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_before_backward(self, run: Any, model: Any, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())


def test_a_row_says_what_the_loop_saw(tmp_path: Path) -> None:
    seen = Losses()
    accel = train(tmp_path, callbacks=[seen])
    rows = Journal.read(tmp_path).rows()
    assert rows["step"].tolist() == list(range(1, 13))
    assert rows["epoch"].tolist() == [0] * 6 + [1] * 6
    assert rows["position"].tolist() == [4, 8, 12, 16, 20, 21] * 2
    assert rows["micro_batches"].tolist() == [2, 2, 2, 2, 2, 1] * 2
    pairs = [seen.losses[i : i + 2] for i in range(0, 10, 2)]
    assert rows["loss"][:5].tolist() == [sum(pair) / 2 for pair in pairs]
    assert rows["loss"][5] == seen.losses[10]
    assert rows["learning_rate"][:5].tolist() == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])
    assert (rows["gradient_norm"] > 0).all()
    looked = np.flatnonzero(rows["generators"])
    assert rows["step"][looked].tolist() == [1, 8], "the first, and each eighth"
    assert len(set(rows["generators"][looked].tolist())) == 2, "dropout draws"
    assert np.flatnonzero(rows["host_generators"]).tolist() == [0]
    assert (rows["flags"] == 0).all()
    assert not rows["repeated"].any()
    assert accel.callbacks == [seen], "the recorder is no callback"


def test_two_runs_alike_have_rows_alike_and_nothing_is_drawn(tmp_path: Path) -> None:
    alike = ["step", "position", "loss", "losses", "gradient_norm", "learning_rates", "generators"]
    drawn = []
    for name, on in (("a", True), ("b", True), ("c", False)):
        random.seed(1)
        np.random.seed(1)
        train(tmp_path / name, journal=on)
        drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))
    first, second = (Journal.read(tmp_path / name).rows()[alike] for name in "ab")
    assert (first == second).all()
    assert drawn[0] == drawn[2]
    assert not (tmp_path / "c" / "journal").exists()


def test_with_and_without_it_the_weights_are_the_same(tmp_path: Path) -> None:
    runs = [train(tmp_path / str(on), journal=on) for on in (True, False)]
    weights = [list(accel.models[0].parameters()) for accel in runs]
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


def test_marks_say_how_it_began_and_ended(tmp_path: Path) -> None:
    train(tmp_path, callbacks=[Checkpoint(every_n_steps=6)])
    journal = Journal.read(tmp_path)
    kinds = [mark["kind"] for mark in journal.marks]
    assert kinds[:2] == ["start", "train"]
    assert kinds[-1] == "end"
    assert kinds.count("save") >= 2
    start = journal.attempts[0].start
    assert start["config"] == {"lr": 0.1, "token": "(set, not shown)"}
    assert start["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert {"argv", "cwd", "environment_names", "numerics", "hardware", "git"} <= set(start)
    assert journal.name == "demo"
    assert journal.marks[-1]["status"] == "success"


def test_a_resumed_run_tells_the_attempts_apart(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, stop_after=5, callbacks=[Checkpoint(every_n_steps=3)])
    train(tmp_path, callbacks=[Checkpoint(every_n_steps=3)])
    journal = Journal.read(tmp_path)
    rows = journal.rows()
    assert rows["attempt"].tolist() == [1] * 4 + [2] * 9
    assert rows["step"][rows["repeated"]].tolist() == [4]
    kept = journal.rows(repeated=False)
    assert kept["step"].tolist() == list(range(1, 13))
    train(tmp_path / "whole")
    whole = Journal.read(tmp_path / "whole").rows()
    same = ["step", "position", "loss", "gradient_norm", "learning_rate"]
    assert (kept[same] == whole[same]).all(), "the resume is bitwise"
    looked = [kept["step"][np.flatnonzero(kept[name])].tolist() for name in _GENERATORS]
    # The first of an attempt and those after a save too: a replay may begin there.
    assert looked == [[1, 4, 7, 8, 10], [1, 4, 7, 10]]
    ends = [mark for mark in journal.marks if mark["kind"] == "end"]
    assert [mark["status"] for mark in ends] == ["interrupted", "success"]
    assert journal.attempts[1].start["resumed_from"].endswith("step-00000003")


class SkipThird(Callback):
    """Leaves the third step out."""

    def on_before_optimizer_step(self, run: Any, model: Any, optimizer: Any) -> None:
        if run.global_step == 2 and not self.skipped:
            self.skipped = True
            run.skip_step("bad")

    skipped = False


def test_a_step_that_is_left_out_has_a_row(tmp_path: Path) -> None:
    train(tmp_path, callbacks=[SkipThird()])
    rows = Journal.read(tmp_path).rows()
    assert rows["step"].tolist() == [1, 2, 2, *range(3, 12)]
    assert np.flatnonzero(rows["flags"] & SKIPPED).tolist() == [2]
    assert not rows["repeated"].any()


def test_a_step_of_which_only_the_device_knows_has_its_row_once_that_is_read(
    tmp_path: Path,
) -> None:
    """As under fp16 on a GPU, where the second and third step overflow."""
    accel = Accelerator(cpu=True, project_dir=tmp_path)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.arange(24.0).reshape(6, 4), batch_size=1)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    overflows = iter([0.0, 1.0, 1.0, 0.0, 0.0, 0.0])

    def step(inner: Any, args: Any, kwargs: Any) -> tuple[StepFinding, None]:
        overflow = next(overflows)
        if not overflow:
            inner.step()
        return StepFinding(torch.tensor(overflow)), None

    optimizer._steps_plainly, optimizer._precision.step = False, step
    seen = []
    with accel.run("fp16") as run:
        for _ in run.epochs(1):
            for batch in data:
                loss = model(batch).square().mean()
                seen.append(loss.item())
                accel.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    rows = Journal.read(tmp_path).rows()
    assert rows["loss"].tolist() == seen
    assert rows["step"].tolist() == [1, 1, 1, 2, 3, 4]
    assert np.flatnonzero(rows["flags"] & SKIPPED).tolist() == [1, 2]


def test_a_loop_over_data_of_its_own_has_no_position(tmp_path: Path) -> None:
    accel = Accelerator(cpu=True, project_dir=tmp_path)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accel.prepare(torch.optim.SGD([weight], lr=0.5))
    with accel.run("own"):
        for _ in range(3):
            accel.backward((weight * 3).sum())
            optimizer.step()
            optimizer.zero_grad()
    rows = Journal.read(tmp_path).rows()
    assert rows["position"].tolist() == [UNKNOWN] * 3
    assert rows["loss"].tolist() == [3.0, -1.5, -6.0]
    assert math.isnan(rows["gradient_norm"][0])


def test_without_a_project_folder_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Accelerator(cpu=True).run():
        pass
    monkeypatch.setenv("ACCEL_JOURNAL", "0")
    with Accelerator(cpu=True, project_dir=tmp_path).run():
        pass
    assert list(tmp_path.iterdir()) == []


# --- what a kill and a disk leave ----------------------------------------------------------------

KILLED = """
import os, signal, sys, time, torch
from accel_callbacks import Accelerator
accel = Accelerator(cpu=True, project_dir=sys.argv[1])
weight = torch.nn.Parameter(torch.ones(1))
optimizer = accel.prepare(torch.optim.SGD([weight], lr=0.5))
with accel.run("killed"):
    for step in range(10**6):
        accel.backward((weight * 3).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step == 200:
            print("now", flush=True)
            sys.stdin.readline()  # until all of these are in the file
"""


def test_a_kill_loses_the_rows_of_the_last_second_at_most(tmp_path: Path) -> None:
    process = warm.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    while len(Journal.read(tmp_path).rows()) < 200:
        time.sleep(0.01)
    process.stdin.write("\n")
    process.stdin.flush()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    rows = Journal.read(tmp_path).rows()
    assert len(rows) >= 200
    assert rows["step"].tolist() == list(range(1, len(rows) + 1))


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: Any, force: bool = False) -> None:
        if file.pending:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(line_file.LocalLines, "flush", full)
    accel = train(tmp_path)
    assert accel.current_run.global_step == 12
    assert "journal" in caplog.text
    assert "No space left" in caplog.text


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal").write_text("a file")
    assert train(tmp_path).current_run.global_step == 12
    assert "no journal of this run" in capsys.readouterr().err


# --- hostile files --------------------------------------------------------------------------------


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    train(tmp_path)
    (file,) = tmp_path.glob("journal/*/*.rows")
    return file


@pytest.mark.parametrize("cut", [1, ROW_SIZE - 1, ROW_SIZE + 5])
def test_a_torn_end_is_left_out(rows_file: Path, tmp_path: Path, cut: int) -> None:
    data = rows_file.read_bytes()
    rows_file.write_bytes(data[:-cut])
    assert len(Journal.read(tmp_path).rows()) == 11 - (cut > ROW_SIZE)
    rows_file.write_bytes(data[:-ROW_SIZE] + bytes(3 * ROW_SIZE))  # as a power cut leaves it
    assert len(Journal.read(tmp_path).rows()) == 11
    for length in (0, 3, HEADER_SIZE - 1):
        rows_file.write_bytes(data[:length])
        assert len(Journal.read(tmp_path).rows()) == 0


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (0, "no file of a journal"),
        (9, "header is damaged"),
        (HEADER_SIZE + 2 * ROW_SIZE + 20, "row 2 is damaged"),
    ],
)
def test_a_flipped_bit_is_found(rows_file: Path, tmp_path: Path, at: int, message: str) -> None:
    data = bytearray(rows_file.read_bytes())
    data[at] ^= 4
    rows_file.write_bytes(data)
    with pytest.raises(JournalError, match=message):
        Journal.read(tmp_path).rows()


def test_another_version_says_what_to_install(rows_file: Path, tmp_path: Path) -> None:
    from accel_callbacks.addons.journal import format as bytes_of

    data = bytearray(rows_file.read_bytes())
    data[8] = 9
    data[HEADER_SIZE - 4 : HEADER_SIZE] = bytes_of._checksum(bytes(data[: HEADER_SIZE - 4]))
    rows_file.write_bytes(data)
    with pytest.raises(JournalError, match=r"version 9 .* install the accel-callbacks"):
        Journal.read(tmp_path).rows()


def test_marks_that_are_cut_or_damaged(rows_file: Path, tmp_path: Path) -> None:
    marks = rows_file.parent / "attempt-0001.jsonl"
    text = marks.read_bytes()
    marks.write_bytes(text[:-10])
    assert Journal.read(tmp_path).marks[-1]["kind"] == "batch"
    marks.write_bytes(b"{" + text)
    with pytest.raises(JournalError, match="line 1 is damaged"):
        Journal.read(tmp_path)


def test_a_folder_without_one_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="has no journal"):
        Journal.read(tmp_path)
    train(tmp_path)
    with pytest.raises(JournalError, match="has no run 'x'"):
        Journal.read(tmp_path, run_id="x")


def test_in_a_store(tmp_path: Path) -> None:
    url = f"memory://journal-{tmp_path.name}"
    train(url)  # type: ignore[arg-type]
    train(url)  # type: ignore[arg-type]
    assert Journal.read(url).rows()["step"].tolist() == list(range(1, 13))


def test_the_independent_reader_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    script = ROOT / "examples" / "read_journal.py"
    assert len(script.read_text("utf-8").splitlines()) <= 60
    reader = runpy.run_path(str(script))
    (file,) = tmp_path.glob("journal/*/*.rows")
    header, rows = reader["read_rows"](file)
    ours = Journal.read(tmp_path).rows()
    assert header["attempt"] == 1
    assert all((rows[name] == ours[name]).all() for name in rows.dtype.names)
