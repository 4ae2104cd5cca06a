"""A disk that keeps only what was synced: records a victim's system calls and replays a crash.

What is assumed of the disk is what POSIX promises and no more: bytes of a file are safe once the
file was fsynced, names in a folder once the folder was. Before that each may or may not be there.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faultkit.interpose import Call, Interposer

Event = tuple[Any, ...]


class Recorder:
    """Turns the calls of a victim into events: what was done to which file, with the bytes."""

    def __init__(self, root: str) -> None:
        self.events: list[Event] = []
        self._files: dict[int, list[int]] = {}  # descriptor: [inode, position]
        self._new: set[str] = set()
        self.watch = Interposer(root, self._before, self._after)

    def mark(self, *what: Any) -> None:
        """Put a mark between the events."""
        self.events.append(("mark", *what))

    def _before(self, call: Call) -> None:
        """Note whether an open will make a file; afterwards that cannot be seen any more."""
        if call.name == "open" and call.flags & os.O_CREAT and not os.path.lexists(call.path):
            self._new.add(call.path)

    def _after(self, call: Call, result: Any) -> None:
        handler = getattr(self, f"_{call.name}", None)
        if handler is not None:
            handler(call, result)

    def _open(self, call: Call, result: int) -> None:
        status = os.fstat(result)
        if stat.S_ISDIR(status.st_mode):
            self._files[result] = [-1, 0]
            return
        self._files[result] = [status.st_ino, 0]
        if call.path in self._new:
            self._new.discard(call.path)
            self.events.append(("create", call.path, status.st_ino))
        elif call.flags & os.O_TRUNC:
            self.events.append(("truncate", status.st_ino, 0))

    def _dup(self, call: Call, result: int) -> None:
        self._files[result] = self._files[call.args[0]]

    def _lseek(self, call: Call, result: int) -> None:
        self._files[call.args[0]][1] = result

    def _write(self, call: Call, result: int) -> None:
        file = self._files[call.args[0]]
        data = bytes(memoryview(call.args[1]).cast("B")[:result])
        self.events.append(("write", file[0], file[1], data))
        file[1] += result

    def _pwrite(self, call: Call, result: int) -> None:
        data = bytes(memoryview(call.args[1]).cast("B")[:result])
        self.events.append(("write", self._files[call.args[0]][0], call.args[2], data))

    def _writev(self, call: Call, result: int) -> None:
        file = self._files[call.args[0]]
        data = b"".join(bytes(memoryview(part).cast("B")) for part in call.args[1])[:result]
        self.events.append(("write", file[0], file[1], data))
        file[1] += result

    def _pwritev(self, call: Call, result: int) -> None:
        data = b"".join(bytes(memoryview(part).cast("B")) for part in call.args[1])[:result]
        self.events.append(("write", self._files[call.args[0]][0], call.args[2], data))

    def _ftruncate(self, call: Call, result: None) -> None:
        self.events.append(("truncate", self._files[call.args[0]][0], call.args[1]))

    def _posix_fallocate(self, call: Call, result: None) -> None:
        inode, _ = self._files[call.args[0]]
        self.events.append(("grow", inode, call.args[1] + call.args[2]))

    def _fsync(self, call: Call, result: None) -> None:
        inode, _ = self._files[call.args[0]]
        self.events.append(("sync folder", call.path) if inode < 0 else ("sync", inode))

    _fdatasync = _fsync

    def _mkdir(self, call: Call, result: None) -> None:
        self.events.append(("mkdir", call.path))

    def _rmdir(self, call: Call, result: None) -> None:
        self.events.append(("rmdir", call.path))

    def _unlink(self, call: Call, result: None) -> None:
        self.events.append(("unlink", call.path))

    _remove = _unlink

    def _rename(self, call: Call, result: None) -> None:
        folder = os.path.dirname(call.path)
        self.events.append(("rename", call.path, os.path.join(folder, os.fsdecode(call.args[1]))))

    _replace = _rename


@dataclass
class _File:
    """Bytes as the running system sees them, and as they are on the platter."""

    current: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


DIRECTORY = -1
Names = dict[str, int]


class Disk:
    """The state of the disk after some events, and what a crash may leave of it."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._files: dict[int, _File] = {}
        self._safe: Names = {}
        self._waiting: list[tuple[str, Event]] = []  # folder, change of a name in it
        self._live: Names = {}

    def apply(self, event: Event) -> None:
        """Let one event happen."""
        kind, *rest = event
        if kind in ("create", "unlink", "rename", "mkdir", "rmdir"):
            # a renamed file keeps its bytes, so the change carries the file itself
            change = (*event, self._live.get(rest[0])) if kind == "rename" else event
            self._waiting.append((os.path.dirname(rest[0]), change))
            _change(self._live, change)
            if kind == "create":
                self._files[rest[1]] = _File()
        elif kind == "sync folder":
            for folder, change in self._waiting:
                if folder == rest[0]:
                    _change(self._safe, change)
            self._waiting = [(f, change) for f, change in self._waiting if f != rest[0]]
        elif kind != "mark":
            self._change_bytes(kind, *rest)

    def _change_bytes(self, kind: str, inode: int, *rest: Any) -> None:
        """Write to, cut, grow or sync one file."""
        file = self._files[inode]
        if kind == "write":
            begin, data = rest
            file.current.extend(bytes(max(0, begin - len(file.current))))
            file.current[begin : begin + len(data)] = data
        elif kind == "sync":
            file.synced = bytes(file.current)
        else:
            size = rest[0]
            file.current.extend(bytes(max(0, size - len(file.current))))
            if kind == "truncate":
                del file.current[size:]

    def now(self) -> dict[str, bytes | None]:
        """Return all files as the running system sees them; None for a folder."""
        return self._tree(self._live, lambda file: bytes(file.current))

    def crashes(self, chance: random.Random) -> Iterator[dict[str, bytes | None]]:
        """Yield trees that a crash right now may leave; the first loses all that can be lost."""
        lost = self._tree(self._safe, lambda file: file.synced)
        seen = [lost]
        yield lost
        some = [change for change in self._waiting if chance.random() < 0.5]
        for waiting in ([], self._waiting, self._waiting[-1:], some):
            names = dict(self._safe)
            for _, change in waiting:
                _change(names, change)
            for content in (_synced, _zeros, _written):
                tree = self._tree(names, content)
                if tree not in seen:
                    seen.append(tree)
                    yield tree

    def _tree(self, names: Names, content: Callable[[_File], bytes]) -> dict[str, bytes | None]:
        """Build the files that can be reached through folders that are there."""
        tree: dict[str, bytes | None] = {}
        for path, inode in names.items():
            folder = os.path.dirname(path)
            while folder != self._root and names.get(folder) == DIRECTORY:
                folder = os.path.dirname(folder)
            if folder == self._root or path == self._root:
                name = os.path.relpath(path, self._root)
                tree[name] = None if inode == DIRECTORY else content(self._files[inode])
        return tree


def _synced(file: _File) -> bytes:
    """Only what was synced."""
    return file.synced


def _written(file: _File) -> bytes:
    """All that was written: the kernel may be early."""
    return bytes(file.current)


def _zeros(file: _File) -> bytes:
    """The new length without the new bytes, as delayed allocation may leave it."""
    return file.synced + bytes(max(0, len(file.current) - len(file.synced)))


def _change(names: Names, change: Event) -> None:
    """Change one name."""
    kind, path, *rest = change
    if kind == "create":
        names[path] = rest[0]
    elif kind == "mkdir":
        names[path] = DIRECTORY
    elif kind == "rename":
        names.pop(path, None)
        if rest[1] is not None:
            names[rest[0]] = rest[1]
    else:
        names.pop(path, None)


def write_tree(tree: dict[str, bytes | None], place: Path) -> None:
    """Put a tree on a real disk."""
    place.mkdir(parents=True, exist_ok=True)
    for name, data in tree.items():
        path = place / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
