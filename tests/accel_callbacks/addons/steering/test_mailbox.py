"""The mailbox of a run: who may write into it, and what damaged or old commands do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_callbacks.addons.steering import mailbox as module
from accel_callbacks.addons.steering.mailbox import Mailbox, read_answer, send, withdraw

NAME = "00000000000000000001-0000abcd"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "control"


@pytest.fixture
def mailbox(folder: Path) -> Mailbox:
    return Mailbox(str(folder), number=3)


def put(folder: Path, data: bytes) -> None:
    (folder / f"{NAME}.command").write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_commands_come_in_their_order_and_are_answered_once(folder: Path, mailbox: Mailbox) -> None:
    sent = [send(str(folder), 3, "set", "lr", 0.5), send(str(folder), 3, "stop")]
    taken = [mailbox.take(), mailbox.take()]
    assert [command and command.name for command in taken] == sent
    assert [str(command) for command in taken] == ["set lr=0.5", "stop"]
    assert mailbox.take() is None
    assert not withdraw(str(folder), sent[0])
    mailbox.answer(sent[0], accepted=True, text="done", step=4)
    answer = read_answer(str(folder), sent[0])
    assert answer is not None
    assert (answer.accepted, answer.text, answer.step) == (True, "done", 4)
    assert read_answer(str(folder), sent[0]) is None
    assert names(folder) == [f"{sent[1]}.taken"]


def test_only_the_user_may_enter_the_folder(folder: Path) -> None:
    before = os.umask(0)
    try:
        Mailbox(str(folder), number=3)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_command_that_was_withdrawn_is_not_taken(folder: Path, mailbox: Mailbox) -> None:
    assert withdraw(str(folder), send(str(folder), 3, "save"))
    assert mailbox.take() is None
    assert names(folder) == []


@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (lambda folder: put(folder, b'{"number": 3, "act'), "damaged"),
        (lambda folder: put(folder, os.urandom(64)), "damaged"),
        (lambda folder: put(folder, b"[" * 60000), "damaged"),
        (lambda folder: put(folder, b""), "damaged"),
        (lambda folder: put(folder, b"[1]"), "damaged"),
        (lambda folder: put(folder, b'{"number": 3, "action": "rm"}'), "none of save"),
        (lambda folder: put(folder, b'{"number": 3}'), "damaged"),
        (lambda folder: (folder / f"{NAME}.command").mkdir(0o700), "Is a directory"),
    ],
)
def test_what_is_no_command_is_refused_and_does_not_stay(
    folder: Path, mailbox: Mailbox, plant: Callable[[Path], object], problem: str
) -> None:
    plant(folder)
    good = send(str(folder), 3, "save")
    command = mailbox.take()
    assert command is not None
    assert command.name == good
    answer = read_answer(str(folder), NAME)
    assert answer is not None
    assert problem in answer.text
    assert not answer.accepted
    assert not (folder / f"{NAME}.command").exists()


def test_half_a_command_is_not_there(
    folder: Path, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(old: str, new: str) -> None:
        raise OSError("killed before the rename")

    monkeypatch.setattr(module, "replace", fail)
    with pytest.raises(OSError, match="killed"):
        send(str(folder), 3, "stop")
    monkeypatch.undo()
    assert len(names(folder)) == 1
    assert mailbox.take() is None
    mailbox.close("the run ended")
    assert names(folder) == []


def test_a_command_for_an_earlier_start_is_not_acted_on(folder: Path, mailbox: Mailbox) -> None:
    old = send(str(folder), 2, "stop")
    assert mailbox.take() is None
    answer = read_answer(str(folder), old)
    assert answer is not None
    assert "earlier start" in answer.text


def test_a_new_start_removes_what_was_taken_and_answered(folder: Path, mailbox: Mailbox) -> None:
    taken, answered = send(str(folder), 3, "save"), send(str(folder), 3, "save")
    for _ in range(2):
        mailbox.take()
    mailbox.answer(answered, accepted=True, text="done")
    assert names(folder) == [f"{taken}.taken", f"{answered}.answer"]
    Mailbox(str(folder), number=4)
    assert names(folder) == []


def test_the_end_answers_what_is_left(folder: Path, mailbox: Mailbox) -> None:
    sent = [send(str(folder), 3, "save") for _ in range(2)]
    mailbox.close("the run ended at step 7")
    for name in sent:
        answer = read_answer(str(folder), name)
        assert answer is not None
        assert answer.text == "the run ended at step 7"
    assert names(folder) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can chown")
def test_what_another_user_owns_is_refused(folder: Path, mailbox: Mailbox) -> None:
    os.chown(folder, 12345, -1)
    for act in (
        mailbox.take,
        lambda: read_answer(str(folder), NAME),
        lambda: send(str(folder), 3, "save"),
        lambda: Mailbox(str(folder), 4),
    ):
        with pytest.raises(PermissionError, match="belongs to user 12345"):
            act()


def test_a_folder_that_is_open_or_a_link_is_refused(folder: Path, mailbox: Mailbox) -> None:
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="open to other users"):
        send(str(folder), 3, "save")
    with pytest.raises(PermissionError, match="open to other users"):
        mailbox.take()
    folder.chmod(0o700)
    folder.rename(folder.parent / "moved")
    folder.symlink_to(folder.parent / "moved")
    with pytest.raises(PermissionError, match="a link or a file"):
        mailbox.take()
    with pytest.raises(PermissionError, match="a link or a file"):
        Mailbox(str(folder), 4)
