"""Checkpoints under the rules of Windows, as far as they can be shown elsewhere."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import checkpoint_io.local_files
from checkpoint_io import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFolder,
    CheckpointWarning,
    CorruptCheckpointError,
    keep_last,
    save_model,
)
from checkpoint_io.storage import local_read
from checkpoint_io.storage.local import LocalStore
from checkpoint_io.weights.merge import _check_destination
from tests.support import warm


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    made = CheckpointFolder(tmp_path / "runs")
    for step in (1, 2, 3):
        made.save(step, {"step": step}, metadata={"run_id": "r1"})
    return made


def names(paths: list[str]) -> list[str]:
    return [path.rsplit("/", 1)[-1] for path in paths]


# --- paths ---------------------------------------------------------------------------------

SPELLINGS = [
    r"C:\runs\step-00000001",
    "C:\\runs\\step-00000001\\",
    r"step-00000001",
    "STEP-00000001",
]


@pytest.mark.parametrize("path", SPELLINGS)
def test_a_path_of_windows_protects(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(os, "sep", "\\")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gone = folder.prune(keep_last(1), run_id="r1", protect=[path], dry_run=True)
        assert names(gone) == ["step-00000002"]
        assert names(folder.prune([path], run_id="r1", dry_run=True)) == ["step-00000002"]
        busy = folder.prune(keep_last(1), run_id="r1", in_progress=[path], dry_run=True)
        assert names(busy) == ["step-00000002"]


def test_a_path_of_windows_is_skipped(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sep", "\\")
    reader = folder.open_latest(skip=[r"C:\runs\step-00000003"])
    assert reader.state["step"] == 2


@pytest.mark.parametrize("as_url", [False, True])
def test_two_spellings_of_a_folder_are_one(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, as_url: bool
) -> None:
    monkeypatch.chdir(Path(folder.url).parent)
    relative = CheckpointFolder("runs")
    absolute = f"file://{folder.path(1)}" if as_url else folder.path(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gone = relative.prune(keep_last(1), run_id="r1", protect=[absolute], dry_run=True)
        assert gone == ["runs/step-00000002"]
        gone = folder.prune(keep_last(1), run_id="r1", protect=[relative.path(1)], dry_run=True)
        assert names(gone) == ["step-00000002"]


def test_a_path_that_keeps_nothing_warns(folder: CheckpointFolder) -> None:
    text = r"protect='runs/stepp-1' names no checkpoint of this folder, which has step-00000001, "
    with pytest.warns(CheckpointWarning, match=text):
        folder.prune(keep_last(3), run_id="r1", protect=["runs/stepp-1"])
    with pytest.warns(CheckpointWarning, match="keep='best' names no checkpoint"):
        folder.prune("best", run_id="r1", dry_run=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder.prune(keep_last(3), run_id="r1", protect=["other/step-7"], missing_ok=True)
        folder.prune(keep_last(3), run_id="r1", in_progress=["step-7"])  # not begun yet


def test_a_merge_into_the_current_folder_is_not_one_into_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sep", "\\")
    source = SimpleNamespace(where=r"C:\runs\step-00000001")
    _check_destination(source, LocalStore("."), overwrite=False)  # type: ignore[arg-type]


# --- files that are open -------------------------------------------------------------------


@pytest.fixture
def windows_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that this process has open cannot be removed."""
    unlink = os.unlink

    def refusing(path: str) -> None:
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}") == os.path.realpath(path):
                    raise AssertionError(f"{path} is removed while it is open")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refusing)


@pytest.mark.parametrize("size", [1000, 5 * 2**20])
def test_a_failed_write_leaves_no_file(tmp_path: Path, windows_files: None, size: int) -> None:
    def write_and_fail() -> None:
        with LocalStore(str(tmp_path)).create("a", size) as write:
            write(memoryview(b"1"))
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail()
    assert not list(tmp_path.iterdir())


