"""The files of one checkpoint: its manifest, and whether the files that it names are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    TornLoadError,
)
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.format.names import MANIFEST, save_id_of
from checkpoint_io.format.parse import parse_manifest
from checkpoint_io.storage.open import Store
from checkpoint_io.threads import collector_paused

T = TypeVar("T")

_SAVES = 20  # that may replace a checkpoint while one reader reads it


def while_replaced(store: Store, action: Callable[[Manifest], T]) -> T:
    """Read the checkpoint that is there, again whenever a save replaced it meanwhile.

    Its files vanish then; only if the manifest is still the same one is that damage.
    """
    manifest = manifest_of(store)
    for _ in range(_SAVES):
        try:
            return action(manifest)
        except TornLoadError:
            raise  # what is half written must be told
        except CorruptCheckpointError:
            newer = manifest_of(store)
            if newer.id == manifest.id:
                raise
            manifest = newer
    return action(manifest)


def manifest_of(store: Store, *, tensors: bool = True) -> Manifest:
    """Read the manifest of a checkpoint folder, all of it or without its tensors."""
    where = f"{store.url}/{MANIFEST}"
    try:
        data = _manifest_bytes(store, where, _SAVES)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(_absence(store)) from None
    with collector_paused():
        return parse_manifest(data, where, tensors=tensors)


def _manifest_bytes(store: Store, where: str, tries: int) -> bytes:
    """Read one version of the manifest; a save may put the next one there at any moment."""
    with store.open(MANIFEST) as reader:
        if reader.size > jsonio.MAX_JSON_BYTES:
            raise CorruptCheckpointError(f"{where}: {reader.size} bytes is no manifest")
        try:
            return bytes(reader.read(0, reader.size))
        except CorruptCheckpointError:
            if tries <= 1:
                raise
    return _manifest_bytes(store, where, tries - 1)


def _absence(store: Store) -> str:
    """Tell an unfinished save from an empty place."""
    if any(save_id_of(name) for name in store.sizes()):
        return (
            f"{store.url} holds a save that never finished (no {MANIFEST}): load another "
            "checkpoint; what is left here can be deleted"
        )
    return f"no checkpoint at {store.url}: there is no {MANIFEST}; check the path"


def check_sizes(store: Store, manifest: Manifest, files: Collection[int] | None = None) -> None:
    """Check that every file (or those given by index) is there, a regular one, of its size."""
    present = store.sizes()
    for index in range(len(manifest.files)) if files is None else sorted(files):
        entry = manifest.files[index]
        if present.get(entry.name) == entry.size:
            continue
        # only then is a look at the file itself worth it
        try:
            with open_listed(store, entry.name) as reader:
                size = reader.size
        except CorruptCheckpointError as error:
            held = naming(key for key, _ in manifest.tensors_of_file(index))
            raise CorruptCheckpointError(f"{error}{held}") from None
        if size != entry.size:
            held = naming(key for key, _ in manifest.tensors_of_file(index))
            raise CorruptCheckpointError(
                f"{store.url}/{entry.name}: {size} bytes long, {entry.size} were saved "
                f"(truncated or replaced){held}"
            )


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


def naming(labels: Iterable[str]) -> str:
    """Name a few tensors at the end of a message."""
    names = list(dict.fromkeys(label for label in labels if label))
    if not names:
        return ""
    more = ", ..." if len(names) > 3 else ""
    return f", in tensor{'s' * (len(names) > 1)} {', '.join(names[:3])}{more}"
