"""The whole training state, captured into a tree and written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks._siblings import require_neighbour
from accel_callbacks.checkpoint.async_save import Then, check_when_busy
from accel_callbacks.data.stream import take_own
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.rng import capture_rng
from accel_callbacks.errors import refuse_half_loaded
from accel_callbacks.naming import named_optimizer_state, parameter_names
from accel_callbacks.saved_weights import ExtraFiles, alike_on_all, choose_weights

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from accel_callbacks.data.loader import DataLoaderShard
    from checkpoint_io import CheckpointFolder, Manifest, ProcessGroupLike, SaveJob

__all__ = ["capture", "open_folder", "process_group", "write"]


def _numbered(items: Sequence[Any]) -> dict[str, Any]:
    return {str(index): item for index, item in enumerate(items)}


def capture(accel: Accelerator) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what all processes share, what belongs to this process), as trees of plain values.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.checkpoint.training_state import capture
        >>> shared, local = capture(Accelerator(cpu=True))
        >>> shared["run"]["global_step"], sorted(local["rng"])[:1]
        (0, ['numpy'])
    """
    loop, strategy = accel.loop, accel.strategy
    names = parameter_names(accel.bare_models)
    shared: dict[str, Any] = {
        "models": _numbered([strategy.model_state_dict(model) for model in accel.models]),
        "optimizers": _numbered(
            [named_optimizer_state(o.optimizer, names) for o in accel.optimizers]
        ),
        "schedulers": _numbered([scheduler.state_dict() for scheduler in accel.schedulers]),
        "loaders": _numbered([_position(accel, loader) for loader in accel.loaders]),
        "precision": accel.precision.state_dict(),
        "run": loop.run.state_dict(),
        "callbacks": loop.dispatch.state_dict(),
        "trackers": accel.tracking.state_dict(),
        "registered": accel.registered.state_dict(),
    }
    local: dict[str, Any] = {"rng": capture_rng(accel.device)}
    if streams := take_own(shared["loaders"]):
        local["streams"] = streams
    if loop.window.is_open:
        local["window"] = _open_window(accel)
    return shared, local


def _position(accel: Accelerator, loader: DataLoaderShard) -> dict[str, Any]:
    """A batch that was delivered and not trained on yet is delivered again after a resume."""
    waiting = loader in accel.loop.active and loader.trained and not accel.loop.worked
    return loader.state_dict(again=waiting and len(accel.optimizers) > 0)


def _open_window(accel: Accelerator) -> dict[str, Any]:
    """A save inside of a gradient window keeps the gradients gathered so far."""
    gradients = {
        f"{index}.{name}": parameter.grad
        for index, model in enumerate(accel.bare_models)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    window = accel.loop.window
    return {
        "position": window.position,
        "divisor": window.divisor,
        "normalizer": window.normalizer.state_dict(),
        "gradients": gradients,
    }


def open_folder(root: str, storage_options: Mapping[str, Any] | None = None) -> CheckpointFolder:
    """The folder of checkpoints at ``root``, which need not exist yet."""
    require_neighbour("checkpoint_io")
    import checkpoint_io

    return checkpoint_io.CheckpointFolder(root, storage_options=storage_options)


def write(
    accel: Accelerator,
    target: str | CheckpointFolder,
    *,
    metadata: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
    async_save: bool = False,
    when_busy: str = "wait",
    trainable_only: bool = False,
    then: Then | None = None,
    began: float | None = None,
) -> str:
    """Save the state with all processes; returns its path, or "" if it was skipped.

    Args:
        accel: what to save.
        target: the checkpoint's own path, or a folder, for ``step-<global step>`` as the newest
            in it.
        metadata: JSON values for the manifest.
        storage_options: for the filesystem behind a path; a folder has its own.
        max_shard_size: largest tensor file.
        async_save: return once the state is copied, and write it while training goes on.
        when_busy: ``"wait"`` for a save that is under way, or ``"skip"`` this one.
        trainable_only: without frozen parameters.
        then: what follows once it is durable, or has failed on its way in the background.
        began: since when training stands still for it, by ``time.perf_counter()``; now if ``None``.

    Raises:
        checkpoint_io.CheckpointError: any process failed to write; nothing was committed. Or the
            save before, in the background, had failed.
        RemoteError: a hook or the state of a callback failed on another process; likewise.
    """
    require_neighbour("checkpoint_io")
    check_when_busy(when_busy)
    if accel.loop.half_loaded is not None:
        refuse_half_loaded(accel.loop.half_loaded, "save_state")
    accel.loop.run.save_began = time.perf_counter() if began is None else began
    saves = accel.loop.saves
    if not saves.make_room(when_busy if async_save else "wait"):
        return ""
    step = accel.loop.run.global_step
    url = target if isinstance(target, str) else target.path(step)
    shared, local, labels = _everything(accel, url, trainable_only)
    options: dict[str, Any] = {
        "local_state": local,
        "metadata": {**labels, **(metadata or {})},
        "group": saves.control,
        "max_shard_size": max_shard_size,
        "replicated": alike_on_all(accel),
    }
    if isinstance(target, str):
        job = _plain_job(url, shared, storage_options, options)
    else:
        job = target.prepare_save(step, shared, **options)
    (saves.start if async_save else saves.run_now)(job, then or Then())
    return url


def _everything(
    accel: Accelerator, url: str, trainable_only: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What to save, with what the hooks make of it, and the labels that say what it is."""
    with shared_failure("save_state"):
        shared, local = capture(accel)
        extra = ExtraFiles(url) if accel.pre_hooks.save_some else None
    with shared_failure("save_state"):
        choose_weights(accel, shared, url, trainable_only=trainable_only)
        accel.loop.fire("on_save_checkpoint", shared)
    run = accel.loop.run
    labels = {"run_id": run.run_id, "step": run.global_step, "epoch": run.current_epoch}
    return shared, local, labels if extra is None else {**labels, **extra.labels()}


def _plain_job(
    url: str,
    shared: Mapping[str, Any],
    storage_options: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> SaveJob:
    """A save to a path of its own, one generation after what is there."""
    import checkpoint_io

    def following(previous: Manifest | None) -> int:
        return 1 if previous is None else previous.generation + 1

    return checkpoint_io.prepare_save(
        url, shared, next_generation=following, storage_options=storage_options, **options
    )


def process_group() -> ProcessGroupLike | None:
    """The processes as the checkpoint layer wants them; None for one alone."""
    import checkpoint_io

    return checkpoint_io.TorchGroup() if collectives.world_size() > 1 else None
