"""MemorySnapshots: the newest state of a run in host memory, for the next attempt of its launch."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks.addons.resilience.peer_copies import Holding, copy_files, holding_of
from accel_callbacks.checkpoint.async_save import SaveCallbacks, SaveGroup, is_dispensable
from accel_callbacks.checkpoint.open import LoadFailed, open_newest, open_one
from accel_callbacks.checkpoint.part import reached
from accel_callbacks.launch_memory import VARIABLE, free_bytes, refusal_of_memory
from accel_callbacks.logging import notice
from accel_callbacks.terminal_text import size_of
from checkpoint_io.local_files import base_name, local_path
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import CheckpointFolder, CheckpointReader

__all__ = ["MemorySnapshots", "snapshots_beside"]

_PREFIX = "snapshot-"
_OPTION = "Checkpoint(memory_every_n_steps=...)"
_ENLARGE = (
    "Enlarge /dev/shm (docker run --shm-size=...) or the memory of the machine, or leave the "
    "argument out."
)


def snapshots_beside(checkpoints: str) -> MemorySnapshots | None:
    """Collective: return the snapshots of the run that saves into a folder of checkpoints.

    Where the ranks cannot keep any, print the reason and return None.

    Args:
        checkpoints: path or URL of the folder.
    """
    launch = os.environ.get(VARIABLE, "")
    places = collectives.all_objects((refusal_of_memory(), platform.node(), launch))
    for refusal, *_ in places:
        if refusal:
            notice(f"{_OPTION} keeps nothing in memory: {refusal}")
            return None
    lowest: dict[tuple[str, str], int] = {}
    machines = [
        lowest.setdefault((node, folder), rank) for rank, (_, node, folder) in enumerate(places)
    ]
    path = local_path(checkpoints)
    whole = checkpoints if path is None else os.path.abspath(path)
    name = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return MemorySnapshots(os.path.join(launch, "memory", name), machines)


class MemorySnapshots:
    """The newest snapshot of a training state in a folder of the launch, which is in host memory.

    A snapshot is a checkpoint that only a restart of the launch finds. The one before is removed
    once the new one is complete. Of several machines, each holds the files of its own ranks, and
    copies of those of the machine before it.

    Args:
        root: the folder on this machine; it need not exist yet.
        machines: for each rank the lowest rank of its machine, which copies for it.
    """

    def __init__(self, root: str, machines: Sequence[int]) -> None:
        self._root = root
        self._machines = machines
        self._leaders = sorted(set(machines))
        self._leads = collectives.rank() in self._leaders
        self._has_room: bool | None = None  # None before the first snapshot
        self._saving = False  # the save in progress is a snapshot
        self._reported = False

    def offer(self, run: TrainingRun, **options: Any) -> bool:
        """Collective: take a snapshot, unless a checkpoint is being written.

        A failure is a warning, after which no more are taken.

        Args:
            run: the run.
            **options: of ``Checkpointer.write``.

        Returns:
            Whether it is complete, or is being written in the background.
        """
        saves = run.accelerator.loop.saves
        # Training would wait for the store, because one save is in progress at a time.
        if saves.pending and not self._saving:
            return False
        saves.make_room()  # the end of the snapshot before may tell that there is no room
        if self._has_room is None:
            self._has_room = self._measure(run)
        if not self._has_room:
            return False
        name = f"{_PREFIX}{run.global_step:08d}"
        group = saves.control.beside()
        callbacks = SaveCallbacks(
            on_saved=self._on_saved,
            on_failed=self._on_failed,
            cleanup=partial(self._complete, name, time.perf_counter(), group),
            announced=False,
        )
        try:
            run.accelerator.checkpointer.write(
                os.path.join(self._root, name),
                generation=run.global_step,
                spread=len(self._leaders) > 1,
                callbacks=callbacks,
                **options,
            )
            self._saving = saves.pending
        except BaseException as error:
            if not self._on_failed(error):
                raise
        return self._has_room

    def _measure(self, run: TrainingRun) -> bool:
        """Collective: return whether two snapshots fit into memory; warn if they do not."""
        free = free_bytes(os.environ[VARIABLE]) + _nbytes(Path(self._root))
        nbytes = run.accelerator.training_state.nbytes()
        sizes: list[tuple[int, int]] = collectives.all_objects((nbytes, free))
        for number, leader in enumerate(self._leaders):
            held = (leader, self._leaders[number - 1])
            pairs = zip(self._machines, sizes, strict=True)
            needed = 2 * sum(nbytes for machine, (nbytes, _) in pairs if machine in held)
            free = sizes[leader][1]
            if free < needed:
                text = f"two snapshots need {size_of(needed)}, and {size_of(free)} are free."
                _warn(f"{text} {_ENLARGE}")
                return False
        return True

    def _on_saved(self, path: str) -> None:
        self._saving = False

    def _on_failed(self, error: BaseException) -> bool:
        """Warn of a snapshot that could not be written; return whether training continues."""
        self._saving = False
        if not is_dispensable(error):
            return False
        self._has_room = False
        text = f"{error}."
        if os.strerror(errno.ENOSPC) in text:
            text += f" {size_of(shutil.disk_usage(os.environ[VARIABLE]).free)} are free. {_ENLARGE}"
        _warn(text)
        return True

    def _complete(self, name: str, began: float, group: SaveGroup) -> None:
        """Collective: copy to the next machine, remove the snapshots before, say once what it cost.

        Raises:
            checkpoint_io.CheckpointError: a machine has no good copy. The snapshot is removed, and
                those before are kept.
        """
        from checkpoint_io import CheckpointError

        if len(self._leaders) > 1:
            try:
                self._copy_to_next(name, group)
            except CheckpointError:
                if self._leads:
                    shutil.rmtree(os.path.join(self._root, name), ignore_errors=True)
                raise
        self.forget(but=name)
        if not self._reported and self._leads:
            self._reported = True
            nbytes, seconds = _nbytes(Path(self._root)), time.perf_counter() - began
            copies = " with that of another machine" if len(self._leaders) > 1 else ""
            notice(
                f"the state is in memory for restarts of this launch: {size_of(nbytes)} on this "
                f"machine{copies}, complete after {seconds:.2f} s"
            )

    def _copy_to_next(self, name: str, group: SaveGroup) -> None:
        """Collective: copy the files of each machine to the next one, and the manifest to all."""
        from checkpoint_io.format.names import MANIFEST

        holdings = self._holdings(name, group)
        wanted = {
            leader: {MANIFEST, *holdings[self._leaders[number - 1]].sizes}
            for number, leader in enumerate(self._leaders)
        }
        copy_files(os.path.join(self._root, name), holdings, wanted, group)

    def _holdings(self, name: str, group: SaveGroup) -> dict[int, Holding]:
        """Collective: return what each machine holds of a snapshot, by the rank that copies."""
        folder = os.path.join(self._root, name)
        gathered = group.all_gather_object(holding_of(folder) if self._leads else None)
        return {rank: held for rank, held in enumerate(gathered) if held is not None}

    def forget(self, but: str | None = None) -> None:
        """Remove what is in the memory of this machine, except the snapshot of a path or name."""
        kept = None if but is None else base_name(but)
        for name in self._names() if self._leads else ():
            if name != kept:
                shutil.rmtree(os.path.join(self._root, name), ignore_errors=True)

    def holds(self, path: str) -> bool:
        """Return whether a path is that of a snapshot, by its name."""
        return base_name(path).startswith(_PREFIX)

    def _names(self) -> list[str]:
        return os.listdir(self._root) if os.path.isdir(self._root) else []

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
            checkpoint = open_newest(stored, [path for path in tried if not self.holds(path)])
        except CorruptCheckpointError as error:
            damage = error
        earlier = None if checkpoint is None else checkpoint.manifest.metadata
        snapshot = self._open_newer(earlier, set(map(base_name, tried)))
        if snapshot is None and damage is not None:
            raise damage
        return snapshot or checkpoint

    def _open_newer(
        self, earlier: Mapping[str, Any] | None, tried: Collection[str]
    ) -> CheckpointReader | None:
        """Collective: open the newest snapshot that continues what a checkpoint's metadata say."""
        from checkpoint_io import CheckpointError

        group = SaveGroup()
        with group.acquired():
            held = group.all_gather_object(self._names())
        for name in sorted(set().union(*held) - set(tried), reverse=True):
            try:
                with group.acquired():
                    holdings = self._holdings(name, group)
                    later = next((h.metadata for h in holdings.values() if h.saved), None)
                    if later is None:
                        raise CheckpointError("the loss came before it was complete")
                    if earlier is not None and not _is_newer(later, earlier):
                        return None
                    if len(self._leaders) > 1:
                        self._copy_to_all(name, holdings, group)
                return open_one(os.path.join(self._root, name))
            except (CheckpointError, LoadFailed) as error:
                notice(f"passed over {name} in memory: {error}")
        return None

    def _copy_to_all(self, name: str, holdings: Mapping[int, Holding], group: SaveGroup) -> None:
        """Collective: copy to each machine the files that it lacks."""
        saved = next(held.saved for held in holdings.values() if held.saved)
        copy_files(
            os.path.join(self._root, name), holdings, dict.fromkeys(self._leaders, saved), group
        )


def _warn(problem: str) -> None:
    warn(f"{_OPTION} keeps nothing more in memory: {problem} Checkpoints are saved as before.")


def _is_newer(later: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """Return whether a snapshot continues the run of a checkpoint, by the metadata of both."""
    return later["run_id"] == earlier.get("run_id") and reached(later) > reached(earlier)


def _nbytes(folder: Path) -> int:
    """Return the bytes of all files in a folder, which need not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
