"""Stands between the library and the system calls of the os module, in a victim process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

CALLS = (
    "open", "write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "close",
    "ftruncate", "truncate", "posix_fallocate", "rename", "replace", "link",
    "unlink", "remove", "mkdir", "rmdir", "dup", "lseek",
)  # fmt: skip


class Call(NamedTuple):
    """One system call that concerns the watched folder."""

    index: int  # counted from 0; close, dup and lseek are not counted and have -1
    name: str
    path: str
    args: tuple[Any, ...]
    flags: int = 0


Before = Callable[[Call], None]
After = Callable[[Call, Any], None]


class Interposer:
    """Calls `before` and `after` around each system call on what is inside `root`."""

    def __init__(self, root: str, before: Before | None = None, after: After | None = None) -> None:
        self._root = os.path.abspath(root)
        self._before = before or (lambda call: None)
        self._after = after or (lambda call, result: None)
        self._lock = threading.RLock()
        self._paths: dict[int, str] = {}
        self._real = {name: getattr(os, name) for name in CALLS if hasattr(os, name)}
        self.count = 0

    def __enter__(self) -> Interposer:
        for name, real in self._real.items():
            setattr(os, name, self._wrap(name, real))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            path = self._where(args, options)
            if path is None:
                return real(*args, **options)
            # one at a time, so that what is noted has the order in which it happened
            with self._lock:
                counted = name not in ("close", "dup", "lseek")
                flags = args[1] if name == "open" and len(args) > 1 else 0
                noted = Call(self.count if counted else -1, name, path, args, flags)
                self.count += counted
                self._before(noted)
                result = real(*args, **options)
                self._follow(name, path, args, result)
                self._after(noted, result)
                return result

        return call

    def _where(self, args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        """Return the path that a call is about, if it is inside the watched folder."""
        target = args[0] if args else None
        if isinstance(target, int):
            return self._paths.get(target)
        folder = options.get("dir_fd") or options.get("src_dir_fd")
        path = os.path.join(self._paths.get(folder, "/"), target) if folder else target
        try:
            path = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return None
        return path if path == self._root or path.startswith(self._root + os.sep) else None

    def _follow(self, name: str, path: str, args: tuple[Any, ...], result: Any) -> None:
        """Keep track of which descriptor belongs to which path."""
        if name in ("open", "dup"):
            self._paths[result] = path
        elif name == "close":
            self._paths.pop(args[0], None)
