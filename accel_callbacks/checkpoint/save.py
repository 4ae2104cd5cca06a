"""The save of a training state: who may refuse it, what is captured, and how it is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks.checkpoint.async_save import SaveCallbacks, check_when_busy
from accel_callbacks.checkpoint.folder_leases import Folder
from accel_callbacks.checkpoint.project import path_in
from accel_callbacks.checkpoint.tensor_file import save_tensors, save_text, writable_folder
from accel_callbacks.checkpoint.trained_parameters import require_prepared_steps, require_saved
from accel_callbacks.checkpoint.training_state import ExtraFiles, TrainingState
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.loop.loop import Loop
from accel_callbacks.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, adapters_of
from checkpoint_io.local_files import split_path
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from checkpoint_io import CheckpointFolder, SaveJob

__all__ = ["SaveOptions", "gather_adapter", "return_leases", "save_state", "write_adapter"]


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save.

    Attributes:
        name: of the checkpoint in a folder, instead of ``step-<global step>``.
        generation: orders it among the checkpoints of a folder; the newest if ``None``.
        metadata: JSON values for the manifest.
        storage_options: for the filesystem behind a path; a folder has its own for all but the
            files of an adapter.
        max_shard_size: largest tensor file.
        async_save: return once the state is copied, and write it while training goes on.
        when_busy: ``"wait"`` for a pending save, or ``"skip"`` this one.
        trainable_only: leave frozen parameters out.
        spread: the target is a path on each machine, which gets the files of its ranks alone.
        callbacks: called once it is durable, or has failed in the background.
        began: when training stopped for it, by ``time.perf_counter()``; now if ``None``.

    Raises:
        ValueError: an unknown ``when_busy``.
    """

    name: str | None = None
    generation: int | None = None
    metadata: Mapping[str, Any] | None = None
    storage_options: Mapping[str, Any] | None = None
    max_shard_size: int | str = "5GB"
    async_save: bool = False
    when_busy: str = "wait"
    trainable_only: bool = False
    spread: bool = False
    callbacks: SaveCallbacks | None = None
    began: float | None = None

    def __post_init__(self) -> None:
        check_when_busy(self.when_busy)


def save_state(
    training: TrainingState, target: str | CheckpointFolder, options: SaveOptions
) -> str:
    """Collective: save the state of all ranks; return its path, ``""`` if nothing was written.

    Args:
        training: the state.
        target: the checkpoint's own path, or a folder, for the newest checkpoint in it.
        options: how it is saved.
    """
    loop = training.loop
    if not _may_save(loop):
        return _rehearse(training)
    with _pause(loop, options.began):
        loop.run.votes.wait()  # with the save, nothing else is under way between the ranks
        # Before anything is captured: it raises the error of the save before, on all ranks.
        if not loop.saves.make_room(options.when_busy if options.async_save else "wait"):
            return ""
        url = _url(target, options.name, loop.run.global_step)
        shared, local, metadata = _capture(training, target, url, options)
        job = _prepare(training, target, shared, local, metadata, options)
        write = loop.saves.start if options.async_save else loop.saves.run_now
        write(job, _guard_cleanup(options.callbacks or SaveCallbacks(), loop.leases.check))
    return url


def _may_save(loop: Loop) -> bool:
    """Return whether a save writes anything; whoever refuses it raises.

    Every observer is asked, also after one that lets nothing be written.
    """
    answers = [observer.may_save() for observer in loop.observers]
    if not all(answers):
        return False
    loop.step.require_loaded("save_state")
    loop.step.require_own_weights("save_state")
    return True


def _rehearse(training: TrainingState) -> str:
    """Do to the run what a save does, and write nothing.

    A callback may change as its state is saved, a hook may draw, and a stream may draw ahead.
    """
    training.loop.run.votes.wait()
    _complete_gradients(training)
    with shared_failure("save_state"):
        shared, _ = training.capture()
        training.loop.fire("on_save_checkpoint", shared)
    return ""


@contextmanager
def _pause(loop: Loop, began: float | None) -> Iterator[None]:
    """Count the time for which a save stops training, and end the loans of leases after it."""
    start = loop.run.save_began = time.perf_counter() if began is None else began
    try:
        yield
    finally:
        loop.run.save_s += time.perf_counter() - start
        return_leases(loop)


def return_leases(loop: Loop) -> None:
    """Release the leases that a save outside of a training took, once it has ended."""
    if not loop.flags.fit_started and not loop.saves.pending:
        loop.leases.return_lent()


def _complete_gradients(training: TrainingState) -> None:
    """Put into ``parameter.grad`` what FSDP holds back inside of a window."""
    if training.loop.window.is_open:
        training.strategy.gradients.reduce_gradients()


def _url(target: str | CheckpointFolder, name: str | None, step: int) -> str:
    if isinstance(target, str):
        return target
    return target.path(step) if name is None else path_in(target.url, name)


