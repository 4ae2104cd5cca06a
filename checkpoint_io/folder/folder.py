"""A folder of checkpoints of one or more runs: saving into it, and loading the newest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from checkpoint_io.folder.fallback import Fallback
from checkpoint_io.folders.listing import FolderListing, Paths, base_name
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.group import ProcessGroupLike, SingleProcess
from checkpoint_io.loader.lazy import CheckpointReader, open_checkpoint
from checkpoint_io.loader.selection import Only, Rename
from checkpoint_io.reading.reader import Checkpoint, load
from checkpoint_io.saver.save import SaveJob, prepare_save
from checkpoint_io.sharding.local_tensors import Replicated

__all__ = ["CheckpointFolder"]


class CheckpointFolder(FolderListing):
    """Checkpoints beside each other, one folder a step: `<url>/step-00000200`.

    "Newest" is the highest generation, a counter that each save sets to 1 + the highest in the
    folder; clocks play no part. Keep the object: a manifest that did not change is read once.

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
        replicated: Replicated = True,
        progress: bool | None = None,
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
            replicated: which plain tensors are bitwise the same on all ranks.
            progress: a progress bar; None shows one for a long save on a terminal.
        """
        job = self.prepare_save(
            step,
            state,
            name=name,
            local_state=local_state,
            metadata=metadata,
            group=group,
            max_shard_size=max_shard_size,
            replicated=replicated,
        )
        return job.run(group, progress=progress)

    def prepare_save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        name: str | None = None,
        local_state: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        group: ProcessGroupLike | None = None,
        max_shard_size: int | str = "5GB",
        replicated: Replicated = True,
    ) -> SaveJob:
        """Settle what `save` writes, as a job to be run later or in the background; collective."""
        path = self.path(step) if name is None else self._path_of(name)

        def generation(previous: Manifest | None) -> int:
            return self.next_generation()

        return prepare_save(
            path,
            state,
            next_generation=generation,
            local_state=local_state,
            metadata={"step": step, **(metadata or {})},
            group=group,
            max_shard_size=max_shard_size,
            replicated=replicated,
            storage_options=self._options,
        )

    def load_latest(
        self,
        *,
        rank: int | None = None,
        group: ProcessGroupLike | None = None,
        into: Mapping[Any, Any] | None = None,
        only: Only | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        verify: Literal["parts", "full", "sizes"] = "parts",
        cast: bool = False,
        progress: bool | None = None,
    ) -> Checkpoint:
        """Load the newest checkpoint whose checksums are right; warn about each one passed over.

        Args:
            rank: whose `local_state` to load; default: this rank in `group`.
            group: processes that must all load the same checkpoint: if one of them finds it
                damaged, all fall back together. Default: just this one.
            into: a tree of tensors to load into, as in `load`. Then all that is needed of a
                checkpoint is verified before the first tensor is written (`verify` is "full").
            only: which tensors, as in `load`.
            rename: other names for them, as in `load`.
            strict: missing or unexpected names are errors.
            verify: how much is verified, as in `load`.
            cast: convert to the dtypes of `into`.
            progress: a progress bar; None shows one for a long load on a terminal.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: there are some, and none of them can be loaded. It is a
                TornLoadError if `into` has been written to.
            StateMismatchError: the newest one is sound and does not fit `into`.
        """
        group = group or SingleProcess()
        own = group.rank if rank is None else rank

        def attempt(path: str) -> Checkpoint:
            return load(
                path,
                rank=own,
                into=into,
                only=only,
                rename=rename,
                strict=strict,
                verify="full" if into is not None else verify,
                cast=cast,
                progress=progress,
                storage_options=self._options,
            )

        tries: Fallback[Checkpoint] = Fallback(
            self.url, self.survey, group, in_place=into is not None, covers_all=strict
        )
        return tries.run(attempt)

    def open_latest(
        self,
        *,
        rank: int | None = None,
        group: ProcessGroupLike | None = None,
        skip: Paths = (),
    ) -> CheckpointReader:
        """Open the newest checkpoint whose files all fit its manifest (sizes and headers).

        Args:
            rank: whose `local_state` to open; default: this rank in `group`.
            group: processes that must all open the same one. Default: just this one.
            skip: paths not to take, such as one that turned out to be damaged while it was read.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: there are some, and none of them can be used.
        """
        group = group or SingleProcess()
        own = group.rank if rank is None else rank

        def attempt(path: str) -> CheckpointReader:
            reader = open_checkpoint(path, rank=own, storage_options=self._options)
            reader.check()
            return reader

        tries: Fallback[CheckpointReader] = Fallback(self.url, self.survey, group)
        return tries.run(attempt, skip=[self._path_of(base_name(path)) for path in skip])
