"""Checkpoint(memory_every_n_steps=...): a restart of a launch resumes from host memory."""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
import torch

from accel_callbacks import Accelerator, Callback, set_seed
from accel_callbacks.addons.resilience import memory_snapshots
from accel_callbacks.addons.resilience.memory_snapshots import MemorySnapshots
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.launch.launch_folder import launch_folder
from accel_callbacks.launch_memory import VARIABLE
from checkpoint_io import CheckpointError
from checkpoint_io.saver.writer import RankWriter
from tests.support.gated_files import GatedFileSystem

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm")
STEPS = 12


class Lost(Exception):
    """Stands for the loss of the process."""


class Saved(Callback):
    def __init__(self) -> None:
        self.paths: list[str] = []

    def on_checkpoint_saved(self, run: Any, model: Any, path: str) -> None:
        self.paths.append(Path(path).name)


class Ended(NamedTuple):
    began: int  # step
    weights: list[float]
    saved: list[str]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a launch, in a folder that stands for /dev/shm."""
    (tmp_path / "memory").mkdir()
    with launch_folder(tmp_path / "memory") as folder:
        monkeypatch.setenv(VARIABLE, str(folder))
        yield folder


def snapshots(memory: Path) -> list[Path]:
    return sorted(memory.glob("memory/*/*"))


class Left(Exception):
    """Stands for the end of a preempted process."""


def train(
    folder: Path,
    lost_at: int | None = None,
    every: int = 5,
    preempt_at: int | None = None,
    **options: Any,
) -> Ended:
    """Train, up to a step at which the process is lost or preempted."""
    options = {"dirpath": folder, "every_n_steps": every, "memory_every_n_steps": 2, **options}
    saved = Saved()
    accel = Accelerator(cpu=True, callbacks=[Checkpoint(**options), saved])
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4, shuffle=True)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    with accel.run("demo") as run:
        began = run.global_step
        for _ in run.epochs(2):
            for batch in data:
                accel.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                accel.wait_for_save()  # so that a snapshot is complete at the next step
                if run.global_step == lost_at:
                    raise Lost
                if run.global_step == preempt_at:
                    run.preempt("notice")
    if run.preempted:
        raise Left
    assert run.global_step == STEPS
    return Ended(
        began, torch.nn.utils.parameters_to_vector(model.parameters()).tolist(), saved.paths
    )


def lose(folder: Path, at: int, **options: Any) -> None:
    with pytest.raises(Lost):
        train(folder, at, **options)


def test_a_restart_resumes_from_memory_bit_by_bit(tmp_path, memory, capsys):
    whole = train(tmp_path / "whole")
    assert not snapshots(memory), "a finished run leaves nothing in memory"
    lose(tmp_path / "lost", 7)
    assert [path.name for path in snapshots(memory)] == ["snapshot-00000006"]
    ended = train(tmp_path / "lost")
    assert ended.began == 6
    assert ended.weights == whole.weights
    assert ended.saved == ["step-00000010", "step-00000012"], "a snapshot fires no hook"
    printed = capsys.readouterr().err
    assert "the state is in memory for restarts of this launch" in printed
    assert "resumed from memory, " in printed
    assert not snapshots(memory)


def test_a_newer_checkpoint_comes_before_memory(tmp_path, memory, capsys):
    lose(tmp_path, 11)
    assert [path.name for path in snapshots(memory)] == ["snapshot-00000008"], "10 is a checkpoint"
    assert train(tmp_path).began == 10
    assert "resumed from memory" not in capsys.readouterr().err


def test_a_loss_before_the_first_checkpoint_resumes_too(tmp_path):
    lose(tmp_path, 3)
    assert train(tmp_path).began == 2


def test_another_launch_resumes_from_the_checkpoint(tmp_path, memory, monkeypatch):
    lose(tmp_path, 7)
    with launch_folder(tmp_path / "memory") as other:
        monkeypatch.setenv(VARIABLE, str(other))
        assert train(tmp_path).began == 5


def test_another_folder_of_checkpoints_has_a_memory_of_its_own(tmp_path):
    lose(tmp_path / "a", 7)
    assert train(tmp_path / "b").began == 0


def flip(snapshot: Path) -> None:
    (tensors,) = snapshot.glob("tensors-*-00001.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)


@pytest.mark.parametrize(("damaged", "began"), [(1, 6), (2, 5), (3, 4)])
def test_a_damaged_snapshot_is_passed_over_for_one_before_then_for_a_checkpoint(
    tmp_path, memory, monkeypatch, capsys, damaged, began
):
    monkeypatch.setattr(MemorySnapshots, "forget", lambda self, but=None: None)
    lose(tmp_path, 8, every=4, memory_every_n_steps=1)
    assert [path.name[-1] for path in snapshots(memory)] == ["1", "2", "3", "5", "6", "7"]
    for snapshot in snapshots(memory)[-damaged:]:
        flip(snapshot)
    assert train(tmp_path).began == began
    assert capsys.readouterr().err.count("passed over ") == damaged


def test_a_snapshot_whose_process_was_killed_in_it_does_not_count(tmp_path, memory):
    lose(tmp_path, 7)
    (snapshot,) = snapshots(memory)
    (snapshot / "manifest.json").unlink()
    with pytest.raises(Lost):
        train(tmp_path, 6)
    assert not snapshot.exists(), "its memory is free for the next one"
    assert train(tmp_path).began == 5


def test_damaged_snapshots_without_a_checkpoint_start_the_run_over(tmp_path, memory):
    lose(tmp_path, 3)
    flip(*snapshots(memory))
    assert train(tmp_path).began == 0


def test_without_room_training_continues_with_a_warning(tmp_path, memory, monkeypatch):
    usage = shutil.disk_usage(memory)._replace(free=100)
    monkeypatch.setattr(memory_snapshots.shutil, "disk_usage", lambda path: usage)
    with pytest.warns(UserWarning, match=r"two snapshots need .* and 100 B are free. Enlarge"):
        lose(tmp_path, 7)
    assert not snapshots(memory)
    assert train(tmp_path).began == 5


def test_memory_that_runs_full_is_a_warning_once(tmp_path, memory, monkeypatch):
    write = RankWriter.write_tensors
    tried = []

    def fail(self: Any, files: Any, labels: Any) -> Any:
        if "snapshot-" not in self._store.url:
            return write(self, files, labels)
        tried.append(self._store.url)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RankWriter, "write_tensors", fail)
    with pytest.warns(UserWarning, match="No space left on device.* are free"):
        ended = train(tmp_path)
    assert len(tried) == 1
    assert ended.saved[0] == "step-00000005"


def test_no_snapshot_waits_for_a_slow_store(tmp_path, memory):
    fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
    gate = tmp_path / "gate"
    saver = Checkpoint(
        f"gated://{tmp_path}/slow",
        every_n_steps=3,
        memory_every_n_steps=2,
        storage_options={"gate": str(gate)},
    )
    accel = Accelerator(cpu=True, callbacks=[saver])
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accel.prepare(
        model, optimizer, torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=4)
    )
    with accel.run("demo", resume=False) as run:
        for batch in data:
            accel.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if run.global_step == 3:
                accel.wait_for_save()  # for the snapshot of step 2
                gate.touch()
            if run.global_step == 5:  # step 4 has passed while the gate is closed
                assert [path.name for path in snapshots(memory)] == ["snapshot-00000002"]
                gate.unlink()


def test_without_a_launch_that_restarts_it_says_so_and_does_nothing(
    tmp_path, monkeypatch, memory, capsys
):
    monkeypatch.delenv(VARIABLE)
    lose(tmp_path, 7)
    printed = capsys.readouterr().err
    assert printed.count("keeps nothing in memory: only `accel launch --max_restarts N`") == 1
    assert not snapshots(memory)
    assert train(tmp_path).began == 5


@pytest.mark.parametrize("full", [True, False], ids=["store fails", "store works"])
def test_a_preempted_run_saves_in_memory_before_the_store(
    tmp_path, memory, monkeypatch, capsys, full
):
    write, urls = RankWriter.write_tensors, list[str]()

    def note(self: Any, files: Any, labels: Any) -> Any:
        urls.append(Path(self._store.url).name)
        if full and "step-00000007" in self._store.url:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, files, labels)

    monkeypatch.setattr(RankWriter, "write_tensors", note)
    whole = train(tmp_path / "whole")
    with pytest.raises(CheckpointError if full else Left):
        train(tmp_path / "lost", preempt_at=7)
    assert urls[-2:] == ["snapshot-00000007", "step-00000007"]
    assert "the state is in memory for a restart of this launch; now to " in capsys.readouterr().err
    assert [path.name for path in snapshots(memory)] == ["snapshot-00000007"] * full
    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, str(memory))
    ended = train(tmp_path / "lost")
    assert ended.began == 7
    assert ended.weights == whole.weights
    assert ("resumed from memory" in capsys.readouterr().err) == full


def test_an_interval_below_one_is_refused():
    with pytest.raises(ValueError, match="memory_every_n_steps"):
        Checkpoint(memory_every_n_steps=0)
