"""The files of one checkpoint: its manifest, and verified access to what the manifest names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoint_io import jsonio
from checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError
from checkpoint_io.manifest import Manifest
from checkpoint_io.names import MANIFEST, save_id_of
from checkpoint_io.parse import parse_manifest
from checkpoint_io.parts import check_size, verified_parts
from checkpoint_io.store import Store


def manifest_of(store: Store) -> Manifest:
    """Read the manifest of a checkpoint folder."""
    where = f"{store.url}/{MANIFEST}"
    try:
        with store.open(MANIFEST) as reader:
            if reader.size > jsonio.MAX_JSON_BYTES:
                raise CorruptCheckpointError(f"{where}: {reader.size} bytes is no manifest")
            data = bytes(reader.read(0, reader.size))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(_absence(store)) from None
    return parse_manifest(data, where)


def _absence(store: Store) -> str:
    """Tell an unfinished save from an empty place."""
    if any(save_id_of(name) for name in store.sizes()):
        return (
            f"{store.url} holds a save that never finished (no {MANIFEST}): load another "
            "checkpoint; what is left here can be deleted"
        )
    return f"no checkpoint at {store.url}: there is no {MANIFEST}; check the path"


def check_sizes(store: Store, manifest: Manifest) -> None:
    """Check that every file is there, a regular file, with its right size."""
    present = store.sizes()
    for entry in manifest.files:
        if present.get(entry.name) != entry.size:  # only then is a look at the file itself worth it
            with open_listed(store, entry.name) as reader:
                check_size(reader, f"{store.url}/{entry.name}", entry.size)


def open_listed(store: Store, name: str) -> Any:
    """Open a file that the manifest names; its absence is damage."""
    return _MissingIsDamage(store, name)


class _MissingIsDamage:
    """A context manager around `Store.open` that explains a missing file."""

    def __init__(self, store: Store, name: str) -> None:
        self._where = f"{store.url}/{name}"
        self._manager = store.open(name)

    def __enter__(self) -> Any:
        try:
            return self._manager.__enter__()
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{self._where}: missing, though the manifest names it; "
                "copy it again or load an older checkpoint"
            ) from None

    def __exit__(self, *details: Any) -> bool | None:
        return self._manager.__exit__(*details)


def read_file(
    store: Store, manifest: Manifest, index: int, use: Callable[[int, memoryview[int]], None]
) -> None:
    """Pass each verified part of one file to `use`."""
    entry = manifest.files[index]

    def inside(begin: int, end: int) -> str:
        held = manifest.tensors_of_file(index)
        keys = [key for key, chunk in held if chunk.begin < end and chunk.end > begin]
        if not keys:
            return ""
        return f", in tensor{'s' * (len(keys) > 1)} {', '.join(keys[:3])}" + ", ..." * (
            len(keys) > 3
        )

    with open_listed(store, entry.name) as reader:
        where = f"{store.url}/{entry.name}"
        parts = verified_parts(
            reader, where, entry.size, manifest.part_size, entry.checksums, inside
        )
        for offset, part in parts:
            use(offset, part)
