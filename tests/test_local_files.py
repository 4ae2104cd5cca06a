"""Local files on every system: paths, renames that wait, and what must survive a power cut."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_io import local_files as files


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Separators as on Windows."""
    monkeypatch.setattr(os, "sep", "\\")


def refused(code: int | None, number: int = errno.EACCES) -> OSError:
    """An error as Windows raises it; ``None`` makes one of another system."""
    error = OSError(number, os.strerror(number))
    if code is not None:
        error.winerror = code  # type: ignore[attr-defined]
    return error


class Refusing:
    """A system call that fails a number of times."""

    def __init__(self, real: Callable[..., None], times: int, error: OSError) -> None:
        self.real, self.times, self.error, self.calls = real, times, error, 0

    def __call__(self, *args: Any, **options: Any) -> None:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        self.real(*args, **options)


@pytest.mark.parametrize(
    ("path", "folder", "name"),
    [
        (r"C:\runs\step-1", "C:\\runs\\", "step-1"),
        ("C:\\runs\\step-1\\", "C:\\runs\\", "step-1"),
        ("C:\\runs/step-1/", "C:\\runs/", "step-1"),
        ("C:/runs/step-1", "C:/runs/", "step-1"),
        ("C:step-1", "C:", "step-1"),
        ("C:\\", "C:", ""),
        (r"\\server\share\step-1", "\\\\server\\share\\", "step-1"),
        (r"\\server\share", r"\\server\share", ""),
        (r"runs\step-1", "runs\\", "step-1"),
        ("step-1", "", "step-1"),
        ("s3://bucket/run/step-1", "s3://bucket/run/", "step-1"),
        ("s3://bucket/a\\b", "s3://bucket/", "a\\b"),
    ],
)
def test_paths_of_windows_are_split(windows: None, path: str, folder: str, name: str) -> None:
    assert files.split_path(path) == (folder, name)
    assert files.base_name(path) == name


def test_a_backslash_is_a_letter_elsewhere() -> None:
    assert files.split_path("runs/a\\b/") == ("runs/", "a\\b")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///C:/runs", "C:/runs"),
        ("file://C:/runs", "C:/runs"),
        ("local:///C:/runs", "C:/runs"),
        ("file:///C:\\runs", "C:\\runs"),
        ("file:////server/share/runs", "//server/share/runs"),
        ("file:///runs", "/runs"),
        (r"C:\runs", r"C:\runs"),
        (r"\\server\share", r"\\server\share"),
        ("s3://bucket/C:/runs", None),
    ],
)
def test_file_urls_of_windows_name_paths(windows: None, url: str, path: str | None) -> None:
    assert files.local_path(url) == path


def test_a_file_url_of_a_backslashed_path_has_its_last_name(windows: None) -> None:
    assert files.base_name(r"file:///C:\runs\step-1") == "step-1"


def test_a_drive_is_a_name_elsewhere() -> None:
    assert files.local_path("file:///C:/runs") == "/C:/runs"


@pytest.mark.parametrize("code", [5, 32])
def test_a_rename_waits_for_a_program_that_has_the_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    call, pauses = Refusing(os.replace, 3, refused(code)), []
    monkeypatch.setattr(os, "replace", call)
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    files.replace(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    assert call.calls == 4
    assert len(pauses) == 3


def test_a_file_that_stays_open_is_an_error_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, pauses = Refusing(os.replace, 1000, refused(32)), []
    monkeypatch.setattr(os, "replace", call)
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    with pytest.raises(PermissionError, match="another program has the file open: close it") as got:
        files.replace(str(tmp_path / "new"), str(tmp_path / "old"))
    assert got.value.filename == str(tmp_path / "old")
    assert 0.9 < sum(pauses) < 1.5
    assert call.calls == len(pauses) + 1


@pytest.mark.parametrize("code", [None, 5])
def test_a_missing_right_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    call = Refusing(os.replace, 1000, refused(code))
    monkeypatch.setattr(os, "replace", call)
    with pytest.raises(PermissionError) as got:
        files.replace(tmp_path / "new", tmp_path)  # a folder
    assert "another program" not in str(got.value)
    assert call.calls == 1


def test_a_folder_that_may_not_be_made_is_not_called_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "makedirs", Refusing(os.makedirs, 1, refused(5)))
    with pytest.raises(PermissionError) as got:
        files.make_folders(str(tmp_path / "a"))
    assert "another program" not in str(got.value)


def test_a_removal_waits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").touch()
    monkeypatch.setattr(os, "unlink", Refusing(os.unlink, 2, refused(32)))
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    files.remove(tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("code", "length"), [(206, 20), (3, 300), (3, 250)])
def test_a_path_that_is_too_long_for_windows_is_named_so(code: int, length: int) -> None:
    path = "/" + "a" * (length - 1)
    with pytest.raises(FileNotFoundError, match=f"{length} characters.*LongPathsEnabled"):
        with files.advised(path):
            raise refused(code, errno.ENOENT)


@pytest.mark.parametrize(("code", "length"), [(3, 100), (2, 300), (None, 300)])
def test_a_missing_file_is_not_called_too_long(code: int | None, length: int) -> None:
    error = refused(code, errno.ENOENT)
    with pytest.raises(FileNotFoundError) as got:
        with files.advised("/" + "a" * (length - 1)):
            raise error
    assert got.value is error


def test_a_sync_on_a_mac_goes_to_the_disk_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda *args: calls.append(args))
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    files.sync_file(7)
    assert calls == [(7, 51)]


def test_a_filesystem_that_refuses_the_full_sync_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuses(*args: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuses)
    monkeypatch.setattr(os, "fsync", calls.append)
    files.sync_file(7)
    assert calls == [7]
