"""Remove files of this package: a checkpoint, or the leftovers of killed saves of one run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from checkpoint_io.errors import CheckpointWarning, CorruptCheckpointError
from checkpoint_io.format import json as jsonio
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.format.names import MANIFEST, kind_of, save_id_of, stale_probes
from checkpoint_io.format.safetensors import header_bytes
from checkpoint_io.storage.local import local_folder
from checkpoint_io.storage.open import Store, child_name
from checkpoint_io.warning import warn

EXTRA_FILES = "extra_files"


def remove_all(store: Store, names: Sequence[str]) -> None:
    """Remove files in the given order; warn about failures, which leave litter but no damage."""
    try:
        store.remove_many(names)
    # drivers raise errors of their own types; a file that cannot be removed must not stop the rest
    except Exception:
        for name in names:
            _remove_or_warn(store, name)


def _remove_or_warn(store: Store, name: str) -> None:
    """Remove one file; warn if that fails."""
    try:
        store.remove(name)
    except Exception as error:
        text = f"could not remove {store.url}/{name}: {type(error).__name__}: {error}"
        warn(text, CheckpointWarning)


def remove_checkpoint(store: Store, manifest: Manifest) -> None:
    """Remove all files of a checkpoint, the manifest first."""
    # without its manifest, a checkpoint whose removal is cut short counts as unfinished
    present = store.sizes()
    ours = _ours(present)
    extras = [name for name in extra_files(manifest) if name in present]
    store.remove(MANIFEST)
    remove_all(store, [*extras, *stale_probes(present), *_owner_last(ours)])
    _abort_uploads(store, {manifest.id, *_saves(ours)})
    store.remove_folder()


def extra_files(manifest: Manifest) -> list[str]:
    """Return the files of other programs that `metadata["extra_files"]` lists."""
    listed = manifest.metadata.get(EXTRA_FILES)
    return [name for name in listed if _is_extra(name)] if isinstance(listed, list) else []


def _is_extra(name: object) -> bool:
    """Return whether this is the plain name of a file that this package did not write."""
    try:
        return isinstance(name, str) and child_name(name) != MANIFEST and not save_id_of(name)
    except ValueError:
        return False


def remove_leftovers(store: Store, current: Manifest, run_id: str) -> None:
    """Remove the files of a run's saves that were killed before they replaced a checkpoint."""
    kept = {entry.name for entry in current.files}
    litter = [name for name in _ours(store.sizes()) if name not in kept]
    remove_saves(store, litter, run_id)


def remove_unfinished(store: Store, run_id: str) -> None:
    """Remove the files of a run's saves in a folder that has no checkpoint."""
    present = store.sizes()
    remove_saves(store, _ours(present), run_id)
    remove_all(store, stale_probes(present))
    if not store.sizes() and not store.folders():
        store.remove_folder()


def remove_saves(store: Store, names: Sequence[str], run_id: str) -> None:
    """Remove those of the named files that belong to saves of a run, and abort their uploads."""
    owners = {save: _owner(store, names, save) for save in _saves(names)}
    # A local file that is cut off before its header names no run. It is removed as well: the caller
    # holds the folder's lock, so that no save can be writing it. Remote folders have no locks.
    claims = (run_id,) if local_folder(store) is None else (run_id, None)
    doomed = {save for save, owner in owners.items() if owner in claims}
    remove_all(store, _owner_last([name for name in names if save_id_of(name) in doomed]))
    _abort_uploads(store, doomed)


def _abort_uploads(store: Store, saves: Iterable[str]) -> None:
    """Abort the unfinished uploads of some saves; warn if that fails."""
    for save in saves:
        try:
            store.abort_uploads(save)
        except Exception as error:
            text = f"could not look for killed uploads in {store.url}: {error}"
            warn(text, CheckpointWarning)


def _ours(names: Collection[str]) -> list[str]:
    """Return the names that have the form of this package's files."""
    return [name for name in names if save_id_of(name)]


def _owner_last(names: Sequence[str]) -> list[str]:
    """Sort the files that name their run to the end."""
    # while one of them is left, the next prune can continue a removal that was cut short
    return sorted(names, key=lambda name: kind_of(name) == "objects")


def _saves(names: Sequence[str]) -> set[str]:
    """Return the ids of the saves that wrote these files."""
    return {save for name in names if (save := save_id_of(name))}


def _owner(store: Store, names: Sequence[str], save: str) -> str | None:
    """Return the run of a save, "" if its files name none, None if all of them are cut off."""
    run_id = None
    for name in names:
        if (
            save_id_of(name) == save
            and kind_of(name)
            and (owner := _label(store, name)) is not None
        ):
            if owner:
                return owner
            run_id = owner
    return run_id


def _label(store: Store, name: str) -> str | None:
    """Return the run that a file names, "" if it names none, None if it is cut off."""
    try:
        with store.open(name) as reader:
            if kind_of(name) == "objects":
                data = bytes(reader.read(0, min(reader.size, jsonio.MAX_JSON_BYTES)))
            else:
                data = header_bytes(reader)
        document = jsonio.loads(data, name)
    except (CorruptCheckpointError, FileNotFoundError):
        return None
    if not isinstance(document, dict):
        return None
    labels = document.get("__metadata__", document)
    owner = labels.get("run_id") if isinstance(labels, dict) else None
    return owner if isinstance(owner, str) else ""
