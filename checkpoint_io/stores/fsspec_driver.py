"""A driver of fsspec as a store uses it: bounded tries, one at a time where it must be, forks."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Lock
from typing import Any, TypeVar

from checkpoint_io.storage.retry import RetryPolicy, retry
from checkpoint_io.stores.urls import OBJECT_STORES

T = TypeVar("T")

_TRUE_RENAME = frozenset({"sftp", "ssh"})  # drivers whose mv() is one atomic request
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_TAGS = ("generation", "ETag", "etag", "e_tag")


class Driver:
    """The filesystem of this process; a forked child gets one of its own.

    Attributes:
        threads: how many requests it takes at once.
        keeps_objects: whether a file is there only when it is complete, and folders are names.
        renames: whether its renames are atomic.
    """

    def __init__(
        self, filesystem: Any, policy: RetryPolicy, make: Callable[[], Any] | None = None
    ) -> None:
        self._policy = policy
        self._make = make or (lambda: filesystem)
        self._filesystem = filesystem
        self._pid = os.getpid()
        own = filesystem.protocol
        protocols = {own} if isinstance(own, str) else set(own)
        self.threads = 8 if getattr(filesystem, "async_impl", False) else 1
        self.keeps_objects = bool(protocols & OBJECT_STORES)
        self.renames = bool(protocols & _TRUE_RENAME)

    @property
    def fs(self) -> Any:
        """Return the filesystem."""
        if self._pid != os.getpid():
            self._filesystem, self._pid = self._make(), os.getpid()
        return self._filesystem

    def alone(self) -> AbstractContextManager[Any]:
        """Let one request at a time through to a driver that is not made for more.

        paramiko, for one, waits for ever when two threads ask it at once.
        """
        if self.threads > 1:
            return nullcontext()
        # one lock for each connection, whichever stores share it
        gate: AbstractContextManager[Any] = vars(self.fs).setdefault("_one_at_a_time", Lock())
        return gate

    def ask(self, action: Callable[[Any], T]) -> T:
        """Run a request, again while it fails for a reason that may pass."""
        return retry(self._policy, lambda: self.ask_once(action), is_transient)

    def ask_once(self, action: Callable[[Any], T]) -> T:
        """Run a request that must not be repeated."""
        with self.alone():
            fs = self.fs
            channel = _channel(fs)
            if channel is not None:  # paramiko would wait for ever
                channel.settimeout(self._policy.read_timeout)
            try:
                return action(fs)
            except Exception as error:
                if channel is not None and is_transient(error):
                    _connect_anew(fs)
                raise

    def token(self, path: str) -> str:
        """Return what tells this version of a file from others; FileNotFoundError without one."""
        info = self.ask(lambda fs: fs.info(path))
        for key in _TAGS:
            if info.get(key):
                return str(info[key])
        return str(self.ask(lambda fs: fs.ukey(path)))

    def take_back(self, file: Any, path: str) -> None:
        """Abort an upload; where what was written shows already, remove it."""
        with self.alone():
            if self.keeps_objects:
                _discard(file)
                return
            with suppress(Exception):
                file.close()
            with suppress(Exception):
                self.fs.rm_file(path)

    def exclusively(self) -> Mapping[str, str]:
        """Return what asks pipe_file() to create only; nothing where it does not know how."""
        method = getattr(self.fs, "_pipe_file", None) or self.fs.pipe_file
        return {"mode": "create"} if "mode" in inspect.signature(method).parameters else {}


def is_transient(error: Exception) -> bool:
    """Say whether the same request may succeed later."""
    wire = [TimeoutError, ConnectionError, EOFError]
    if (paramiko := sys.modules.get("paramiko")) is not None:
        wire.append(paramiko.SSHException)
    if (fsspec := sys.modules.get("fsspec.exceptions")) is not None:
        wire.append(fsspec.FSTimeoutError)
    if (aiohttp := sys.modules.get("aiohttp")) is not None:
        wire += [aiohttp.ClientConnectionError, aiohttp.ClientPayloadError]
    if isinstance(error, tuple(wire)) or str(error) == "Socket is closed":  # paramiko's OSError
        return True
    status = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return any(isinstance(found, int) and found in _TRANSIENT_STATUS for found in status)


def _channel(fs: Any) -> Any:
    """Return the one connection of a driver that keeps one, as paramiko does; else None."""
    find = getattr(getattr(fs, "ftp", None), "get_channel", None)
    return find() if find is not None else None


def _connect_anew(fs: Any) -> None:
    """Replace a connection that broke or fell out of step: every later request would fail too.

    If that fails, so does the next request, which leads here again.
    """
    with suppress(Exception):
        fs.client.close()
    with suppress(Exception):
        fs._connect()


def _discard(file: Any) -> None:
    """Abort an upload so that neither close() nor the garbage collector publishes it."""
    with suppress(Exception):
        file.discard()
    with suppress(Exception):
        file.closed = True
