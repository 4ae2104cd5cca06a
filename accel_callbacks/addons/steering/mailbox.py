"""The mailbox of a run: files by which ``accel ctl`` sends commands, and the run answers.

It is the folder ``control`` beside the run's journal, which only the user of the run may enter.
That is all that protects it, and both sides look at it each time. A command is a file that comes
into the folder by a rename, so nobody reads half of one. Whoever renames it next has it: the run
takes it, or the sender withdraws it. It names the holder of the run's lease that it is meant for,
so that a later start of the run does not act on it.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from checkpoint_io.local_files import advised, remove, replace

__all__ = [
    "ACTIONS",
    "CONTROL",
    "Answer",
    "Command",
    "Mailbox",
    "read_answer",
    "require_private",
    "send",
    "withdraw",
]

#: Name of the folder, beside the journal of the run.
CONTROL = "control"
ACTIONS = ("save", "evaluate", "stop", "set")
_COMMAND, _TAKEN, _ANSWER, _PART = ".command", ".taken", ".answer", ".part"


@dataclass(frozen=True)
class Command:
    """A command, as it was sent.

    Args:
        name: of its file, without the ending.
        number: of the lease's holder that it is for.
        action: one of :data:`ACTIONS`.
        setting: what is to be set; empty for other actions.
        value: of the setting.
    """

    name: str
    number: int
    action: str
    setting: str = ""
    value: str | int | float | bool | None = None

    def __str__(self) -> str:
        return f"set {self.setting}={self.value}" if self.action == "set" else self.action


@dataclass(frozen=True)
class Answer:
    """What the run has done about a command.

    Args:
        accepted: it was carried out.
        text: for people.
        step: the optimizer step after which that was; None if it was refused.
    """

    accepted: bool
    text: str
    step: int | None = None


class Mailbox:
    """The side of the run.

    Args:
        folder: of the mailbox; created if it is not there.
        number: of the lease's holder, which commands must name.

    Raises:
        OSError: the folder cannot be created, or others than this user may write there.

    Example:
        >>> import os, tempfile
        >>> from accel_callbacks.addons.steering.mailbox import Command, Mailbox, read_answer, send
        >>> folder = os.path.join(tempfile.mkdtemp(), "control")
        >>> mailbox = Mailbox(folder, number=1)
        >>> name = send(folder, 1, "set", "lr", 0.1)
        >>> command = mailbox.take()
        >>> str(command)
        'set lr=0.1'
        >>> mailbox.answer(command.name, accepted=True, text="set lr=0.1", step=7)
        >>> read_answer(folder, name).step
        7
    """

    def __init__(self, folder: str, number: int) -> None:
        self._folder = folder
        self._number = number
        with advised(folder):
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        require_private(folder)
        # Of a start before this one, which nobody reads any more.
        self._remove(_TAKEN, _ANSWER)

    def take(self) -> Command | None:
        """Return the oldest command, None without one; answer those that cannot be read.

        Raises:
            OSError: others than this user may write into the folder by now.
        """
        require_private(self._folder)  # each time: another folder may have been put in its place
        for name in sorted(os.listdir(self._folder)):
            stem, ending = os.path.splitext(name)
            if ending != _COMMAND:
                continue
            taken = os.path.join(self._folder, stem + _TAKEN)
            try:
                replace(os.path.join(self._folder, name), taken)
                command = _read_command(stem, taken)
            except FileNotFoundError:  # withdrawn
                continue
            except (OSError, ValueError) as error:
                self._discard(taken)
                with suppress(OSError):
                    self.answer(stem, accepted=False, text=f"this is no command: {error}")
                continue
            if command.number != self._number:
                text = "it was for an earlier start of the run: send it again"
                self.answer(stem, accepted=False, text=text)
                continue
            return command
        return None

    def answer(self, name: str, *, accepted: bool, text: str, step: int | None = None) -> None:
        """Answer a command that was taken.

        Args:
            name: of the command.
            accepted: it was carried out.
            text: for people.
            step: the optimizer step after which that was.
        """
        facts = {"accepted": accepted, "text": text, "step": step}
        _write(os.path.join(self._folder, name + _ANSWER), facts)
        self._discard(os.path.join(self._folder, name + _TAKEN))

    def close(self, text: str) -> None:
        """Answer all commands that are left, and take no more."""
        while (command := self.take()) is not None:
            self.answer(command.name, accepted=False, text=text)
        self._remove(_TAKEN, _PART)

    def _remove(self, *endings: str) -> None:
        for name in os.listdir(self._folder):
            if name.endswith(endings):
                self._discard(os.path.join(self._folder, name))

    @staticmethod
    def _discard(path: str) -> None:
        # A folder of that name stays: nothing of ours made it, and nothing reads it.
        with suppress(OSError):
            remove(path)


def send(folder: str, number: int, action: str, setting: str = "", value: Any = None) -> str:
    """Put a command into the mailbox of a run, and return its name.

    Args:
        folder: of the mailbox.
        number: of the lease's holder, which is to act.
        action: one of :data:`ACTIONS`.
        setting: what is to be set.
        value: of the setting.

    Raises:
        OSError: the folder is not there, or others than this user may write there.
    """
    require_private(folder)
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    facts = {"number": number, "action": action, "setting": setting, "value": value}
    _write(os.path.join(folder, name + _COMMAND), facts)
    return name


def read_answer(folder: str, name: str) -> Answer | None:
    """Return the answer to a command and remove it, None while there is none.

    Raises:
        OSError: others than this user may write into the folder by now.
        ValueError: it is damaged.
    """
    require_private(folder)
    path = os.path.join(folder, name + _ANSWER)
    try:
        with open(path, encoding="utf-8") as file:
            facts = json.load(file)
    except FileNotFoundError:
        return None
    remove(path)
    return Answer(bool(facts["accepted"]), str(facts["text"]), facts["step"])


def withdraw(folder: str, name: str) -> bool:
    """Take a command back; return False if the run has it already."""
    try:
        remove(os.path.join(folder, name + _COMMAND))
    except FileNotFoundError:
        return False
    return True


def require_private(folder: str) -> None:
    """Raise PermissionError unless a folder is this user's, who alone may write there.

    On Windows, where the folder has the rights of the one that it is in, only a link is refused.
    """
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} is no folder of its own, but a link or a file: remove it")
    if sys.platform != "win32":
        user = os.geteuid()
        if status.st_uid != user:
            raise PermissionError(
                f"{folder} belongs to user {status.st_uid}, and this process runs as {user}: only "
                "the user who runs it may steer a run"
            )
        if status.st_mode & 0o077:
            raise PermissionError(
                f"{folder} is open to other users (mode {stat.S_IMODE(status.st_mode):o}): remove "
                "it, or take their rights with `chmod go-rwx`"
            )


def _write(path: str, facts: Mapping[str, Any]) -> None:
    """Write a file, and give it its name once it is whole."""
    part = path + _PART
    with open(part, "x", encoding="utf-8") as file:
        json.dump(facts, file)
    replace(part, path)


def _read_command(name: str, path: str) -> Command:
    """Read the command of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no command.
    """
    try:
        with open(path, encoding="utf-8") as file:
            command = Command(name, **json.load(file))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("the file is damaged; write commands with `accel ctl`") from None
    if command.action not in ACTIONS:
        raise ValueError(f"its action is none of {', '.join(ACTIONS)}")
    return command
