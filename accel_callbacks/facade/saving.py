"""Saving and loading, as methods."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, cast

import torch

from accel_callbacks import checkpointing, collectives
from accel_callbacks._neighbours import require_neighbour
from accel_callbacks.compiling import uncompile
from accel_callbacks.facade.parts import Parts
from accel_callbacks.failing import refuse_torn
from accel_callbacks.tensor_file import save_tensors

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from checkpoint_io import Checkpoint, CheckpointFolder

__all__ = ["SavingMethods"]


class SavingMethods(Parts):
    """What reads and writes checkpoints and models."""

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Save the whole training state; all processes must call it.

        Models, optimizers, schedulers, the loss scaler, the loaders' positions, the run's
        position, callbacks, trackers, registered objects and the random generators of each
        process go into one checkpoint. It is complete and verified by its manifest, or it does
        not exist: saving over an older checkpoint leaves that one valid until the new one is.

        Args:
            output_dir: folder or fsspec URL; ``<project_dir>/checkpoints/step-<global step>``
                where ``None``.
            safe_serialization: there is no other way; here because Accelerate has it.
            metadata: JSON values to find in the manifest, such as metrics.
            storage_options: for the filesystem behind the URL.
            max_shard_size: largest tensor file, such as ``"5GB"``.

        Returns:
            The path of the checkpoint, which is durable.

        Raises:
            checkpoint_io.CheckpointError: a process could not write; nothing was committed.
            ValueError: ``safe_serialization=False``, which means pickle.
            RemoteError: a hook or a callback's ``state_dict`` failed on another process; likewise.

        Example:
            >>> import tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> accel.save_state().endswith("checkpoints/step-00000000")
            True
        """
        _refuse_pickle(safe_serialization)
        refuse_torn("save_state")
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
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Restore what :meth:`save_state` saved, into the prepared objects, on all processes.

        The checkpoint is read and verified as a whole before anything changes. A prepared loader
        continues at the exact sample with its next ``for``.

        Args:
            input_dir: a checkpoint; the newest valid one of the project where ``None``.
            load_kwargs: nothing is left to choose; here because Accelerate has it.
            strict: raise where the resume cannot be exact: another number of processes, a
                registered object without a state of its own.
            storage_options: for the filesystem behind the URL.

        Returns:
            The path that was loaded.

        Raises:
            FileNotFoundError: ``input_dir`` is ``None`` and the project has no valid checkpoint.
            ResumeError: the checkpoint does not fit; nothing was changed.
            TypeError: ``load_kwargs`` are given.
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
        if load_kwargs:
            raise TypeError(
                f"load_kwargs={dict(load_kwargs)!r} has no meaning here: tensors are restored in "
                "place. Leave it out."
            )
        refuse_torn("load_state")
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
        safe_serialization: bool = True,
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
            safe_serialization: there is no other way; here because Accelerate has it.
            storage_options: for the filesystem behind the URL.

        Raises:
            ValueError: ``safe_serialization=False``, which means pickle.
            RemoteError: the main process could not write.

        Example:
            >>> import os, tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> folder = tempfile.mkdtemp()
            >>> Accelerator(cpu=True).save_model(torch.nn.Linear(1, 1), folder)
            >>> os.listdir(folder)
            ['model.safetensors']
        """
        _refuse_pickle(safe_serialization)
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
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """The model as it was before ``prepare``.

        It is the model that is trained, not a copy: what is not kept is gone from it, and what
        is compiled is compiled in place.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: leave the autocast around its forward, and its fp8 layers, in place.
            keep_torch_compile: leave the model and its blocks compiled.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel, layer = Accelerator(cpu=True), torch.nn.Linear(1, 1)
            >>> accel.unwrap_model(accel.prepare(layer)) is layer
            True
        """
        inner = self.strategy.unwrap(model)
        if not keep_torch_compile:
            uncompile(inner)
        return inner if keep_fp32_wrapper else self.precision.unwrap(inner)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state of a prepared model.

        Args:
            model: a prepared model.
            unwrap: under the names of the unwrapped model; else those of the wrapper, if there
                is one.

        Example:
            >>> import torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> sorted(accel.get_state_dict(accel.prepare(torch.nn.Linear(1, 1))))
            ['bias', 'weight']
        """
        return self.strategy.model_state_dict(model) if unwrap else model.state_dict()

    def save(self, obj: Any, f: str | PathLike[str], safe_serialization: bool = True) -> None:
        """Write a flat dict of tensors as one safetensors file, on the main process.

        The others do not wait, so it may be called on all processes or on the main one only.

        Args:
            obj: names to tensors.
            f: path or fsspec URL of the file; it is replaced in one step.
            safe_serialization: there is no other way; here because Accelerate has it.

        Raises:
            TypeError: ``obj`` is something else, or ``f`` is an open file.
            ValueError: ``safe_serialization=False``, which means pickle.

        Example:
            >>> import tempfile, torch
            >>> from safetensors.torch import load_file
            >>> from accel_callbacks import Accelerator
            >>> path = tempfile.mkdtemp() + "/mean.safetensors"
            >>> Accelerator(cpu=True).save({"mean": torch.ones(2)}, path)
            >>> load_file(path)
            {'mean': tensor([1., 1.])}
        """
        _refuse_pickle(safe_serialization)
        if self.is_main_process:
            save_tensors(obj, f)


def _refuse_pickle(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise ValueError(
            "safe_serialization=False means pickle, which runs code when it is loaded: nothing "
            "here writes it. Leave it out; any safetensors reader opens what is saved."
        )
