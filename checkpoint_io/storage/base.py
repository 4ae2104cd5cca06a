"""The `Store` protocol, and what all stores have in common: URLs, names, errors, the probe."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from checkpoint_io.errors import CheckpointConflictError, CheckpointError, CorruptCheckpointError
from checkpoint_io.format.names import probe_name, stale_probes

Write = Callable[["memoryview[int]"], None]
Deliver = Callable[[int, "memoryview[int]"], None]

REMOTE_SPAN = 16 << 20  # bytes per request, large enough to hide its latency
EXTRAS = {
    "s3": "s3", "s3a": "s3",
    "gs": "gcs", "gcs": "gcs",
    "abfs": "azure", "abfss": "azure", "az": "azure", "adl": "azure",
    "sftp": "sftp", "ssh": "sftp",
}  # fmt: skip
OBJECT_STORES = frozenset(name for name, extra in EXTRAS.items() if extra != "sftp")


class Span(NamedTuple):
    """Bytes `begin` to `end` (exclusive) of the file `name`."""

    name: str
    begin: int
    end: int


class RangeReader(Protocol):
    """An open file that is read by byte ranges."""

    @property
    def size(self) -> int:
        """Length of the file in bytes."""

    def read(self, begin: int, end: int) -> memoryview[int]:
        """Return exactly these bytes (valid until the next call), or raise if some are missing."""


class Store(Protocol):
    """A folder that holds one checkpoint, or the folder of such folders."""

    url: str
    span_bytes: int  # how much to request at a time
    can_rename: bool
    can_remove: bool

    @property
    def compares(self) -> bool:
        """Whether `replace` compares and writes in one step, or (locally) `lock` makes it one."""

    def create(self, name: str, size: int | None = None) -> AbstractContextManager[Write]:
        """Write a new file, durable when the block ends; a block that raises publishes nothing.

        Bytes passed to `write` are copied before it returns. `size` is the final length, if known.
        """

    def together(self) -> AbstractContextManager[None]:
        """Let files that are created in the block become durable when it ends, not one by one.

        A block that raises leaves none of those that are not durable.
        """

    def token(self, name: str) -> str:
        """Return an identifier of this version of a file; "" if there is no such file."""

    def replace(self, name: str, data: bytes, temporary: str, expected: str | None = None) -> None:
        """Put a small file in place in one atomic step, replacing an older one if there is one.

        With `expected`, a token, only if the file is still that version ("": still absent), as far
        as the store can check it; else CheckpointConflictError.
        """

    def lock(self) -> AbstractContextManager[None]:
        """Exclude other savers from this folder during the block, where the store has locks.

        CheckpointConflictError if another saver holds it; a lock is released when its process dies.
        """

    def fetch(self, spans: Sequence[Span], deliver: Deliver) -> None:
        """Read spans, several at a time, and pass each to `deliver(index, bytes)`.

        `deliver` runs on any thread, once per index and in any order; the bytes are valid during
        the call only. The first error of a read or of `deliver` ends the fetch and is raised. A
        file that is missing or too short for its span is a CorruptCheckpointError.
        """

    def forget(self, name: str) -> None:
        """Drop what this machine caches of a file, as far as it can; the next read asks again."""

    def reconnect(self) -> None:
        """Read over new connections from now on, for bytes that came damaged over the old ones."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file inside the folder atomically (only where `can_rename`)."""

    def open(self, name: str) -> AbstractContextManager[RangeReader]:
        """Open a file for reading; FileNotFoundError if there is none."""

    def sizes(self) -> dict[str, int]:
        """List the regular files of the folder; empty if there is no such folder."""

    def folders(self) -> list[str]:
        """List the names of the folders in this folder, sorted."""

    def versions(self, name: str) -> dict[str, str]:
        """List the folders in this folder, each with the `token` of its file of this name.

        Where the store can, one request does it.
        """

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""

    def remove_many(self, names: Sequence[str]) -> None:
        """Remove files in the given order, those that exist, with as few requests as possible."""

    def abort_uploads(self, save_id: str) -> None:
        """Free what killed uploads of the files of one save still occupy, if anything."""

    def probe(self) -> None:
        """Write, read back and remove a small file; the error says what to check if that fails."""

    def remove_folder(self) -> None:
        """Remove this folder if it is empty."""

    def child(self, name: str) -> Store:
        """Return the store of a folder inside this one."""


class ObjectStore:
    """What stores of objects have in common: each appears whole, and none is locked or renamed."""

    url: str
    can_rename = False  # they copy and delete instead, which is not atomic
    span_bytes = REMOTE_SPAN

    def together(self) -> AbstractContextManager[None]:
        """Do nothing: each object is durable once it is there."""
        return nullcontext()

    def lock(self) -> AbstractContextManager[None]:
        """Do nothing: there are no locks; `replace` compares the manifest's token."""
        return nullcontext()

    def rename(self, old: str, new: str) -> None:
        """Raise CheckpointError: renames are not atomic here."""
        raise CheckpointError(f"{self.url}: this store has no atomic rename")


def protocol_of(url: str) -> str:
    """Return the part before `://`, "file" for a path."""
    return url.split("://", 1)[0] if "://" in url else "file"


def driver_advice(url: str) -> str:
    """Return the error text that names the package to install for a URL."""
    protocol = protocol_of(url)
    if extra := EXTRAS.get(protocol):
        return f'{url} needs a storage driver: pip install "accel-callbacks[{extra}]"'
    return f"{url} needs the fsspec driver for {protocol}://; pip install the package that has it"


def child_name(name: str) -> str:
    """Return a folder's name; raise ValueError if it would lead out of the parent folder."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"not a plain folder name: {name!r}")
    return name


def is_child_name(name: str) -> bool:
    """Return whether `child_name` accepts a listed name."""
    try:
        child_name(name)
    except ValueError:
        return False
    return True


def missing_error(url: str) -> CorruptCheckpointError:
    """Return the error for a file that should be there and is not."""
    return CorruptCheckpointError(f"{url} is missing, though the manifest names it")


def truncated_error(url: str, end: int) -> CorruptCheckpointError:
    """Return the error for a file that is too short for the requested bytes."""
    return CorruptCheckpointError(f"{url}: truncated, ends before byte {end}")


def conflict_error(url: str) -> CheckpointConflictError:
    """Return the error for a conditional write that another writer won."""
    return CheckpointConflictError(
        f"{url} was changed by another save meanwhile: give each job a folder of its own"
    )


def probe_by_writing(store: Store) -> None:
    """Write, read back and remove a small file, and remove those of probes that were killed."""
    name, data = probe_name(), secrets.token_bytes(64)
    try:
        with store.create(name, len(data)) as write:
            write(memoryview(data))
        try:
            with store.open(name) as reader:
                same = reader.size == len(data) and bytes(reader.read(0, reader.size)) == data
        finally:
            store.remove(name)
        for left in stale_probes(store.sizes()):
            store.remove(left)
    except Exception as error:
        raise CheckpointError(
            f"cannot save to {store.url}: {type(error).__name__}: {error}; check the path, "
            "the bucket, the credentials and the permissions to write, read and delete there"
        ) from error
    if not same:
        raise CheckpointError(f"{store.url} does not return what was written to it")
