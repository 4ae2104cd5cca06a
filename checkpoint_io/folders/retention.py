"""Pruning a folder: what is not to be kept goes, if this run wrote it and nobody is using it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

from checkpoint_io.errors import CheckpointConflictError, CheckpointWarning
from checkpoint_io.folder.discovery import FolderEntry, id_of
from checkpoint_io.folder.removal import remove_checkpoint, remove_left_overs, remove_unfinished
from checkpoint_io.storage.open import Store


class Pruning:
    """One walk through a folder of checkpoints.

    Args:
        folder: the folder of checkpoints.
        run_id: whose checkpoints and left-overs may go.
        keep: names that stay.
        dry_run: only say what would go.
    """

    def __init__(self, folder: Store, run_id: str, keep: Collection[str], dry_run: bool) -> None:
        self._folder = folder
        self._run_id = run_id
        self._keep = keep
        self._dry_run = dry_run

    def run(self, entries: Sequence[FolderEntry]) -> list[str]:
        """Go through what a scan found; return the paths of the checkpoints removed."""
        return [entry.path for entry in entries if self._concerns(entry) and self._treat(entry)]

    def _concerns(self, entry: FolderEntry) -> bool:
        """Say whether an entry is, or may be, of this run."""
        if entry.manifest is None:  # whose a broken one is cannot be known
            return entry.status == "unfinished" and entry.name not in self._keep
        return entry.manifest.metadata.get("run_id") == self._run_id

    def _treat(self, entry: FolderEntry) -> bool:
        """Clean one folder; a problem there is told and does not keep others from being cleaned."""
        goes = entry.manifest is not None and entry.name not in self._keep
        if self._dry_run:
            return goes
        try:
            return self._clean(entry) and goes
        except CheckpointConflictError:
            return False  # a save is at work there: the next prune will look again
        except Exception as error:
            text = f"could not clean {entry.path}: {type(error).__name__}: {error}"
            warnings.warn(text, CheckpointWarning, stacklevel=4)
            return False

    def _clean(self, entry: FolderEntry) -> bool:
        """Remove what is to go from one folder; False if it is no longer what the scan saw."""
        store = self._folder.child(entry.name)
        with store.lock():
            if id_of(store) != (entry.manifest.id if entry.manifest else None):
                return False
            if entry.manifest is None:
                remove_unfinished(store, self._run_id)
            elif entry.name in self._keep:
                remove_left_overs(store, entry.manifest, self._run_id)
            else:
                remove_checkpoint(store, entry.manifest)
        return True
