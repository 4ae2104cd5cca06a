"""Checkpointer: saves and restores the training state of an Accelerator, and saves its models."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.open import describe_foreign_folder, open_folder
from accel_callbacks.checkpoint.part import LoadOptions
from accel_callbacks.checkpoint.project import (
    SavePlace,
    path_in,
    project_save,
    refuse_each_node,
)
from accel_callbacks.checkpoint.restore import restore_from, restore_newest
from accel_callbacks.checkpoint.save import (
    SaveOptions,
    gather_adapter,
    return_leases,
    save_state,
    write_adapter,
)
from accel_callbacks.checkpoint.selection import Only, Rename, Selection
from accel_callbacks.checkpoint.tensor_file import save_tensors
from accel_callbacks.checkpoint.training_state import TrainingState, without_frozen
from accel_callbacks.distributed.abort import refuse_aborted_group
from accel_callbacks.distributed.failures import meet
from accel_callbacks.distributed.heartbeat import remote_failure
from accel_callbacks.distributed.process_control import synchronize
from accel_callbacks.models.adapters import adapters_of

if TYPE_CHECKING:
    from checkpoint_io import CheckpointFolder

__all__ = ["Checkpointer"]

_VERIFY = ("parts", "full")


class Checkpointer:
    """Saves and restores a training state; the methods are collective.

    Args:
        training: the state.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
        >>> model = accel.prepare(torch.nn.Linear(1, 1))
        >>> path = accel.checkpointer.save_state(async_save=True)
        >>> accel.checkpointer.wait()
        >>> accel.checkpointer.load_state() == path
        True
    """

    def __init__(self, training: TrainingState) -> None:
        self.training = training
        self._opened: tuple[str, dict[str, Any], CheckpointFolder] | None = None

    # --- saving -------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """Save to a path, or to the next place of the project; see ``Accelerator.save_state``.

        Args:
            output_dir: the path.
            safe_serialization: must be True.
            metadata: JSON values for the manifest.
            storage_options: for the filesystem behind the path.
            **options: of :meth:`write`.
        """
        _refuse_pickle(safe_serialization)
        refuse_aborted_group("save_state")
        training = self.training
        training.loop.settle()
        refuse_each_node(training.project, training.strategy.topology)
        if output_dir is not None:
            place = SavePlace(fspath(output_dir))
        else:
            folder = self._project_folder(storage_options)
            place = project_save(training.project, training.loop.run, folder)
        path = self.write(
            place.target,
            name=place.name,
            metadata={**place.metadata, **(metadata or {})},
            storage_options=storage_options,
            callbacks=place.callbacks,
            **options,
        )
        if path:
            place.started()
        return path

    def write(self, target: str | CheckpointFolder, **options: Any) -> str:
        """Save the state on all ranks; return the path, or "" if nothing was written.

        Args:
            target: the checkpoint's own path, or a folder, for ``step-<global step>`` as the newest
                in it.
            **options: of :class:`SaveOptions`.

        Raises:
            checkpoint_io.CheckpointError: any rank failed to write; nothing was committed. Or the
                pending save in the background has failed.
            checkpoint_io.LeaseError: another run has the folder; nothing was committed.
            RemoteError: a hook or the state of a callback failed on another rank; likewise.
        """
        return save_state(self.training, target, SaveOptions(**options))

    def _project_folder(self, storage_options: Mapping[str, Any] | None) -> CheckpointFolder:
        """Return the folder of the project's checkpoints; one object, which remembers manifests."""
        url, options = self.training.project.path("checkpoints"), dict(storage_options or {})
        if self._opened is None or self._opened[:2] != (url, options):
            self._opened = url, options, open_folder(url, options)
        return self._opened[2]

    def wait(self) -> None:
        """Wait for the save in the background; see ``Accelerator.wait_for_save``."""
        refuse_aborted_group("wait_for_save")
        try:
            self.training.loop.saves.wait()
        finally:
            return_leases(self.training.loop)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "5GB",
        safe_serialization: bool = True,
        *,
        trainable_only: bool = False,
        progress: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the weights of a model; see ``Accelerator.save_model``."""
        _refuse_pickle(safe_serialization)
        remote_failure.raise_in("save_model")
        training = self.training
        training.loop.step.require_loaded("save_model")
        import checkpoint_io

        state = training.strategy.states.weights_to_write(model)
        leases = training.loop.leases
        if adapters := adapters_of(training.strategy.unwrap(model), state):
            with synchronize("save_model"):
                leases.check_recent()
                for sharded in adapters:
                    adapter = gather_adapter(sharded, keep=self._writes_files)
                    if self._writes_files:
                        subfolders = () if adapter.name == "default" else (adapter.name,)
                        folder = path_in(fspath(save_directory), *subfolders)
                        write_adapter(adapter, folder, storage_options)
            return
        if trainable_only:
            state = without_frozen(state, training.strategy.unwrap(model))
        spread = any(map(collectives.is_sharded, state.values()))
        with synchronize("save_model"):
            leases.check_recent()
            # Sharded parameters are gathered one at a time in the write, so all ranks take part.
            if spread or self._writes_files:
                checkpoint_io.save_model(
                    state,
                    fspath(save_directory),
                    max_shard_size=max_shard_size,
                    storage_options=storage_options,
                    progress=progress,
                )

    def save_tensors(
        self, obj: Any, f: str | PathLike[str], safe_serialization: bool = True
    ) -> None:
        """Write tensors as one safetensors file on the main rank; see ``Accelerator.save``."""
        _refuse_pickle(safe_serialization)
        remote_failure.raise_in("save")
        if isinstance(obj, Mapping) and any(map(collectives.is_sharded, obj.values())):
            meet("save")
            obj = collectives.gather_sharded(obj, keep=self._writes_files)
        self.training.loop.leases.check_recent()
        if self._writes_files:
            save_tensors(obj, f)

    @property
    def _writes_files(self) -> bool:
        """True on the rank that writes what is written once, or once a node."""
        topology = self.training.strategy.topology
        return (
            topology.local_rank if self.training.project.save_on_each_node else topology.rank
        ) == 0

    # --- loading ------------------------------------------------------------------------------

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
        """Restore a path, or the newest valid checkpoint; see ``Accelerator.load_state``."""
        if load_kwargs:
            raise TypeError(
                f"load_kwargs={dict(load_kwargs)!r} has no meaning here: tensors are restored in "
                "place. Leave it out."
            )
        if verify not in _VERIFY:
            raise ValueError(f"verify={verify!r} is unknown: use one of {_VERIFY}.")
        refuse_aborted_group("load_state")
        self.training.loop.step.require_own_weights("load_state")
        options = LoadOptions(Selection(only, rename), strict, verify, progress, storage_options)
        if input_dir is not None:
            return restore_from(self.training, fspath(input_dir), options)
        root = self.training.project.path("checkpoints")
        path = restore_newest(self.training, root, options)
        if path is None:
            raise FileNotFoundError(
                f"no valid checkpoint under {root}: pass the path of one, or save_state() first."
                + describe_foreign_folder(root, storage_options)
            )
        return path


def _refuse_pickle(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise ValueError(
            "safe_serialization=False means pickle, which runs code when it is loaded: nothing "
            "here writes it. Leave it out; any safetensors reader opens what is saved."
        )
