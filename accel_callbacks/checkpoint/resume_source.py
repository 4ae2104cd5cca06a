"""ResumeSource: a place beside a folder of checkpoints that may hold a newer state of its run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import CheckpointFolder, CheckpointReader

__all__ = ["ResumeSource", "reached"]


def reached(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Return the steps and the epochs that were done when a checkpoint was saved.

    The last step of an epoch may be saved twice, before and after the evaluation at its end.
    """
    return metadata.get("step", 0), metadata.get("epochs_done", 0)


class ResumeSource(Protocol):
    """Takes states of a run between its checkpoints, and gives the newest back to a resume."""

    def offer(self, run: TrainingRun, **options: Any) -> bool:
        """Collective: take the state of now, unless that would delay a checkpoint.

        Args:
            run: the run.
            **options: of ``Checkpointer.write``.

        Returns:
            Whether it is taken, or is being taken in the background.
        """

    def open_newest(
        self, stored: CheckpointFolder, tried: Collection[str] = ()
    ) -> CheckpointReader | None:
        """Collective: open the newest of a folder's checkpoints, or a state here that is newer.

        Args:
            stored: the folder of checkpoints.
            tried: paths of both that turned out to be damaged.

        Raises:
            checkpoint_io.CorruptCheckpointError: all checkpoints are damaged, and so is what is
                here.
        """

    def holds(self, path: str) -> bool:
        """Return whether a path that :meth:`open_newest` has given is one of here."""

    def forget(self, but: str | None = None) -> None:
        """Remove the states, except that of a path."""
