"""Store protocol, spans, URLs, probe."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.format.names import probe_name, stale_probes

Write = Callable[["memoryview[int]"], None]
Deliver = Callable[[int, "memoryview[int]"], None]


REMOTE_SPAN = 16 << 20  # bytes of one request: enough to hide its latency
EXTRAS = {
    "s3": "s3", "s3a": "s3",
    "gs": "gcs", "gcs": "gcs",
    "abfs": "azure", "abfss": "azure", "az": "azure", "adl": "azure",
    "sftp": "sftp", "ssh": "sftp",
}  # fmt: skip


class Span(NamedTuple):
    """Bytes `begin` to `end` (exclusive) of the file `name`."""

    name: str
    begin: int
    end: int


class _Opens(Protocol):
    """What can be read span by span."""

    url: str

    def open(self, name: str) -> AbstractContextManager[Any]:
        """Open a file for ranged reads."""


def fetch_in_turn(store: _Opens, spans: Sequence[Span], deliver: Deliver) -> None:
    """Read spans one after the other, each file opened once if its spans follow each other."""
    at = 0
    while at < len(spans):
        name = spans[at].name
        try:
            with store.open(name) as reader:
                while at < len(spans) and spans[at].name == name:
                    span = spans[at]
                    if span.end > reader.size:
                        raise CorruptCheckpointError(
                            f"{store.url}/{name}: truncated, ends before byte {span.end}"
                        )
                    deliver(at, reader.read(span.begin, span.end))
                    at += 1
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{store.url}/{name} is missing, though the manifest names it"
            ) from None


OBJECT_STORES = frozenset(name for name, extra in EXTRAS.items() if extra != "sftp")


def protocol_of(url: str) -> str:
    """Return the part before `://`, "file" for a path."""
    return url.split("://", 1)[0] if "://" in url else "file"


def driver_advice(url: str) -> str:
    """Say which package to install for a URL."""
    protocol = protocol_of(url)
    if extra := EXTRAS.get(protocol):
        return f'{url} needs a storage driver: pip install "accel-callbacks[{extra}]"'
    return f"{url} needs the fsspec driver for {protocol}://; pip install the package that has it"


def child_name(name: str) -> str:
    """Refuse a name that would leave its folder."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"not a plain folder name: {name!r}")
    return name


def is_child_name(name: str) -> bool:
    """Say whether a listed name is one that `child_name` takes."""
    try:
        child_name(name)
    except ValueError:
        return False
    return True


class Probed(Protocol):
    """What a store must be able to do to be probed."""

    url: str

    def create(self, name: str, size: int | None = None) -> AbstractContextManager[Write]:
        """Write a new file."""

    def open(self, name: str) -> AbstractContextManager[Any]:
        """Open a file for ranged reads."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def sizes(self) -> Mapping[str, int]:
        """List the files."""


def probe_by_writing(store: Probed) -> None:
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
            "the bucket, the credentials and the rights to write, read and delete there"
        ) from error
    if not same:
        raise CheckpointError(f"{store.url} does not give back what was written to it")
