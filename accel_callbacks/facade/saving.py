"""Saving and loading, as methods."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, cast

import torch

from accel_callbacks._siblings import require_neighbour
from accel_callbacks.checkpoint import training_state
from accel_callbacks.checkpoint.project import SavePlace, project_save, refuse_each_node
from accel_callbacks.checkpoint.tensor_file import save_tensors
from accel_callbacks.distributed.abort import refuse_torn
from accel_callbacks.errors import refuse_half_loaded
from accel_callbacks.facade.parts import Parts
from accel_callbacks.modeling.compile import uncompile

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator

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
        async_save: bool = False,
        when_busy: str = "wait",
        trainable_only: bool = False,
    ) -> str:
        """Save the whole training state; all processes must call it.

        Models, optimizers, schedulers, the loss scaler, the loaders' positions, the run's
        position, callbacks, trackers, registered objects and the random generators of each
        process go into one checkpoint. It is complete and verified by its manifest, or it does
        not exist: saving over an older checkpoint leaves that one valid until the new one is.

        Args:
            output_dir: folder or fsspec URL; ``<project_dir>/checkpoints/step-<global step>``
                where ``None``, or a number as :class:`ProjectConfiguration` says.
            safe_serialization: there is no other way; here because Accelerate has it.
            metadata: JSON values to find in the manifest, such as metrics.
            storage_options: for the filesystem behind the URL.
            max_shard_size: largest tensor file, such as ``"5GB"``.
            async_save: return once the state is copied to host memory, and write it while training
                goes on. ``on_checkpoint_saved`` tells when it is durable, and an error is raised on
                all processes at the end of a later optimizer step, or by :meth:`wait_for_save`.
            when_busy: if an earlier save is under way, ``"wait"`` for it, or ``"skip"`` this one.
            trainable_only: leave frozen parameters out; a load keeps those that are there.

        Returns:
            The path of the checkpoint, which is durable unless ``async_save``; an empty string if
            it was skipped.

        Raises:
            checkpoint_io.CheckpointError: a process could not write; nothing was committed. Or the
                save before, in the background, had failed.
            ValueError: ``safe_serialization=False``, which means pickle; an unknown ``when_busy``;
                ``save_on_each_node`` of the project on several nodes.
            ResumeError: a ``load_state`` broke off half-way, and none succeeded since.
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
        accel = cast("Accelerator", self)
        refuse_each_node(accel)
        if output_dir is not None:
            place = SavePlace(fspath(output_dir))
        else:
            place = project_save(accel, storage_options)
        path = training_state.write(
            accel,
            place.target,
            metadata={**place.metadata, **(metadata or {})},
            storage_options=storage_options,
            max_shard_size=max_shard_size,
            async_save=async_save,
            when_busy=when_busy,
            trainable_only=trainable_only,
            then=place.then,
        )
        if path:
            place.started()
        return path

    def wait_for_save(self) -> None:
        """Wait until the save in the background, if there is one, is durable; all must call it.

        Raises:
            checkpoint_io.CheckpointError: it failed; nothing was committed.

        Example:
            >>> import tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
            >>> model = accel.prepare(torch.nn.Linear(1, 1))
            >>> path = accel.save_state(async_save=True)
            >>> accel.wait_for_save()
            >>> accel.load_state() == path
            True
        """
        refuse_torn("wait_for_save")
        self.loop.saves.wait()

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
        """Write the weights as ``model.safetensors``, or as shards with an index.

        Stock safetensors and transformers read the result. All processes must call it; the main
        one writes, or with ``save_on_each_node`` of the project one of each node, and the others
        wait. Of a model whose parameters are spread over processes, one tensor after the other is
        gathered where it is written.

        Args:
            model: prepared or not.
            save_directory: folder or fsspec URL.
            max_shard_size: largest file, such as ``"5GB"``.
            safe_serialization: there is no other way; here because Accelerate has it.
            trainable_only: leave frozen parameters out, and keep buffers.
            progress: a bar with bytes per second; ``None`` shows one for long saves on a terminal.
            storage_options: for the filesystem behind the URL.

        Raises:
            ValueError: ``safe_serialization=False``, which means pickle.
            ResumeError: a ``load_state`` broke off half-way, and none succeeded since.
            RemoteError: the process that writes could not.

        Example:
            >>> import os, tempfile, torch
            >>> from accel_callbacks import Accelerator
            >>> folder = tempfile.mkdtemp()
            >>> Accelerator(cpu=True).save_model(torch.nn.Linear(1, 1), folder)
            >>> os.listdir(folder)
            ['model.safetensors']
        """
        _refuse_pickle(safe_serialization)
        if self.loop.half_loaded is not None:
            refuse_half_loaded(self.loop.half_loaded, "save_model")
        require_neighbour("checkpoint_io")
        import checkpoint_io

        state = self.strategy.model_state_dict(model)
        if trainable_only:
            inner = self.strategy.unwrap(model)
            frozen = {
                n for n, p in inner.named_parameters(remove_duplicate=False) if not p.requires_grad
            }
            state = {name: value for name, value in state.items() if name not in frozen}
        spread = any(hasattr(value, "device_mesh") for value in state.values())
        with self.synchronize("save_model"):
            if spread or self._writes_files:
                checkpoint_io.save_model(
                    state,
                    fspath(save_directory),
                    max_shard_size=max_shard_size,
                    storage_options=storage_options,
                    progress=progress,
                )

    @property
    def _writes_files(self) -> bool:
        """Whether this process is the one that writes what is written once, or once a node."""
        each_node = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each_node else self.is_main_process

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

        With ``save_on_each_node`` of the project it is the main one of each node. The others do
        not wait, so it may be called on all processes or on the main one only.

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
        if self._writes_files:
            save_tensors(obj, f)


def _refuse_pickle(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise ValueError(
            "safe_serialization=False means pickle, which runs code when it is loaded: nothing "
            "here writes it. Leave it out; any safetensors reader opens what is saved."
        )