def _capture(
    training: TrainingState, target: str | CheckpointFolder, url: str, options: SaveOptions
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the state as the hooks leave it, shared and of this rank, and its metadata."""
    loop = training.loop
    _complete_gradients(training)
    with shared_failure("save_state"):
        require_saved(training, "save_state")
        require_prepared_steps(training)
        _warn_of_late_parts(training)
        loop.leases.lend(_folders(training, target, options.storage_options), loop.run)
        shared, local = training.capture()
        labels = _labels(shared["run"])  # before the hooks, which may change the state
        before_hooks, _ = training.random_state()
        extra = ExtraFiles(url) if training.pre_hooks.save_some else None
    # A block of its own: hooks and fingerprints may be collective, and a rank that has failed
    # above would not come to them.
    with shared_failure("save_state"):
        training.choose_weights(shared, url, trainable_only=options.trainable_only)
        loop.fire("on_save_checkpoint", shared)
        training.capture_draws_of_hooks(before_hooks, shared, local)
        files = set(_save_adapter(training, shared, url, options))
    if extra is not None:
        labels |= extra.labels()
    files.update(labels.get("extra_files", []))
    labels |= {"extra_files": sorted(files)} if files else {}
    return shared, local, {**labels, **(options.metadata or {})}


def _prepare(
    training: TrainingState,
    target: str | CheckpointFolder,
    shared: dict[str, Any],
    local: dict[str, Any],
    metadata: dict[str, Any],
    options: SaveOptions,
) -> SaveJob:
    """Collective: plan the files of a captured state; they are written by the job."""
    import checkpoint_io

    loop = training.loop
    common: dict[str, Any] = {
        "local_state": local,
        "metadata": metadata,
        "group": loop.saves.control,
        "max_shard_size": options.max_shard_size,
        "replicated": training.replicated_keys(),
        "before_write": loop.leases.check,
    }
    if isinstance(target, str):
        return checkpoint_io.prepare_save(
            target,
            shared,
            next_generation=options.generation,
            storage_options=options.storage_options,
            spread=options.spread,
            **common,
        )
    return target.prepare_save(
        loop.run.global_step, shared, name=options.name, generation=options.generation, **common
    )


def _guard_cleanup(callbacks: SaveCallbacks, check: Callable[[], None]) -> SaveCallbacks:
    """Refuse to remove older checkpoints when another run has taken the folder over."""
    cleanup = callbacks.cleanup
    if cleanup is None:
        return callbacks

    def guarded() -> None:
        check()
        cleanup()

    return replace(callbacks, cleanup=guarded)


def _folders(
    training: TrainingState,
    target: str | CheckpointFolder,
    storage_options: Mapping[str, Any] | None,
) -> list[Folder]:
    """Return the folder whose lease a save needs, if any.

    A path needs that of the folder it is in, but outside of the project none: what lies there may
    be of many runs.
    """
    if not isinstance(target, str):
        return [(target.url, storage_options)]
    if not training.project.contains(target):
        return []
    return [(split_path(target)[0], storage_options)]


def _labels(position: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that tell whose a checkpoint is, from the position of the run."""
    return {
        "run_id": position["run_id"],
        "run_name": position["name"],
        "step": position["global_step"],
        "epoch": position["current_epoch"],
        "epochs_done": position["epochs_done"],
    }


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


# --- adapters ---------------------------------------------------------------------------------


def _save_adapter(
    training: TrainingState, shared: Mapping[str, Any], url: str, options: SaveOptions
) -> list[str]:
    """Write the adapter of a PEFT model beside the checkpoint on rank 0; return the files.

    As peft has one adapter in a folder, none are written where there are several.
    """
    if not options.trainable_only:
        return []
    states = shared["models"].values()
    adapters = [
        adapter
        for model, state in zip(training.bare_models, states, strict=False)
        for adapter in (() if state is None else adapters_of(model, state))
    ]
    if len(adapters) != 1:
        return []
    writes = training.strategy.topology.rank == 0
    adapter = gather_adapter(adapters[0], keep=writes)
    if writes:
        with writable_folder(url) as folder:
            write_adapter(adapter, folder, options.storage_options)
    return [ADAPTER_CONFIG, ADAPTER_WEIGHTS]


def gather_adapter(adapter: Adapter, *, keep: bool) -> Adapter:
    """Collective if it is sharded: return an adapter whose tensors are whole where it is kept."""
    if not any(map(collectives.is_sharded, adapter.tensors.values())):
        return adapter
    tensors = collectives.gather_sharded(adapter.tensors, keep=keep)
    return adapter._replace(tensors=tensors)


def write_adapter(adapter: Adapter, folder: str, storage_options: Mapping[str, Any] | None) -> None:
    """Write the two files of an adapter, the configuration last: peft looks for it first."""
    save_tensors(adapter.tensors, path_in(folder, ADAPTER_WEIGHTS), storage_options)
    save_text(adapter.config, path_in(folder, ADAPTER_CONFIG), storage_options)
