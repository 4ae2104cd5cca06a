"""Saving and loading, as methods."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, cast

import torch

from accel_callbacks import checkpointing, collectives
from accel_callbacks._neighbours import require_neighbour
from accel_callbacks.facade.parts import Parts

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from checkpoint_io import Checkpoint, CheckpointFolder

__all__ = ["SavingMethods"]


class SavingMethods(Parts):
    """What reads and writes checkpoints and models."""

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Save the whole training state; all processes must call it.

        Models, optimizers, schedulers, the loss scaler, the loaders' positions, the run's
        position, callbacks, trackers and the random generators of each process go into one
        checkpoint. It is complete and verified by its manifest, or it does not exist: saving over
        an older checkpoint leaves that one valid until the new one is.

        Args:
            output_dir: folder or fsspec URL; ``<project_dir>/checkpoints/step-<global step>``
                where ``None``.
            metadata: JSON values to find in the manifest, such as metrics.
            storage_options: for the filesystem behind the URL.
            max_shard_size: largest tensor file, such as ``"5GB"``.

        Returns:
            The path of the checkpoint, which is durable.

        Raises:
            checkpoint_io.CheckpointError: a process could not write; nothing was committed.
            RemoteError: a hook or a callback's ``state_dict`` failed on another process; likewise.

        Example:
            >>> import tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> accel.save_state().endswith("checkpoints/step-00000000")
            True
        """
        self.loop.settle()
        target: str | CheckpointFolder
        if output_dir is not None:
            target = fspath(output_dir)
        else:
            target = checkpointing.open_folder(self._in_project("checkpoints"), storage_options)
        return checkpointing.write(
            cast("Accelerator", self),
            target,
            metadata=metadata,
            storage_options=storage_options,
            max_shard_size=max_shard_size,
        )

    def load_state(
        self,
        input_dir: str | PathLike[str] | None = None,
        *,
        strict: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Restore what :meth:`save_state` saved, into the prepared objects, on all processes.

        The checkpoint is read and verified as a whole before anything changes. A prepared loader
        continues at the exact sample with its next ``for``.

        Args:
            input_dir: a checkpoint; the newest valid one of the project where ``None``.
            strict: raise where the resume cannot be exact (another number of processes).
            storage_options: for the filesystem behind the URL.

        Returns:
            The path that was loaded.

        Raises:
            FileNotFoundError: ``input_dir`` is ``None`` and the project has no valid checkpoint.
            ResumeError: the checkpoint does not fit; nothing was changed.
            checkpoint_io.CheckpointError: missing, unfinished or corrupt; nothing was changed.
            RemoteError: another process could not read or restore it.

        Example:
            >>> import tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> accel.save_state() == accel.load_state()
            True
        """
        found: Checkpoint | None
        if input_dir is not None:
            found = checkpointing.read(fspath(input_dir), storage_options)
        else:
            root = self._in_project("checkpoints")
            found = checkpointing.read_latest(root, storage_options)
            if found is None:
                raise FileNotFoundError(
                    f"no valid checkpoint under {root}: pass the path of one, or save_state() first"
                )
        checkpointing.restore(cast("Accelerator", self), found, strict=strict)
        return found.path

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "5GB",
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the weights as ``model.safetensors``, or as shards with an index.

        Stock safetensors and transformers read the result. All processes must call it; the main
        one writes, the others wait.

        Args:
            model: prepared or not.
            save_directory: folder or fsspec URL.
            max_shard_size: largest file, such as ``"5GB"``.
            storage_options: for the filesystem behind the URL.

        Raises:
            RemoteError: the main process could not write.

        Example:
            >>> import os, tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> folder = tempfile.mkdtemp()
            >>> Accelerator(cpu=True).save_model(torch.nn.Linear(1, 1), folder)
            >>> os.listdir(folder)
            ['model.safetensors']
        """
        require_neighbour("checkpoint_io")
        import checkpoint_io

        state = self.strategy.model_state_dict(model)
        with self.synchronize("save_model"):
            if collectives.rank() == 0:
                checkpoint_io.save_model(
                    state,
                    fspath(save_directory),
                    max_shard_size=max_shard_size,
                    storage_options=storage_options,
                )

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True
    ) -> torch.nn.Module:
        """The model as it was before ``prepare``.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: leave the autocast around its forward in place.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel, layer = Accelerator(cpu=True), torch.nn.Linear(1, 1)
            >>> accel.unwrap_model(accel.prepare(layer)) is layer
            True
        """
        inner = self.strategy.unwrap(model)
        return inner if keep_fp32_wrapper else self.precision.unwrap(inner)

    def get_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """The full state of a prepared model, under the names of the unwrapped one.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> sorted(accel.get_state_dict(accel.prepare(torch.nn.Linear(1, 1))))
            ['bias', 'weight']
        """
        return self.strategy.model_state_dict(model)
