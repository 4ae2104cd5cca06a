"""A folder of checkpoints of one or more runs: naming, discovery, fallback, retention."""

from __future__ import annotations

import builtins
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoint_io.commit import save_with
from checkpoint_io.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    ManifestVersionError,
)
from checkpoint_io.files import check_sizes, manifest_of
from checkpoint_io.group import ProcessGroupLike, SingleProcess
from checkpoint_io.manifest import Manifest
from checkpoint_io.outcome import Outcome
from checkpoint_io.reader import Checkpoint, load
from checkpoint_io.retention import KeepPolicy, prune
from checkpoint_io.store import child_name, open_store

__all__ = ["CheckpointFolder", "CheckpointInfo"]


@dataclass(frozen=True)
class CheckpointInfo:
    """A valid checkpoint found in a folder.

    Attributes:
        path: its URL, as `load` takes it.
        name: its folder's name.
        manifest: its manifest.

    Example:
        >>> from checkpoint_io import CheckpointFolder
        >>> folder = CheckpointFolder("memory://doc-folder/info")
        >>> _ = folder.save(200, {"lr": 0.1})
        >>> folder.list()[0].name
        'step-00000200'
    """

    path: str
    name: str
    manifest: Manifest


class CheckpointFolder:
    """Checkpoints beside each other, one folder a step: `<url>/step-00000200`.

    "Newest" is the highest generation, a counter that each save sets to 1 + the highest in the
    folder; clocks play no part.

    Args:
        url: the folder: a local path or any fsspec URL; need not exist yet.
        storage_options: passed to the fsspec driver.

    Raises:
        ImportError: the driver for this kind of URL is not installed.

    Example:
        >>> from checkpoint_io import CheckpointFolder, keep_last
        >>> folder = CheckpointFolder("memory://doc-folder/run")
        >>> for step in (100, 200, 300):
        ...     _ = folder.save(step, {"step": step}, metadata={"run_id": "r1"})
        >>> folder.load_latest().state
        {'step': 300}
        >>> len(folder.prune(keep_last(2), run_id="r1"))
        1
        >>> [info.name for info in folder.list()]
        ['step-00000200', 'step-00000300']
    """

    def __init__(
        self, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        text = os.fspath(url)
        # "memory://" and "/" are roots, whose slashes belong to them
        self.url = text if text.endswith("://") else text.rstrip("/") or "/"
        self._options = dict(storage_options or {})
        self._store = open_store(text, self._options)

    def path(self, step: int) -> str:
        """Return the URL of the checkpoint of a step (whether or not there is one)."""
        if step < 0:
            raise ValueError(f"a step is counted from 0, not {step}")
        return self._path_of(f"step-{step:08d}")

    def _path_of(self, name: str) -> str:
        """Return the URL of a checkpoint by its folder's name."""
        slash = "" if self.url.endswith("/") else "/"
        return f"{self.url}{slash}{child_name(name)}"

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        name: str | None = None,
        local_state: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        group: ProcessGroupLike | None = None,
        max_shard_size: int | str = "5GB",
    ) -> Manifest:
        """Save as the newest checkpoint of this folder; see `checkpoint_io.save`.

        Args:
            step: the training step; names the folder and is put into the metadata.
            state: the shared state.
            name: another folder name than `step-<step>`, such as "best".
            local_state: this rank's own state.
            metadata: plain values for the manifest; `step` is added unless given.
            group: the processes that save together.
            max_shard_size: largest tensor file.
        """
        path = self.path(step) if name is None else self._path_of(name)

        def generation(previous: Manifest | None) -> int:
            return self.next_generation()

        labels = {"step": step, **(metadata or {})}
        return save_with(
            path, state, local_state, labels, group, max_shard_size, generation, self._options
        )

    def list(self) -> builtins.list[CheckpointInfo]:
        """Return all valid checkpoints, oldest first; broken ones are skipped with a warning.

        Valid here means: the manifest is sound and every file has its size. Checksums are verified
        when a checkpoint is loaded.
        """
        found = []
        for name in self._store.folders():
            store = self._store.child(name)
            try:
                manifest = manifest_of(store)
                check_sizes(store, manifest)
            except CheckpointNotFoundError as error:
                if "never finished" in str(error):
                    self._warn(f"skipped {name}: {error}")
            except CheckpointError as error:
                self._warn(f"skipped {name}: {error}")
            else:
                found.append(CheckpointInfo(self._path_of(name), name, manifest))
        return sorted(found, key=lambda info: (info.manifest.generation, info.manifest.created))

    def _warn(self, text: str) -> None:
        """Warn at the place that called into this class."""
        warnings.warn(text, CheckpointWarning, stacklevel=3)

    def latest(self) -> CheckpointInfo | None:
        """Return the newest valid checkpoint, None if there is none."""
        found = self.list()
        return found[-1] if found else None

    def next_generation(self) -> int:
        """Return 1 + the highest generation in the folder, damaged checkpoints included."""
        highest = 0
        for name in self._store.folders():
            try:
                highest = max(highest, manifest_of(self._store.child(name)).generation)
            except (CheckpointNotFoundError, CorruptCheckpointError, ManifestVersionError):
                continue
        return highest + 1

    def load_latest(
        self, *, rank: int | None = None, group: ProcessGroupLike | None = None
    ) -> Checkpoint:
        """Load the newest checkpoint whose checksums are right; warn about each one passed over.

        Args:
            rank: whose `local_state` to load; default: this rank in `group`.
            group: processes that must all load the same checkpoint: if one of them finds it
                damaged, all fall back together. Default: just this one.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: there are some, and none of them can be loaded.
        """
        group = group or SingleProcess()
        # One rank looks, so that all try the same ones and damage is reported once.
        listed = Outcome.of(lambda: [i.path for i in self.list()] if group.rank == 0 else None)
        paths, problem = group.broadcast_object((listed.value, listed.to_plain()["error"]))
        if problem is not None:
            raise CheckpointError(f"could not list {self.url}: {problem}") from listed.error
        for path in reversed(paths):
            checkpoint = self._try_load(path, group.rank if rank is None else rank, group)
            if checkpoint is not None:
                return checkpoint
        if paths:  # not the same as having none: a run must not quietly begin again
            raise CorruptCheckpointError(f"no valid checkpoint in {self.url}: all are damaged")
        raise CheckpointNotFoundError(
            f"no valid checkpoint in {self.url}: check the path, or start from scratch"
        )

    def _try_load(self, path: str, rank: int, group: ProcessGroupLike) -> Checkpoint | None:
        """Load one checkpoint on all ranks, or return None on all if it is damaged for one."""
        mine = Outcome.of(lambda: load(path, rank=rank, storage_options=self._options))
        damaged = isinstance(mine.error, (CorruptCheckpointError, CheckpointNotFoundError))
        report = {**mine.to_plain(), "value": None, "damaged": damaged}
        outcomes: Sequence[Mapping[str, Any]] = group.all_gather_object(report)
        bad = [f"rank {n}: {o['error']}" for n, o in enumerate(outcomes) if o["error"]]
        if mine.error is not None and not damaged:
            raise mine.error
        if any(o["error"] and not o["damaged"] for o in outcomes):
            # not damage but, say, a network that is down: an older one would be the wrong answer
            raise CheckpointError(f"loading {path} failed: {'; '.join(bad)}")
        if bad:
            self._warn(f"passed over {path}: {'; '.join(bad)}")
            return None
        checkpoint: Checkpoint = mine.value
        return checkpoint

    def prune(
        self,
        keep: Collection[str | os.PathLike[str]] | KeepPolicy,
        *,
        run_id: str,
        in_progress: Collection[str | os.PathLike[str]] = (),
    ) -> builtins.list[str]:
        """Remove this run's checkpoints that are not to be kept, and what its killed saves left.

        Call it on one rank, after a save has returned. The newest valid checkpoint of the run is
        never removed. Of other runs, and of files that we did not name, nothing is touched.

        Args:
            keep: paths (or names) to keep, or a policy such as `keep_last(3)` that picks them from
                this run's valid checkpoints, oldest first.
            run_id: only checkpoints with this `metadata["run_id"]` are looked at.
            in_progress: paths that a save is being written to right now; left alone.

        Returns:
            The paths of the checkpoints that were removed.
        """
        own = [info for info in self.list() if info.manifest.metadata.get("run_id") == run_id]
        if isinstance(keep, (str, os.PathLike)):
            keep = [keep]  # else a path would be taken for a collection of letters
        chosen = keep([info.path for info in own]) if callable(keep) else keep
        protected = {_base(path) for path in chosen} | {info.name for info in own[-1:]}
        removed = prune(self._store, protected, {_base(path) for path in in_progress}, run_id)
        return [self._path_of(name) for name in removed]


def _base(path: str | os.PathLike[str]) -> str:
    """Return the last segment of a path or URL."""
    return os.fspath(path).rstrip("/").rsplit("/", 1)[-1]
