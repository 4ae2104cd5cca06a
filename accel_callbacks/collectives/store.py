"""The key-value store of the default group, with a bound on how long a call waits."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["BoundedStore", "read_keys"]

_LONGEST_WAIT = 10.0  # seconds; ten round trips take a few milliseconds on a loaded host


class BoundedStore:
    """A store of torch.distributed whose calls raise if its host does not answer.

    torch's own client waits for an answer without a limit: if the process that serves the store
    is stopped, or its machine is cut off, a call of ``check`` never returns, whatever timeout was
    set. Here calls run on a thread with a connection of its own, and the caller waits for it only
    for some time. Then every further call raises at once, until the host answers again.

    Args:
        store: the store to call.

    Attributes:
        is_gone: True once the host has closed the connection.

    Example:
        >>> import torch.distributed as dist
        >>> from accel_callbacks.collectives.store import BoundedStore
        >>> store = BoundedStore(dist.HashStore())
        >>> store.set("answer", "42")
        >>> store.get("answer")
        b'42'
        >>> store.check(["question"])
        False
    """

    def __init__(self, store: dist.distributed_c10d.Store) -> None:
        self.timeout: timedelta = store.timeout  # type: ignore[attr-defined]
        self.patience = min(max(self.timeout.total_seconds() / 8, 1.0), _LONGEST_WAIT)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_gone = False
        self._overdue: Future[Any] | None = None
        # A connection of its own: a call of torch's that blocks holds the lock of the other one.
        thread = threading.Thread(target=_serve, args=(store, self._requests), name="accel-store")
        thread.daemon = True
        thread.start()
        self.close = weakref.finalize(self, _end, self._requests, thread)
        # The interpreter's own exit hooks run later, and the thread must not call torch by then.
        self.close.atexit = True

    @property
    def is_silent(self) -> bool:
        """True while a call is overdue."""
        return self._overdue is not None and not self._overdue.done()

    def call(self, operation: Callable[[Any], Any], patience: float | None = None) -> Any:
        """Return the result of several calls of torch's store, made on the thread.

        Args:
            operation: gets torch's store.
            patience: seconds to wait for it; ``self.patience`` if ``None``.

        Raises:
            torch.distributed.DistNetworkError: the host of the store does not answer.
        """
        # At the exit of the interpreter other hooks may call a store that is closed already.
        if self.is_silent or self.is_gone or not self.close.alive:
            raise dist.DistNetworkError("the host of the rendezvous store does not answer")
        result: Future[Any] = Future()
        self._requests.put((operation, result))
        waited = self.patience if patience is None else patience
        try:
            return result.result(waited)
        except dist.DistNetworkError:
            self.is_gone = True  # each call on a closed connection prints C++ frames
            raise
        except FutureTimeoutError:
            if result.done():  # the error is the operation's own
                raise
        self._overdue = result
        raise dist.DistNetworkError(
            f"the host of the rendezvous store has not answered for {waited:.0f} s"
        )

    def post(self, operation: Callable[[Any], Any]) -> None:
        """Make calls of torch's store on the thread, after those before, and wait for nothing.

        Args:
            operation: gets torch's store.
        """
        if not self.is_gone:
            self._requests.put((operation, Future()))

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self.call(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        value: bytes = self.call(lambda store: store.get(key))
        return value

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self.call(lambda store: store.check(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, 0 before the first call, and return its new value."""
        return int(self.call(lambda store: store.add(key, amount)))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key if it has the expected value, or none and ``""`` is expected; return it."""
        held: bytes = self.call(lambda store: store.compare_set(key, expected, value))
        return held

    def read(self, keys: list[str]) -> list[str | None]:
        """Return the values of keys, None for those that do not exist."""
        values: list[str | None] = self.call(lambda store: read_keys(store, keys))
        return values


def _own_client(store: dist.distributed_c10d.Store) -> Any:
    """Return a client with a connection of its own, or the store itself if it has none."""
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # an older torch, or a store written in Python
        return store


def _serve(store: Any, requests: queue.SimpleQueue[Any]) -> None:
    """Run operations one after the other."""
    store = _own_client(store)  # here, as to connect waits for the host without a limit too
    while (request := requests.get()) is not None:
        operation, result = request
        try:
            result.set_result(operation(store))
        except BaseException as error:
            result.set_exception(error)
        del request, operation, result  # nothing of the caller stays alive until the next one


def _end(requests: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    requests.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)  # it may wait for a host that does not answer


def read_keys(store: Any, keys: list[str]) -> list[str | None]:
    """Return the values of keys in a store of torch, None for those that do not exist."""
    if not store.check(keys):  # multi_get would wait for those that do not exist
        return [store.get(key).decode() if store.check([key]) else None for key in keys]
    if not store.has_extended_api():
        return [store.get(key).decode() for key in keys]
    return [value.decode() for value in store.multi_get(keys)]
