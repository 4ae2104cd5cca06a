"""One folder of files, on a local disk or behind fsspec: the only door to storage."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from checkpoint_io.storage.base import (
    OBJECT_STORES,
    Deliver,
    Span,
    Write,
    child_name,
    driver_advice,
    protocol_of,
)
from checkpoint_io.storage.fsspec_store import Driver, FsspecStore
from checkpoint_io.storage.local import LocalStore
from checkpoint_io.storage.retry import RetryPolicy

__all__ = ["FsspecStore", "RangeReader", "Store", "child_name", "open_store"]

_TRANSFERS = ("auto", "fsspec", "obstore")


class RangeReader(Protocol):
    """An open file that is read by byte ranges."""

    @property
    def size(self) -> int:
        """Length of the file in bytes."""

    def read(self, begin: int, end: int) -> memoryview[int]:
        """Return exactly these bytes (valid until the next call), or raise if some are absent."""


class Store(Protocol):
    """A folder that holds one checkpoint, or the folder of such folders."""

    url: str
    can_rename: bool
    span_bytes: int  # how much to ask for at a time

    def create(self, name: str, size: int | None = None) -> AbstractContextManager[Write]:
        """Write a new file, durable when the block ends; a block that raises publishes nothing.

        Bytes given to `write` are copied before it returns. `size` is the length to come, if known.
        """

    def token(self, name: str) -> str:
        """Return what tells this version of a file from others; "" where there is no such file."""

    def replace(self, name: str, data: bytes, temporary: str, expected: str | None = None) -> None:
        """Put a small file in place in one atomic step, over an older one if there is one.

        With `expected`, a token, only if the file is still that version ("": still absent), as far
        as the store can tell; else CheckpointConflictError.
        """

    def lock(self) -> AbstractContextManager[None]:
        """Keep other savers out of this folder during the block, where the store has locks.

        CheckpointConflictError if another one is in; a lock dies with its process.
        """

    def fetch(self, spans: Sequence[Span], deliver: Deliver) -> None:
        """Read spans, several at a time, and pass each to `deliver(index, bytes)`.

        `deliver` runs on any thread, each index once and in any order; the bytes are valid during
        the call only. The first error of either side ends the fetch and is raised. A file that is
        absent or too short for its span is a CorruptCheckpointError.
        """

    def rename(self, old: str, new: str) -> None:
        """Rename a file inside the folder atomically (only where `can_rename`)."""

    def open(self, name: str) -> AbstractContextManager[RangeReader]:
        """Open a file for reading; FileNotFoundError if there is none."""

    def sizes(self) -> dict[str, int]:
        """List the regular files of the folder; empty if there is no such folder."""

    def folders(self) -> list[str]:
        """List the names of the folders in this folder, sorted."""

    def remove(self, name: str) -> None:
        """Remove a file; none there is fine."""

    def remove_many(self, names: Sequence[str]) -> None:
        """Remove files in the order given, as few requests as that takes; none there is fine."""

    def abort_uploads(self, save_id: str) -> None:
        """Give back what killed uploads of the files of one save still hold, if anything."""

    def probe(self) -> None:
        """Write, read back and remove a small file; the error says what to do if that fails."""

    def remove_folder(self) -> None:
        """Remove this folder if nothing is left in it."""

    def child(self, name: str) -> Store:
        """Return the store of a folder inside this one."""


def open_store(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    retry: RetryPolicy | None = None,
) -> Store:
    """Open the folder that a URL or path names, with the storage driver it needs.

    `storage_options` go to the fsspec driver, but for `transfer`: "obstore" moves the bytes of an
    s3:// URL with that package, "fsspec" and "auto" (default) with the client of s3fs.
    """
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise ValueError(f"a checkpoint's place must be a path or a URL, not {url!r}")
    protocol = protocol_of(text)
    options = dict(storage_options or {})
    transfer = _transfer(options.pop("transfer", "auto"), protocol)
    if protocol in OBJECT_STORES:
        # a cached listing hides what other processes wrote
        options.setdefault("use_listings_cache", False)
    policy = retry or RetryPolicy()
    try:
        if protocol in ("s3", "s3a"):
            from checkpoint_io.storage.s3.store import open_s3

            if (store := open_s3(text, options, policy, transfer)) is not None:
                return store
        filesystem, path = url_to_fs(text, **options)
    except ImportError as error:
        if "accel-callbacks[" in str(error):
            raise
        raise ImportError(driver_advice(text)) from error
    if isinstance(filesystem, LocalFileSystem):
        return LocalStore(path)
    driver = Driver(filesystem, policy, lambda: url_to_fs(text, **options)[0])
    return FsspecStore(driver, path, text.rstrip("/"))


def _transfer(wanted: Any, protocol: str) -> str:
    """Check the name of what is to move the bytes."""
    if wanted not in _TRANSFERS:
        raise ValueError(f"storage_options: transfer is one of {_TRANSFERS}, not {wanted!r}")
    if wanted == "obstore" and protocol not in ("s3", "s3a"):
        raise ValueError(f'storage_options: transfer="obstore" is for s3:// only, not {protocol}')
    return str(wanted)
