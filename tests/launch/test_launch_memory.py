"""The folder of a launch: in host memory, of this user alone, and gone with the launch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from accel_callbacks import launch_memory
from accel_callbacks.launch_memory import VARIABLE, memory_folder, refusal_of_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launch_memory, "ROOT", tmp_path)
    return tmp_path


def test_a_folder_in_memory_is_private_and_removed_with_its_content(memory, monkeypatch):
    with memory_folder() as folder:
        assert folder.parent == memory
        assert folder.stat().st_mode & 0o777 == 0o700
        monkeypatch.setenv(VARIABLE, str(folder))
        assert refusal_of_memory() == ""
        folder.chmod(0o750)
        assert "must belong to this user alone" in refusal_of_memory()
        (folder / "memory").mkdir()
    assert not list(memory.iterdir())


def test_a_launch_removes_the_folders_of_dead_launchers_and_no_others(memory, monkeypatch):
    with memory_folder() as alive:
        dead = memory / "accel-launch-dead"
        (dead / "memory").mkdir(parents=True)
        link = memory / "accel-launch-link"
        link.symlink_to(memory / "elsewhere")
        (memory / "elsewhere").mkdir()
        with memory_folder():
            assert alive.exists()
            assert not dead.exists()
        dead.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with memory_folder():
            assert dead.exists(), "it is another user's"
    assert (memory / "elsewhere").exists()


def test_without_a_folder_in_memory_nothing_can_be_kept(memory, monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert "accel launch --max_restarts" in refusal_of_memory()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    assert "No such file" in refusal_of_memory()
    monkeypatch.setattr(launch_memory, "ROOT", tmp_path / "absent")
    with memory_folder() as folder:
        assert folder is None
