"""The files of one checkpoint: read its manifest, check that the named files are present."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

from checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ManifestVersionError,
    TornLoadError,
)
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.manifest import Manifest, digest_of
from checkpoint_io.format.names import MANIFEST, save_id_of
from checkpoint_io.format.parse import parse_manifest, parse_without_tensors
from checkpoint_io.storage.open import Store
from checkpoint_io.threads import collector_paused

T = TypeVar("T")

_SAVES = 20  # how many saves may replace a checkpoint during one read of it


def retry_if_replaced(
    store: Store, action: Callable[[Manifest], T], read: Callable[[], Manifest] | None = None
) -> T:
    """Read a checkpoint; start over whenever a save has replaced it meanwhile.

    Args:
        store: its folder.
        action: called with the manifest.
        read: reads the manifest; `manifest_of` if None.
    """
    read = read or partial(manifest_of, store)
    manifest = read()
    for _ in range(_SAVES):
        try:
            return action(manifest)
        except TornLoadError:
            raise  # the targets hold a mixture: the caller must not miss that
        except CorruptCheckpointError:
            # A save removes the files of the checkpoint that it replaces. Missing or changed files
            # are damage only if the manifest is still the same.
            if manifest_of(store, tensors=False).id == manifest.id:
                raise
            manifest = read()
    return action(manifest)


def manifest_of(store: Store, *, tensors: bool = True) -> Manifest:
    """Read the manifest of a checkpoint folder; without `tensors`, they are read when needed."""
    url = f"{store.url}/{MANIFEST}"

    def parse(data: bytes) -> Manifest:
        with collector_paused():
            if tensors:
                return parse_manifest(data, url)
            # the bytes are not kept: a scan may hold the manifests of a hundred checkpoints
            return parse_without_tensors(data, url, lambda: _same(store, digest_of(data)))

    try:
        data = _manifest_bytes(store, url, _SAVES)
        try:
            return parse(data)
        except (CorruptCheckpointError, ManifestVersionError):
            # bits can flip on the way here: damage is what a second read finds too
            store.forget(MANIFEST)
            store.reconnect()
            again = _manifest_bytes(store, url, _SAVES)
            if again == data:
                raise
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(_absence(store)) from None
    return parse(again)


def _same(store: Store, digest: str) -> Manifest:
    """Read a manifest once more, with its tensors; raise if it is another one by now."""
    manifest = manifest_of(store)
    if manifest.digest != digest:
        raise CorruptCheckpointError(
            f"{store.url}/{MANIFEST}: a save has replaced this checkpoint since it was listed; "
            "list it again"
        )
    return manifest


def _manifest_bytes(store: Store, url: str, tries: int) -> bytes:
    """Read one version of the manifest, which a save may replace at any moment."""
    with store.open(MANIFEST) as reader:
        if reader.size > jsonio.MAX_JSON_BYTES:
            raise CorruptCheckpointError(f"{url}: {reader.size} bytes is no manifest")
        try:
            return bytes(reader.read(0, reader.size))
        except CorruptCheckpointError:
            if tries <= 1:
                raise
    return _manifest_bytes(store, url, tries - 1)


def _absence(store: Store) -> str:
    """Return the error text for a folder without a manifest: an unfinished save, or nothing."""
    if any(save_id_of(name) for name in store.sizes()):
        return (
            f"{store.url} holds a save that never finished (no {MANIFEST}): load another "
            "checkpoint; what is left here can be deleted"
        )
    return f"no checkpoint at {store.url}: there is no {MANIFEST}; check the path"


def check_sizes(store: Store, manifest: Manifest, files: Collection[int] | None = None) -> None:
    """Check that every file (or those given by index) is a regular file of the saved size."""
    for index, size in other_sizes(store, manifest, files):
        entry, held = manifest.files[index], _tensors_in(manifest, index)
        problem = f"{size} bytes long, {entry.size} were saved (truncated or replaced)"
        if size is None:
            problem = (
                "missing, though the manifest names it; copy it again or load an older checkpoint"
            )
        raise CorruptCheckpointError(f"{store.url}/{entry.name}: {problem}{held}")


def other_sizes(
    store: Store, manifest: Manifest, files: Collection[int] | None = None
) -> Iterator[tuple[int, int | None]]:
    """Yield the files (by index) that have not the saved size, each with its size, None if gone.

    Raises:
        CorruptCheckpointError: one is a link, or no regular file.
    """
    present = store.sizes()
    for index in range(len(manifest.files)) if files is None else sorted(files):
        entry = manifest.files[index]
        if present.get(entry.name) == entry.size:
            continue
        # A listing can be wrong about a file, as network filesystems cache it, or leave it out (a
        # link). Only then is opening it, another request, worth it.
        size: int | None = None
        try:
            with suppress(FileNotFoundError), store.open(entry.name) as reader:
                size = reader.size
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error}{_tensors_in(manifest, index)}") from None
        if size != entry.size:
            yield index, size


def _tensors_in(manifest: Manifest, index: int) -> str:
    return in_tensors(key for key, _ in manifest.tensors_of_file(index))


def in_tensors(labels: Iterable[str]) -> str:
    """Return ", in tensors ..." with the first labels, "" if there are none, for a message."""
    names = list(dict.fromkeys(label for label in labels if label))
    if not names:
        return ""
    more = ", ..." if len(names) > 3 else ""
    return f", in tensor{'s' * (len(names) > 1)} {', '.join(names[:3])}{more}"
