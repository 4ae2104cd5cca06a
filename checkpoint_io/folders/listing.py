"""Looking through a folder of checkpoints, and removing old ones from it."""

from __future__ import annotations

import builtins
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from checkpoint_io.folder.discovery import CheckpointInfo, FolderEntry, Scanner, age_order
from checkpoint_io.folder.fallback import warn
from checkpoint_io.folder.retention import Choose, check_mode, ranked
from checkpoint_io.folders.retention import Pruning
from checkpoint_io.storage.open import child_name, open_store

Paths = Collection[str | os.PathLike[str]]


class FolderListing:
    """What there is in a folder of checkpoints; `CheckpointFolder` adds saving and loading."""

    def __init__(
        self, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        text = os.fspath(url)
        # "memory://" and "/" are roots, whose slashes belong to them
        self.url = text if text.endswith("://") else text.rstrip("/") or "/"
        self._options = dict(storage_options or {})
        self._store = open_store(text, self._options)
        self._scanner = Scanner(self._store, self._path_of)

    def path(self, step: int) -> str:
        """Return the URL of the checkpoint of a step (whether or not there is one)."""
        if step < 0:
            raise ValueError(f"a step is counted from 0, not {step}")
        return self._path_of(f"step-{step:08d}")

    def _path_of(self, name: str) -> str:
        """Return the URL of a checkpoint by its folder's name."""
        slash = "" if self.url.endswith("/") else "/"
        return f"{self.url}{slash}{child_name(name)}"

    def probe(self) -> None:
        """Write, read back and remove a small file; the error says what to do if that fails."""
        self._store.probe()

    def survey(self) -> builtins.list[FolderEntry]:
        """Return what every folder in this one is, with the reason where it is not valid."""
        return self._scanner.survey()

    def list(self) -> builtins.list[CheckpointInfo]:
        """Return all valid checkpoints, oldest first; broken ones are skipped with a warning.

        Valid here means: the manifest is sound and every file has its size. Checksums are verified
        when a checkpoint is loaded.
        """
        found = []
        for entry in self.survey():
            if entry.status == "valid":
                found.append(entry.info)
            elif entry.status != "foreign":
                warn(f"skipped {entry.name}: {entry.reason}")
        return sorted(found, key=age_order)

    def latest(self) -> CheckpointInfo | None:
        """Return the newest valid checkpoint, None if there is none."""
        found = self.list()
        return found[-1] if found else None

    def best(self, metric: str | None = None, mode: str = "min") -> CheckpointInfo | None:
        """Return the best valid checkpoint by a metric, None if none has it; see `keep_best`.

        Args:
            metric: a key of the metadata or the monitor of its `score`; None: any `score`.
            mode: "min" or "max".
        """
        check_mode(mode)
        found = ranked(self.list(), metric, mode)
        return found[0] if found else None

    def next_generation(self) -> int:
        """Return 1 + the highest generation in the folder, damaged checkpoints included."""
        return 1 + self._scanner.highest_generation()

    def prune(
        self,
        keep: Paths | str | os.PathLike[str] | Choose,
        *,
        run_id: str,
        protect: Paths = (),
        in_progress: Paths = (),
        dry_run: bool = False,
    ) -> builtins.list[str]:
        """Remove this run's checkpoints that are not to be kept, and what its killed saves left.

        Call it on one rank, after a save has returned. The newest valid checkpoint of the run is
        never removed, nor is a damaged one that is newer. Of other runs, and of files that we did
        not name, nothing is touched, but for files that `metadata["extra_files"]` of a removed
        checkpoint lists. A checkpoint that a save holds is left alone. What cannot be removed is a
        warning.

        Args:
            keep: a policy such as `keep_last(3) | keep_every(1000)`, which picks from this run's
                valid checkpoints, oldest first; or the paths (or names) to keep.
            run_id: only checkpoints with this `metadata["run_id"]` are looked at.
            protect: paths that stay whatever the policy says, such as the one resumed from.
            in_progress: paths that a save is being written to right now; left alone.
            dry_run: only return what would be removed.

        Returns:
            The paths of the checkpoints that were removed.
        """
        busy = {base_name(path) for path in in_progress}
        entries = [entry for entry in self.survey() if entry.name not in busy]
        own = [e.info for e in entries if e.status == "valid" and _is_of(e, run_id)]
        own.sort(key=age_order)
        kept = {base_name(path) for path in protect} | {info.name for info in own[-1:]}
        kept |= _newer_broken(entries, own)
        if callable(keep):
            kept |= {info.name for info in keep(own)}
        else:  # a single path would be taken for a collection of letters
            paths = [keep] if isinstance(keep, (str, os.PathLike)) else keep
            kept |= {base_name(path) for path in paths}
        return Pruning(self._store, run_id, kept, dry_run).run(entries)


def _is_of(entry: FolderEntry, run_id: str) -> bool:
    """Say whether a run wrote this checkpoint."""
    return entry.manifest is not None and entry.manifest.metadata.get("run_id") == run_id


def _newer_broken(
    entries: Sequence[FolderEntry], own: Sequence[CheckpointInfo]
) -> builtins.set[str]:
    """Name the broken checkpoints that no valid one of this run replaces: they may be mended."""
    newest = own[-1].manifest.generation if own else -1
    return {
        entry.name
        for entry in entries
        if entry.status == "broken" and entry.manifest and entry.manifest.generation > newest
    }


def base_name(path: str | os.PathLike[str]) -> str:
    """Return the last segment of a path or URL."""
    return os.fspath(path).rstrip("/").rsplit("/", 1)[-1]
