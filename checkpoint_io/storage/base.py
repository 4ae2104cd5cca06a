"""Finding out whether a place takes, returns and removes files, before hours of work need it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from checkpoint_io.errors import CheckpointError
from checkpoint_io.format.names import probe_name, stale_probes
from checkpoint_io.stores.spans import Write


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
