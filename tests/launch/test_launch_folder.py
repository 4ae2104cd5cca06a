"""The folders of a launch: of this user alone, and gone with the launch, or swept by the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accel_callbacks.launch.launch_folder import launch_folder
from accel_callbacks.launch_memory import VARIABLE, refusal_of_memory

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")


def test_a_folder_is_private_and_removed_with_its_content(tmp_path: Path) -> None:
    with launch_folder(tmp_path) as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith("accel-launch-")
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "memory").mkdir()
    assert not list(tmp_path.iterdir())


def test_a_launch_removes_the_folders_of_dead_launchers_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launch_folder(tmp_path) as alive:
        dead = tmp_path / "accel-launch-dead"
        (dead / "memory").mkdir(parents=True)
        link = tmp_path / "accel-launch-link"
        link.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").mkdir()
        with launch_folder(tmp_path):
            assert alive.exists()
            assert not dead.exists()
        dead.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with launch_folder(tmp_path) as unlocked:
            assert dead.exists(), "it is another user's"
            assert unlocked.name.startswith("."), "nobody looks for it"
    assert (tmp_path / "elsewhere").exists()
    assert not unlocked.exists()


def test_what_a_killed_launcher_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from accel_callbacks.launch.launch_folder import launch_folder\n"
        "with launch_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'note.json').write_text('1')\n"
        "    print(folder, flush=True); time.sleep(60)"
    )
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        left = Path(launcher.stdout.readline().strip())
        with launch_folder(tmp_path):
            assert (left / "note.json").exists()
        launcher.kill()
        assert launcher.wait() == -signal.SIGKILL
    assert (left / "note.json").exists()
    with launch_folder(tmp_path):
        assert not left.exists()


def test_a_full_file_system_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"), launch_folder(tmp_path / "absent"):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm")
def test_without_a_folder_in_memory_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert "accel launch --max_restarts" in refusal_of_memory()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    assert "No such file" in refusal_of_memory()
    with launch_folder(tmp_path) as folder:
        monkeypatch.setenv(VARIABLE, str(folder))
        assert refusal_of_memory() == ""
        folder.chmod(0o750)
        assert "must belong to this user alone" in refusal_of_memory()