def test_a_failed_batch_leaves_no_files(tmp_path: Path, windows_files: None) -> None:
    def write_and_fail(store: LocalStore) -> None:
        with store.together():
            for name in "ab":
                with store.create(name, 1) as write:
                    write(memoryview(b"1"))
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail(LocalStore(str(tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def file_in_use(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Renames are refused, as while a scanner has one of the files open."""
    tried = []

    def refuses(old: str, new: str) -> None:
        tried.append(new)
        error = PermissionError(errno.EACCES, "Access is denied", new)
        error.winerror = 32  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(os, "replace", refuses)
    monkeypatch.setattr(checkpoint_io.local_files, "_PAUSES", (0, 0))
    return tried


def test_a_manifest_that_is_open_elsewhere(
    folder: CheckpointFolder, file_in_use: list[str]
) -> None:
    with pytest.raises(CheckpointError, match=r"nothing was committed.*virus scanner") as got:
        folder.save(3, {"step": 4}, metadata={"run_id": "r1"})
    assert "permission is missing" not in str(got.value)
    assert len(file_in_use) == 3
    assert not list(Path(folder.path(3)).glob("*.tmp"))
    assert folder.load_latest().state == {"step": 3}


@pytest.mark.parametrize("limit", ["5GB", 400])
def test_a_model_that_is_open_elsewhere(
    tmp_path: Path, file_in_use: list[str], limit: int | str
) -> None:
    weights = {name: torch.zeros(100) for name in "ab"}
    with pytest.raises(OSError, match="another program has the file open"):
        save_model(weights, tmp_path, max_shard_size=limit)
    assert not list(tmp_path.iterdir())


def test_a_missing_right_is_advised_as_one(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(old: str, new: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", new)

    monkeypatch.setattr(os, "replace", refuses)
    with pytest.raises(CheckpointError, match="permission is missing"):
        folder.save(3, {"step": 4}, metadata={"run_id": "r1"})


def test_a_link_is_not_followed_without_a_flag_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "outside")
    monkeypatch.setattr(local_read, "_READ", local_read._READ & ~os.O_NOFOLLOW)
    monkeypatch.delattr(os, "O_NOFOLLOW")
    with pytest.raises(CorruptCheckpointError, match="is a symbolic link, which is not followed"):
        with LocalStore(str(tmp_path / "in")).open("link"):
            pass


# --- the lock ------------------------------------------------------------------------------


def stand_in() -> types.ModuleType:
    """A module like Windows' `msvcrt`, whose locks are those of this system."""
    module = types.ModuleType("msvcrt")
    module.LK_UNLCK, module.LK_NBLCK = 0, 2  # type: ignore[attr-defined]

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        assert (nbytes, os.lseek(descriptor, 0, os.SEEK_CUR)) == (1, 1 << 30)
        wanted = fcntl.LOCK_UN if mode == 0 else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.flock(descriptor, wanted)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    module.locking = locking  # type: ignore[attr-defined]
    return module


@pytest.fixture
def windows_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = stand_in()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "msvcrt", module)
        patch.setitem(sys.modules, "fcntl", None)
        patch.setattr(sys, "dont_write_bytecode", True)
        yield


HOLDER = """
import sys
from tests.checkpoint_io.test_other_systems import stand_in
sys.modules["msvcrt"], sys.modules["fcntl"] = stand_in(), None
from checkpoint_io.storage.local import LocalStore
with LocalStore(sys.argv[1]).lock():
    print("locked", flush=True)
    sys.stdin.readline()
"""


def conflicts(folder: Path) -> bool:
    try:
        with LocalStore(str(folder)).lock():
            return False
    except CheckpointConflictError as error:
        return f"saving to {folder} right now" in str(error)


def test_another_process_is_locked_out_without_locks_of_folders(
    tmp_path: Path, windows_locks: None
) -> None:
    folder = tmp_path / "step-1"
    child = warm.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        assert conflicts(folder)
        assert not conflicts(tmp_path / "step-2")
    finally:
        child.kill()
        child.communicate()
    assert (tmp_path / ".step-1.lock").exists()  # left by the kill, and no obstacle
    assert not conflicts(folder)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_a_thread_is_locked_out_without_locks_of_folders(
    tmp_path: Path, windows_locks: None
) -> None:
    found = []
    with LocalStore(str(tmp_path / "a")).lock():
        thread = threading.Thread(target=lambda: found.append(conflicts(tmp_path / "a")))
        thread.start()
        thread.join()
    assert found == [True]
    with pytest.raises(KeyError), LocalStore(str(tmp_path / "a")).lock():
        raise KeyError
    assert not conflicts(tmp_path / "a")


def test_a_lock_file_that_is_removed_before_it_is_locked(
    tmp_path: Path, windows_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["msvcrt"]
    real, calls = module.locking, []

    def removed_first(descriptor: int, mode: int, nbytes: int) -> None:
        if not calls:
            (tmp_path / ".a.lock").unlink()
        calls.append(mode)
        real(descriptor, mode, nbytes)

    monkeypatch.setattr(module, "locking", removed_first)
    with LocalStore(str(tmp_path / "a")).lock():
        assert calls == [2, 2]
        assert conflicts(tmp_path / "a")


def test_saves_and_prunes_leave_no_lock_files(tmp_path: Path, windows_locks: None) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 2):
        folder.save(step, {"step": step}, metadata={"run_id": "r1"})
    assert names(folder.prune(keep_last(1), run_id="r1")) == ["step-00000001"]
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_a_place_where_nothing_can_be_locked_is_saved_to(
    tmp_path: Path, windows_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(descriptor: int, mode: int, nbytes: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(sys.modules["msvcrt"], "locking", cannot)
    store = LocalStore(str(tmp_path / "a"))
    with store.lock(), store.lock():
        store.replace("b", b"1", "b.tmp")
    monkeypatch.setitem(sys.modules, "msvcrt", None)
    with store.lock():
        assert store.sizes() == {"b": 1}
