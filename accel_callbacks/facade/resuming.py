"""Loading a training state, as a method."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, cast

from accel_callbacks._siblings import require_neighbour
from accel_callbacks.checkpoint.compatibility import RestoreReport
from accel_callbacks.checkpoint.open import describe_foreign_folder
from accel_callbacks.checkpoint.restore import LoadOptions, restore_from, restore_newest
from accel_callbacks.checkpoint.selection import Only, Rename, Selection
from accel_callbacks.distributed.abort import refuse_torn
from accel_callbacks.facade.parts import Parts

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator

__all__ = ["ResumingMethods"]

_VERIFY = ("parts", "full")


class ResumingMethods(Parts):
    """What reads checkpoints of a training state."""

    #: What the last ``load_state`` found, None before the first.
    load_report: RestoreReport | None = None

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that is named automatically, at least."""
        return self.project_configuration.iteration

    def load_state(
        self,
        input_dir: str | PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        only: Only | None = None,
        rename: Rename | None = None,
        strict: bool = False,
        verify: str = "parts",
        progress: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Restore what :meth:`save_state` saved, into the prepared objects, on all processes.

        Weights and optimizer states are read straight into the memory that they have here, each
        part of a file verified before one of its bytes is used; nothing changes before all names,
        shapes, dtypes and sizes were found to fit. Where reading breaks off half-way, the newest
        older checkpoint is taken if ``input_dir`` is ``None``; else the error is raised, and
        ``backward``, ``step`` and ``save_state`` refuse to go on until a checkpoint was loaded. A
        prepared loader continues at the exact sample with its next ``for``.

        Args:
            input_dir: a checkpoint; the newest valid one of the project where ``None``.
            load_kwargs: nothing is left to choose; here because Accelerate has it.
            only: a part of the checkpoint: sections (``"models"``, ``"optimizers"``,
                ``"schedulers"``, ``"loaders"``, ``"registered"``, ``"run"``, ...), keys
                (``"models/0"``, ``"registered/ema"``), glob patterns of keys
                (``"models/0/encoder.*"``), several of these, or a function of a key. The rest
                stays as it is here.
            rename: weights that have other names here: beginnings of saved keys to what they are
                now, ``{"models/0/backbone.": "models/0/encoder."}``, or a function of such a key.
                States of optimizers follow.
            strict: raise where the resume cannot be exact: another number of processes, a
                registered object without a state of its own, with ``only`` a weight that is not
                on both sides. Else these are warnings.
            verify: ``"full"`` reads and checks all bytes before anything changes, and then reads
                them again; ``"parts"`` checks each part on its way.
            progress: a bar with bytes per second; ``None`` shows one for long loads on a terminal.
            storage_options: for the filesystem behind the URL.

        Returns:
            The path that was loaded; :attr:`load_report` lists the names that were not.

        Raises:
            FileNotFoundError: ``input_dir`` is ``None`` and the project has no valid checkpoint.
            ResumeError: the checkpoint does not fit; nothing was changed.
            TypeError: ``load_kwargs`` are given.
            ValueError: ``verify`` is something else.
            checkpoint_io.CheckpointError: missing, unfinished or corrupt; nothing was changed
                unless it is a :class:`checkpoint_io.TornLoadError`.
            RemoteError: another process could not read or restore it.

        Example:
            >>> import tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> accel.save_state() == accel.load_state()
            True
        """
        if load_kwargs:
            raise TypeError(
                f"load_kwargs={dict(load_kwargs)!r} has no meaning here: tensors are restored in "
                "place. Leave it out."
            )
        if verify not in _VERIFY:
            raise ValueError(f"verify={verify!r} is unknown: use one of {_VERIFY}.")
        require_neighbour("checkpoint_io")
        refuse_torn("load_state")
        selection = Selection(only, rename)
        options = LoadOptions(selection, strict, verify, progress, storage_options)
        accel = cast("Accelerator", self)
        if input_dir is not None:
            return restore_from(accel, fspath(input_dir), options)
        root = self._in_project("checkpoints")
        found = restore_newest(accel, root, options)
        if found is None:
            raise FileNotFoundError(
                f"no valid checkpoint under {root}: pass the path of one, or save_state() first."
                + describe_foreign_folder(root, storage_options)
            )
        return found
