from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from checkpoint_io import CheckpointConflictError, CheckpointWarning
from checkpoint_io.storage.local import LocalStore
from tests.support import warm

HOLDER = """
import sys
from checkpoint_io.storage.local import LocalStore
with LocalStore(sys.argv[1]).lock():
    print("locked", flush=True)
    sys.stdin.readline()
print("left", flush=True)
sys.stdin.readline()
"""

FORKER = """
import os, signal, sys
from checkpoint_io.storage.local import LocalStore
with LocalStore(sys.argv[1]).lock():
    if os.fork() == 0:
        os.close(1)
        signal.pause()
print("left", os.getpid(), flush=True)
sys.stdin.readline()
os.killpg(os.getpgid(0), 9)
"""


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    return warm.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().split()[0]


def go_on(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def end(child: subprocess.Popen[str]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def test_second_process_is_told_and_comes_in_later(tmp_path: Path) -> None:
    child = start(HOLDER, tmp_path)
    try:
        assert said(child) == "locked"
        with pytest.raises(CheckpointConflictError, match=f"saving to {tmp_path} right now"):
            with LocalStore(str(tmp_path)).lock():
                pass
        go_on(child)
        assert said(child) == "left"
        with LocalStore(str(tmp_path)).lock():
            pass
    finally:
        end(child)


def test_kill_9_frees_the_lock(tmp_path: Path) -> None:
    child = start(HOLDER, tmp_path)
    assert said(child) == "locked"
    end(child)
    with LocalStore(str(tmp_path)).lock():
        pass


def test_child_forked_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    child = start(FORKER, tmp_path)
    try:
        assert said(child) == "left"
        with LocalStore(str(tmp_path)).lock():
            pass
    finally:
        end(child)


def test_one_process_conflicts_with_itself(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    caught: list[BaseException] = []

    def also() -> None:
        try:
            with LocalStore(str(tmp_path)).lock():
                pass
        except CheckpointConflictError as error:
            caught.append(error)

    with store.lock():
        with pytest.raises(CheckpointConflictError), store.lock():
            pass
        thread = threading.Thread(target=also)
        thread.start()
        thread.join()
        assert len(caught) == 1
        with LocalStore(str(tmp_path / "other")).lock():  # another folder is another lock
            pass
    with store.lock():
        pass


def test_an_error_in_the_block_frees_it(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    with pytest.raises(KeyError), store.lock():
        raise KeyError
    with store.lock():
        pass


def test_folder_is_made_and_files_may_be_written_inside(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "a" / "b"))
    with store.lock():
        store.replace("manifest.json", b"{}", "manifest-abababab.tmp")
    assert store.sizes() == {"manifest.json": 2}


def test_lock_of_a_folder_removed_meanwhile_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    real = fcntl.flock
    calls = []

    def removed_first(descriptor: int, operation: int) -> None:
        if not calls:
            folder.rmdir()
        calls.append(operation)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with LocalStore(str(folder)).lock():
        monkeypatch.undo()
        assert folder.is_dir()
        with pytest.raises(CheckpointConflictError), LocalStore(str(folder)).lock():
            pass


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EINVAL, errno.EBADF, errno.ENOLCK])
def test_filesystem_without_locks_goes_without_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def cannot(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", cannot)
    monkeypatch.setattr("checkpoint_io.storage.local._unlocked", set())
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    store = LocalStore(str(tmp_path))

    def write() -> None:
        for _ in range(2):
            with store.lock(), store.lock():
                store.replace("a", b"1", "a.tmp")

    with pytest.warns(CheckpointWarning, match="has no file locks: two jobs ") as caught:
        write()
    assert len(caught) == 1
    assert store.sizes() == {"a": 1}
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_another_error_of_the_lock_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(OSError, match="Input/output"), LocalStore(str(tmp_path)).lock():
        pass
