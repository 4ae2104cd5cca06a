"""Checkpointer: saves and restores the training state of an Accelerator, and saves its models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks._siblings import require_neighbor
from accel_callbacks.checkpoint.async_save import SaveCallbacks, check_when_busy
from accel_callbacks.checkpoint.folder_leases import Folder
from accel_callbacks.checkpoint.open import describe_foreign_folder, open_folder
from accel_callbacks.checkpoint.part import LoadOptions
from accel_callbacks.checkpoint.project import (
    SavePlace,
    path_in,
    project_save,
    refuse_each_node,
)
from accel_callbacks.checkpoint.restore import restore_from, restore_newest
from accel_callbacks.checkpoint.selection import Only, Rename, Selection
from accel_callbacks.checkpoint.tensor_file import save_tensors, save_text, writable_folder
from accel_callbacks.checkpoint.trained_parameters import require_prepared_steps, require_saved
from accel_callbacks.checkpoint.training_state import ExtraFiles, TrainingState, without_frozen
from accel_callbacks.distributed.abort import refuse_aborted_group
from accel_callbacks.distributed.failures import meet, shared_failure
from accel_callbacks.distributed.process_control import synchronize
from accel_callbacks.distributed.remote_failure import remote_failure
from accel_callbacks.local_files import split_path
from accel_callbacks.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Adapter,
    adapters_of,
)
from accel_callbacks.warning import warn

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
        self._lent: list[str] = []  # folders whose leases are held for saves outside of a training

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

    def write(
        self,
        target: str | CheckpointFolder,
        *,
        name: str | None = None,
        generation: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "5GB",
        async_save: bool = False,
        when_busy: str = "wait",
        trainable_only: bool = False,
        spread: bool = False,
        callbacks: SaveCallbacks | None = None,
        began: float | None = None,
    ) -> str:
        """Save the state on all ranks; return the path, or "" if the save was skipped.

        Args:
            target: the checkpoint's own path, or a folder, for ``step-<global step>`` as the newest
                in it.
            name: of the checkpoint in a folder, instead of ``step-<global step>``.
            generation: orders it among the checkpoints of a folder; the newest if ``None``.
            metadata: JSON values for the manifest.
            storage_options: for the filesystem behind a path; a folder has its own for all but
                the files of an adapter.
            max_shard_size: largest tensor file.
            async_save: return once the state is copied, and write it while training goes on.
            when_busy: ``"wait"`` for a pending save, or ``"skip"`` this one.
            trainable_only: leave frozen parameters out.
            spread: ``target`` is a path on each machine, which gets the files of its ranks alone.
            callbacks: called once it is durable, or has failed in the background.
            began: when training stopped for it, by ``time.perf_counter()``; now if ``None``.

        Raises:
            checkpoint_io.CheckpointError: any rank failed to write; nothing was committed. Or the
                pending save in the background has failed.
            checkpoint_io.LeaseError: another run has the folder; nothing was committed.
            RemoteError: a hook or the state of a callback failed on another rank; likewise.
        """
        require_neighbor("checkpoint_io")
        import checkpoint_io

        check_when_busy(when_busy)
        loop = self.training.loop
        if not all(observer.may_save() for observer in loop.observers):
            self._rehearse_save()
            return ""
        loop.require_loaded("save_state")
        loop.require_own_weights("save_state")
        start = time.perf_counter() if began is None else began
        loop.run.save_began = start
        saves = loop.saves
        loop.run.votes.wait()  # with the save, nothing else is under way between the ranks
        if not saves.make_room(when_busy if async_save else "wait"):
            return ""
        step = loop.run.global_step
        if isinstance(target, str):
            url = target
        else:
            url = target.path(step) if name is None else path_in(target.url, name)
        if loop.window.is_open:
            # Inside of a window FSDP holds gradients back that parameter.grad does not show.
            self.training.strategy.states.reduce_gradients()
        folders = self._folders(target, storage_options)
        try:
            shared, local, labels = self._state_and_labels(
                url, folders, trainable_only, storage_options
            )
            options: dict[str, Any] = {
                "local_state": local,
                "metadata": {**labels, **(metadata or {})},
                "group": saves.control,
                "max_shard_size": max_shard_size,
                "replicated": self.training.replicated_keys(),
                "before_write": loop.leases.check,
            }
            if isinstance(target, str):
                job = checkpoint_io.prepare_save(
                    url,
                    shared,
                    next_generation=generation,
                    storage_options=storage_options,
                    spread=spread,
                    **options,
                )
            else:
                job = target.prepare_save(step, shared, name=name, generation=generation, **options)
            callbacks = _checked(callbacks or SaveCallbacks(), loop.leases.check)
            (saves.start if async_save else saves.run_now)(job, callbacks)
        finally:
            loop.run.save_s += time.perf_counter() - start
            self._give_back()
        return url

    def _rehearse_save(self) -> None:
        """Do to the run what a save does, and write nothing.

        A callback may change as its state is saved, a hook may draw, and a stream may draw ahead.
        """
        training = self.training
        training.loop.run.votes.wait()
        if training.loop.window.is_open:
            training.strategy.states.reduce_gradients()
        with shared_failure("save_state"):
            shared, _ = training.capture()
            training.loop.fire("on_save_checkpoint", shared)

    def _project_folder(self, storage_options: Mapping[str, Any] | None) -> CheckpointFolder:
        """Return the folder of the project's checkpoints; one object, which remembers manifests."""
        url, options = self.training.project.path("checkpoints"), dict(storage_options or {})
        if self._opened is None or self._opened[:2] != (url, options):
            self._opened = url, options, open_folder(url, options)
        return self._opened[2]

    def _folders(
        self, target: str | CheckpointFolder, storage_options: Mapping[str, Any] | None
    ) -> list[Folder]:
        """Return the folder whose lease a save needs, if any.

        A path needs that of the folder it is in, but outside of the project none: what lies there
        may be of many runs.
        """
        if not isinstance(target, str):
            return [(target.url, storage_options)]
        if not self.training.project.contains(target):
            return []
        return [(split_path(target)[0], storage_options)]

    def _give_back(self) -> None:
        """Release the leases that a save outside of a training took, once it has ended."""
        loop = self.training.loop
        if self._lent and not loop.fitting and not loop.saves.pending:
            loop.leases.release(*self._lent)
            self._lent.clear()

    def _state_and_labels(
        self,
        url: str,
        folders: Sequence[Folder],
        trainable_only: bool,
        storage_options: Mapping[str, Any] | None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the state as the hooks leave it, and metadata that identify it."""
        training, leases = self.training, self.training.loop.leases
        with shared_failure("save_state"):
            require_saved(training, "save_state")
            require_prepared_steps(training)
            _warn_of_late_parts(training)
            self._lent += [folder for folder, _ in folders if not leases.holds(folder)]
            leases.hold(folders, training.loop.run)
            shared, local = training.capture()
            labels = _labels_of(shared["run"])  # before the hooks, which may change the state
            before_hooks, _ = training.random_state()
            extra = ExtraFiles(url) if training.pre_hooks.save_some else None
        # A block of its own: hooks and fingerprints may be collective, and a rank that has failed
        # above would not come to them.
        with shared_failure("save_state"):
            training.choose_weights(shared, url, trainable_only=trainable_only)
            training.loop.fire("on_save_checkpoint", shared)
            training.capture_draws_of_hooks(before_hooks, shared, local)
            files = set(self._save_adapter(shared, url, storage_options) if trainable_only else ())
        if extra is not None:
            labels |= extra.labels()
        files.update(labels.get("extra_files", []))
        return shared, local, {**labels, "extra_files": sorted(files)} if files else labels

    def _save_adapter(
        self, shared: Mapping[str, Any], url: str, storage_options: Mapping[str, Any] | None
    ) -> list[str]:
        """Write the adapter of a PEFT model beside the checkpoint on rank 0; return the files.

        As peft has one adapter in a folder, none are written where there are several.
        """
        training = self.training
        states = shared["models"].values()
        adapters = [
            adapter
            for model, state in zip(training.bare_models, states, strict=False)
            for adapter in (() if state is None else adapters_of(model, state))
        ]
        if len(adapters) != 1:
            return []
        adapter = self._gathered(adapters[0])
        if training.strategy.topology.rank == 0:
            with writable_folder(url) as folder:
                _write_adapter(adapter, folder, storage_options)
        return [ADAPTER_CONFIG, ADAPTER_WEIGHTS]

    def wait(self) -> None:
        """Wait for the save in the background; see ``Accelerator.wait_for_save``."""
        refuse_aborted_group("wait_for_save")
        try:
            self.training.loop.saves.wait()
        finally:
            self._give_back()

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
        training.loop.require_loaded("save_model")
        require_neighbor("checkpoint_io")
        import checkpoint_io

        state = training.strategy.states.weights_to_write(model)
        leases = training.loop.leases
        if adapters := adapters_of(training.strategy.unwrap(model), state):
            with synchronize("save_model"):
                leases.check_recent()
                for adapter in map(self._gathered, adapters):
                    if self._writes_files:
                        subfolders = () if adapter.name == "default" else (adapter.name,)
                        folder = path_in(fspath(save_directory), *subfolders)
                        _write_adapter(adapter, folder, storage_options)
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

    def _gathered(self, adapter: Adapter) -> Adapter:
        """Collective if it is sharded: return an adapter with the tensors that are written."""
        if not any(map(collectives.is_sharded, adapter.tensors.values())):
            return adapter
        tensors = collectives.gather_sharded(adapter.tensors, keep=self._writes_files)
        return adapter._replace(tensors=tensors)

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
        require_neighbor("checkpoint_io")
        refuse_aborted_group("load_state")
        self.training.loop.require_own_weights("load_state")
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


def _checked(callbacks: SaveCallbacks, check: Callable[[], None]) -> SaveCallbacks:
    """Return callbacks that remove no older checkpoints of a folder that another run has."""
    cleanup = callbacks.cleanup
    if cleanup is None:
        return callbacks

    def checked() -> None:
        check()
        cleanup()

    return replace(callbacks, cleanup=checked)


def _labels_of(position: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that tell whose a checkpoint is, from the position of the run."""
    return {
        "run_id": position["run_id"],
        "run_name": position["name"],
        "step": position["global_step"],
        "epoch": position["current_epoch"],
        "epochs_done": position["epochs_done"],
    }


def _write_adapter(
    adapter: Adapter, folder: str, storage_options: Mapping[str, Any] | None
) -> None:
    """Write the two files of an adapter, the configuration last: peft looks for it first."""
    save_tensors(adapter.tensors, path_in(folder, ADAPTER_WEIGHTS), storage_options)
    save_text(adapter.config, path_in(folder, ADAPTER_CONFIG), storage_options)


def _warn_of_late_parts(training: TrainingState) -> None:
    """Warn, at the first save of a run, of objects that were prepared after its start."""
    run = training.loop.run
    if run.prepared_at_start is not None and run.prepared_at_start < training.prepared:
        run.prepared_at_start = training.prepared  # once
        warn(
            f"save_state: models or optimizers were prepared inside of accel.run({run.name!r}), "
            "which looks for a checkpoint as it begins: started again, the run would not find "
            "what to load it into, and end with an error. Call accel.prepare(...) before "
            "`with accel.run(...)`."
        )


def _refuse_pickle(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise ValueError(
            "safe_serialization=False means pickle, which runs code when it is loaded: nothing "
            "here writes it. Leave it out; any safetensors reader opens what is saved."
        )
