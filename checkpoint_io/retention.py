"""Removing checkpoints and the litter of killed saves, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from checkpoint_io import jsonio
from checkpoint_io.commit import remove_files
from checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ManifestVersionError,
)
from checkpoint_io.files import manifest_of
from checkpoint_io.manifest import Manifest
from checkpoint_io.names import MANIFEST, kind_of, save_id_of
from checkpoint_io.store import RangeReader, Store
from checkpoint_io.tensorfile import MAX_HEADER

__all__ = ["KeepPolicy", "keep_last"]

KeepPolicy = Callable[[Sequence[str]], Collection[str]]
"""Picks, from the paths of a run's valid checkpoints, oldest first, those to keep."""


def keep_last(count: int) -> KeepPolicy:
    """Return a policy for `CheckpointFolder.prune` that keeps the newest `count` checkpoints.

    Args:
        count: how many to keep, at least 1.

    Raises:
        ValueError: if `count` is less than 1.

    Example:
        >>> from checkpoint_io import keep_last
        >>> keep_last(2)(["step-1", "step-2", "step-3"])
        ['step-2', 'step-3']
    """
    if count < 1:
        raise ValueError(f"keep at least one checkpoint, not {count}")
    return lambda paths: list(paths[-count:])


def prune(
    folder: Store, keep: Collection[str], in_progress: Collection[str], run_id: str
) -> list[str]:
    """Go through a folder; return the names of the checkpoints removed from it."""
    removed = []
    for name in folder.folders():
        if name in in_progress:
            continue
        store = folder.child(name)
        try:
            manifest = manifest_of(store)
        except CheckpointNotFoundError:
            if name not in keep:
                _remove_unfinished(store, run_id)
            continue
        except (CorruptCheckpointError, ManifestVersionError):
            continue  # whose it is cannot be known
        if manifest.metadata.get("run_id") != run_id:
            continue
        if name in keep:
            _remove_left_overs(store, manifest)
        else:
            _remove_checkpoint(store)
            removed.append(name)
    return removed


def _ours(store: Store) -> list[str]:
    """List the files of a folder that carry a name of this format."""
    return [name for name in store.sizes() if save_id_of(name)]


def _remove_checkpoint(store: Store) -> None:
    """Remove the commit first, so that what is half removed is no checkpoint; then the rest."""
    store.remove(MANIFEST)
    # last the file that says whose this is, so that a removal cut short can be finished
    names = _ours(store)
    remove_files(store, sorted(names, key=lambda name: kind_of(name) == "objects"))
    store.remove_folder()


def _remove_left_overs(store: Store, manifest: Manifest) -> None:
    """Remove files of saves that were killed before they could replace this checkpoint."""
    current = {entry.name for entry in manifest.files}
    remove_files(store, [name for name in _ours(store) if name not in current])


def _remove_unfinished(store: Store, run_id: str) -> None:
    """Remove the files of saves of this run in a folder that has no checkpoint."""
    names = _ours(store)
    saves = {save_id_of(name) for name in names if _owner(store, name) == run_id}
    doomed = [name for name in names if save_id_of(name) in saves]
    if doomed:
        remove_files(store, sorted(doomed, key=lambda name: kind_of(name) == "objects"))
        if not store.sizes() and not store.folders():
            store.remove_folder()


def _owner(store: Store, name: str) -> str | None:
    """Read from a file which run wrote it; None if it does not say (any more)."""
    if kind_of(name) is None:
        return None
    try:
        with store.open(name) as reader:
            document = jsonio.loads(_labels(reader, name), name)
    except (CorruptCheckpointError, FileNotFoundError):
        return None
    labels = document.get("__metadata__", document) if isinstance(document, dict) else {}
    owner = labels.get("run_id") if isinstance(labels, dict) else None
    return owner if isinstance(owner, str) else None


def _labels(reader: RangeReader, name: str) -> bytes:
    """Return the JSON that starts a tensor file, or all of an objects file."""
    if kind_of(name) == "objects":
        return bytes(reader.read(0, min(reader.size, jsonio.MAX_JSON_BYTES)))
    length = int.from_bytes(bytes(reader.read(0, min(8, reader.size))), "little")
    if length > min(MAX_HEADER, reader.size - 8):
        return b""
    return bytes(reader.read(8, 8 + length))
