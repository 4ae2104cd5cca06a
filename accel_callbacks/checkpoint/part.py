"""CheckpointPart: an owner's share of a checkpoint, and the load that restores it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from accel_callbacks.checkpoint.in_place_reads import InPlaceReads
from accel_callbacks.checkpoint.selection import Selection
from accel_callbacks.errors import ResumeError
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun
    from checkpoint_io import CheckpointFolder, CheckpointReader, TensorView

__all__ = [
    "CheckpointPart",
    "Load",
    "LoadOptions",
    "RestoreReport",
    "ResumeSource",
    "Sections",
    "reached",
]

#: Sections that all ranks share, and those of this rank.
Sections = tuple[dict[str, Any], dict[str, Any]]


@dataclass
class RestoreReport:
    """The names that a load did not restore: ``Accelerator.load_report``.

    Names are those of parameters and buffers, ``"<number of the model>.<name>"``.

    Attributes:
        path: the checkpoint.
        missing: names here that were selected and are not in the checkpoint; they are as before.
        unexpected: names in the checkpoint that were selected and are not here.
        kept: names that the save left out (``trainable_only``, or a hook); they are as before.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> model = accel.prepare(torch.nn.Linear(1, 1))
        >>> path = accel.save_state("memory://doc-report/c")
        >>> accel.load_state(path) == accel.load_report.path, accel.load_report.missing
        (True, [])
    """

    path: str
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load; see ``Accelerator.load_state``."""

    selection: Selection = field(default_factory=Selection)
    strict: bool = False
    verify: str = "parts"
    progress: bool | None = None
    storage_options: Mapping[str, Any] | None = None
    accept: Callable[[CheckpointReader], None] | None = None  # collective, before anything is read
    source: ResumeSource | None = None


@dataclass
class Load:
    """A load in progress: each stage of the parts fills in what the next ones need.

    Attributes:
        reader: the checkpoint.
        options: what is restored, and how.
        lazy: tensors of models and optimizers are read into their memory, none of them before.
        state: the shared state; tensors that are not read yet are views.
        local: the state of this rank, None if it saved none.
        selected: the selected part of ``state``.
        first: the sections that are read before anything is checked.
        in_place: the sections whose tensors are read into the memory of prepared objects.
        pairs: for a full check, views with tensors that are sharded as their targets are.
        reads: the tensors to read in place, or into new memory, once everything fits.
        report: the names that are not restored.
        indices: the prepared objects to restore, by section.
        plans: what a part has found out, by its name.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.checkpoint import CheckpointPart
        >>> class Told(CheckpointPart):
        ...     name = "told"
        ...
        ...     def capture(self):
        ...         return {"told": 1}, {}
        ...
        ...     def restore(self, load):
        ...         print(load.selected["told"], load.reader.path)
        >>> accel = Accelerator(cpu=True)
        >>> accel.training_state.register(Told())
        >>> _ = accel.load_state(accel.save_state("memory://doc-load/c"))
        1 memory://doc-load/c
    """

    reader: CheckpointReader
    options: LoadOptions
    lazy: bool = False
    state: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] | None = None
    selected: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    in_place: dict[str, Any] = field(default_factory=dict)
    pairs: list[tuple[TensorView, torch.Tensor]] = field(default_factory=list)
    reads: InPlaceReads = field(init=False)
    report: RestoreReport = field(init=False)
    indices: dict[str, list[int]] = field(default_factory=dict)
    plans: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reads = InPlaceReads(self.reader)
        self.report = RestoreReport(self.reader.path)

    @property
    def verifies_all(self) -> bool:
        """True for ``verify="full"``, which is collective: each byte is verified by one rank."""
        return self.options.verify == "full"

    @property
    def strict(self) -> bool:
        """True if what is not restored exactly is an error."""
        return self.options.strict

    def takes(self, key: str) -> bool:
        """Return whether the entry of a key is restored."""
        return self.options.selection.takes(key)

    def leave_to_be_read_in_place(self, section: str) -> None:
        """Read the tensors of a section once everything fits, and not before."""
        del self.first[section]
        self.in_place[section] = self.selected[section]


class CheckpointPart:
    """An owner's share of a checkpoint: what it saves, and how that is restored.

    A load calls each method for all parts before the next one. A part that saves plain values has
    :meth:`capture` and :meth:`restore`; the others are for tensors that are read in place.

    Attributes:
        name: of its section.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.checkpoint import CheckpointPart
        >>> class Seen(CheckpointPart):
        ...     name = "seen"
        ...     count = 0
        ...
        ...     def capture(self):
        ...         return {"seen": self.count}, {}
        ...
        ...     def restore(self, load):
        ...         self.count = load.selected.get("seen", 0)
        >>> accel, seen = Accelerator(cpu=True), Seen()
        >>> accel.training_state.register(seen)
        >>> seen.count = 3
        >>> path = accel.save_state("memory://doc-part/c")
        >>> seen.count = 0
        >>> _ = accel.load_state(path)
        >>> seen.count
        3
    """

    name: str
    #: True for a section of all ranks without which a checkpoint holds no training state.
    always_saved = False

    @property
    def prepared(self) -> int | None:
        """Number of the prepared objects with an entry each; None for a section of one thing."""
        return None

    def capture(self) -> Sections:
        """Return what is saved: sections that all ranks share, and those of this rank."""
        raise NotImplementedError

    def plan(self, load: Load) -> None:
        """Choose what is read at which stage; nothing has been read."""

    def read(self, load: Load) -> None:
        """Read what cannot be read with the rest; an error of the checkpoint's is damage."""

    def check(self, load: Load) -> None:
        """Refuse what does not fit, before anything is changed.

        Raises:
            ResumeError: it does not fit; or it is not in the checkpoint, and ``strict``.
        """
        if self.name in load.state or self.name in (load.local or {}):
            return
        if load.takes(self.name):
            text = f"the checkpoint holds no state of {self.name!r}, which stays as it is"
            if load.strict:
                raise ResumeError(f"{text}; pass strict=False to accept that.")
            warn(f"{text}.")

    def place(self, load: Load) -> None:
        """Give the tensors that are read in place, once hooks have seen what is restored."""

    def undone_by_a_failure(self) -> AbstractContextManager[None]:
        """Return a context for :meth:`check` to the read in place: what raises there is undone."""
        return nullcontext()

    def restore(self, load: Load) -> None:
        """Restore the selected state; tensors in place have been read."""

    def finish(self, load: Load) -> None:
        """Do what must come after all parts are restored."""


# --- resumeSource: a place beside a folder of checkpoints that may hold a newer state of its run -


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
