"""The file of commands of a run: who may write to it, and which run a command is for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_callbacks.addons.journal.format import JournalError
from accel_callbacks.addons.steering.commands import CommandFile, send_command
from accel_callbacks.cli.main import main
from checkpoint_io import Lease

run_of_posix = pytest.mark.skipif(os.name == "nt", reason="a file has the rights of its folder")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "journal" / "a")


def hold(folder: str) -> Lease:
    lease = Lease(folder)
    lease.attempt("take_over")
    return lease


def test_a_line_that_is_not_whole_waits_and_an_old_one_is_stale(folder: str) -> None:
    commands = CommandFile(folder)
    path = Path(folder, "commands")
    path.write_bytes(b"save\nset lr=")
    assert commands.read() == ["save"]
    with path.open("ab") as file:
        file.write(b"0.1\n\xff\n")
    assert commands.read() == ["set lr=0.1", "\ufffd"]
    again = CommandFile(folder)
    assert (again.stale, again.read()) == (["save", "set lr=0.1", "\ufffd"], [])


@run_of_posix
def test_only_the_user_may_write(folder: str) -> None:
    before = os.umask(0)
    try:
        CommandFile(folder)
    finally:
        os.umask(before)
    assert Path(folder, "commands").stat().st_mode & 0o777 == 0o600


@run_of_posix
@pytest.mark.parametrize("other", ["open to others", "another user", "link", "pipe"])
def test_a_file_of_others_is_refused_on_both_sides(
    folder: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = hold(folder)
    commands = CommandFile(folder)
    path = Path(folder, "commands")
    if other == "open to others":
        path.chmod(0o622)
    elif other == "another user":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        path.unlink()
        if other == "link":
            path.symlink_to(f"{folder}/other")
        else:
            os.mkfifo(path)
            path.chmod(0o622)
    with pytest.raises(OSError, match="commands"):
        commands.read()
    with pytest.raises(OSError, match="commands"):
        send_command(folder, "stop")
    with pytest.raises(OSError, match="commands"):
        CommandFile(folder)
    lease.release()


def test_a_command_is_for_the_run_that_is_alive(tmp_path: Path) -> None:
    folders = {name: str(tmp_path / "journal" / name) for name in "abc"}
    files = {name: CommandFile(folder) for name, folder in folders.items()}
    with pytest.raises(JournalError, match="is alive and can be steered"):
        send_command(str(tmp_path), "stop")
    leases = [hold(folders["a"])]
    assert send_command(str(tmp_path), "stop") == "a"
    assert send_command(folders["a"], "save") == "a"
    leases.append(hold(folders["b"]))
    with pytest.raises(
        JournalError, match="more than one run that is alive: give --run_id, of a, b"
    ):
        send_command(str(tmp_path), "stop")
    assert send_command(str(tmp_path / "journal"), "stop", "b") == "b"
    with pytest.raises(JournalError, match="no run c of "):
        send_command(str(tmp_path), "stop", "c")
    assert [files[name].read() for name in "abc"] == [["stop", "save"], ["stop"], []]
    for lease in leases:
        lease.release()


def test_a_url_has_no_run_to_steer() -> None:
    with pytest.raises(JournalError, match="through a folder on a disk"):
        send_command("memory://runs", "stop")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["set"], "set needs NAME=VALUE"),
        (["set", "lr"], "set needs NAME=VALUE"),
        (["set", "=3"], "set needs NAME=VALUE"),
        (["save", "lr=1"], "save takes no 'lr=1': leave it out"),
    ],
)
def test_a_wrong_command_line_is_told(
    tmp_path: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ctl", str(tmp_path), *words]) == 2
    assert problem in capsys.readouterr().err
