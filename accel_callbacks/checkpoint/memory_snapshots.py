"""MemorySnapshots: the newest state of a run in host memory, for the next attempt of its launch."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks._siblings import require_neighbor
from accel_callbacks.checkpoint.async_save import SaveCallbacks
from accel_callbacks.checkpoint.open import open_folder, open_newest
from accel_callbacks.launch_notes import VARIABLE, refusal_of_memory
from accel_callbacks.local_files import base_name, local_path
from accel_callbacks.logging import notice
from accel_callbacks.terminal_text import size_of
from accel_callbacks.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import CheckpointFolder, CheckpointReader

__all__ = ["MemorySnapshots", "is_snapshot", "reached", "snapshots_beside"]

_PREFIX = "snapshot-"
_OPTION = "Checkpoint(memory_every_n_steps=...)"


def snapshots_beside(checkpoints: str, run: TrainingRun) -> MemorySnapshots | None:
    """Collective: return the snapshots of the run that saves into a folder of checkpoints.

    Where the ranks cannot keep any, print the reason and return None.

    Args:
        checkpoints: path or URL of the folder.
        run: the run.
    """
    reason = refusal_of_memory()
    if not reason and run.num_nodes > 1:
        reason = "the processes are on several machines"
    if reason := next(filter(None, collectives.all_objects(reason)), ""):
        notice(f"{_OPTION} keeps nothing in memory: {reason}")
        return None
    path = local_path(checkpoints)
    whole = checkpoints if path is None else os.path.abspath(path)
    name = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return MemorySnapshots(os.path.join(os.environ[VARIABLE], "memory", name))


def is_snapshot(path: str) -> bool:
    """Return whether a path is that of a snapshot in memory, by its name."""
    return base_name(path).startswith(_PREFIX)


def reached(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Return the steps and the epochs that were done when a checkpoint was saved.

    The last step of an epoch may be saved twice, before and after the evaluation at its end.
    """
    return metadata.get("step", 0), metadata.get("epochs_done", 0)


class MemorySnapshots:
    """The newest snapshot of a training state in a folder of the launch, which is in host memory.

    A snapshot is a checkpoint that only a restart of the launch finds. The one before is removed
    once the new one is complete.

    Args:
        root: the folder; it need not exist yet.
    """

    def __init__(self, root: str) -> None:
        require_neighbor("checkpoint_io")
        self._root = root
        self._folder = open_folder(root)
        self._has_room: bool | None = None  # None before the first snapshot
        self._saving = False  # the save in progress is a snapshot
        self._reported = False

    def save(self, run: TrainingRun, **options: Any) -> None:
        """Collective: take a snapshot in the background, unless a checkpoint is being written.

        A failure is a warning, after which no more are taken.

        Args:
            run: the run.
            **options: of ``Checkpointer.write``.
        """
        saves = run.accelerator.loop.saves
        # Training would wait for the store, because one save is in progress at a time.
        if saves.pending and not self._saving:
            return
        if self._has_room is None:
            self._has_room = self._measure(run)
        if not self._has_room:
            return
        name = f"{_PREFIX}{run.global_step:08d}"
        tidy = partial(self._tidy, name, time.perf_counter())
        callbacks = SaveCallbacks(
            on_saved=self._on_saved,
            on_failed=self._on_failed,
            cleanup=tidy if run.local_rank == 0 else None,
            announced=False,
        )
        try:
            run.accelerator.checkpointer.write(
                os.path.join(self._root, name),
                generation=run.global_step,
                callbacks=callbacks,
                **options,
            )
            self._saving = saves.pending
        except BaseException as error:
            if not self._on_failed(error):
                raise

    def _measure(self, run: TrainingRun) -> bool:
        """Collective: return whether two snapshots fit into memory; warn if they do not."""
        from checkpoint_io.memory import free_memory

        needed = 2 * sum(collectives.all_objects(run.accelerator.training_state.nbytes()))
        free = shutil.disk_usage(os.environ[VARIABLE]).free
        free = min(free, free_memory() or free) + _nbytes(Path(self._root))
        free = collectives.broadcast_object(free)
        has_room = bool(free >= needed)
        if not has_room:
            self._warn(f"two snapshots need {size_of(needed)}, and {size_of(free)} are free")
        return has_room

    def _warn(self, problem: str) -> None:
        warn(
            f"{_OPTION} keeps nothing in memory from here on: {problem}. Enlarge "
            f"{os.path.dirname(os.environ[VARIABLE])} (docker run --shm-size=...) or the memory of "
            "the machine, or leave the argument out. Checkpoints are saved as before."
        )

    def _on_saved(self, path: str) -> None:
        self._saving = False

    def _on_failed(self, error: BaseException) -> bool:
        """Warn of a snapshot that could not be written; return whether training continues."""
        from checkpoint_io import CheckpointError, LeaseError, UnsupportedStateError

        self._saving = False
        # These also prevent the next checkpoint.
        lasting = isinstance(error, (UnsupportedStateError, LeaseError))
        if lasting or not isinstance(error, CheckpointError):
            return False
        self._has_room = False
        free = shutil.disk_usage(os.environ[VARIABLE]).free
        self._warn(f"{error} ({size_of(free)} are free)")
        return True

    def _tidy(self, name: str, began: float) -> None:
        """Remove the snapshots before a complete one; say once what it has cost."""
        seconds = time.perf_counter() - began
        self.remove(but=name)
        if not self._reported:
            self._reported = True
            nbytes = _nbytes(Path(self._root))
            notice(
                f"the state is in memory for restarts of this launch: {size_of(nbytes)}, complete "
                f"after {seconds:.2f} s"
            )

    def remove(self, but: str | None = None) -> None:
        """Remove what is in memory, except the snapshot of a path or name."""
        kept = None if but is None else base_name(but)
        root = Path(self._root)
        for folder in root.iterdir() if root.exists() else ():
            if folder.name != kept:
                shutil.rmtree(folder, ignore_errors=True)

    def open_newest(
        self, stored: CheckpointFolder, tried: Collection[str] = ()
    ) -> CheckpointReader | None:
        """Collective: open the newest of a folder's checkpoints, or a snapshot that is newer.

        Args:
            stored: the folder of checkpoints.
            tried: paths of both that turned out to be damaged.

        Raises:
            checkpoint_io.CorruptCheckpointError: all checkpoints are damaged, and so is the memory.
        """
        from checkpoint_io import CorruptCheckpointError

        damage, checkpoint = None, None
        try:
            checkpoint = open_newest(stored, [path for path in tried if not is_snapshot(path)])
        except CorruptCheckpointError as error:
            damage = error
        try:
            snapshot = open_newest(self._folder, [path for path in tried if is_snapshot(path)])
        except CorruptCheckpointError:
            snapshot = None
        if snapshot is not None and (checkpoint is None or _is_newer(snapshot, checkpoint)):
            return snapshot
        if damage is not None:
            raise damage
        return checkpoint


def _is_newer(snapshot: CheckpointReader, checkpoint: CheckpointReader) -> bool:
    """Return whether a snapshot continues the run of a checkpoint."""
    later, earlier = snapshot.manifest.metadata, checkpoint.manifest.metadata
    return later["run_id"] == earlier.get("run_id") and reached(later) > reached(earlier)


def _nbytes(folder: Path) -> int:
    """Return the bytes of all files in a folder, which need not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
