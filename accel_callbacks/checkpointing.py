"""The whole training state: captured into a tree, and put back in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_callbacks import collectives
from accel_callbacks._neighbours import require_neighbour
from accel_callbacks.data.own_state import take_own, with_own
from accel_callbacks.failures import shared_failure
from accel_callbacks.fitting import check_counts, check_weights, own_part, weights_for
from accel_callbacks.local_path import writable_folder
from accel_callbacks.naming import (
    named_optimizer_state,
    parameter_names,
    positional_optimizer_state,
)
from accel_callbacks.rng import capture_rng, restore_rng

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from accel_callbacks.data.loader import DataLoaderShard
    from checkpoint_io import Checkpoint, CheckpointFolder, ProcessGroupLike

__all__ = ["capture", "open_folder", "read", "read_latest", "restore", "write"]


def _numbered(items: Sequence[Any]) -> dict[str, Any]:
    return {str(index): item for index, item in enumerate(items)}


def capture(accel: Accelerator) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what all processes share, what belongs to this process), as trees of plain values.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.checkpointing import capture
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
) -> str:
    """Save the state with all processes; returns its path when it is durable.

    Args:
        accel: what to save.
        target: the checkpoint's own path, or a folder, for ``step-<global step>`` as the newest
            in it.
        metadata: JSON values for the manifest.
        storage_options: for the filesystem behind a path; a folder has its own.
        max_shard_size: largest tensor file.

    Raises:
        checkpoint_io.CheckpointError: any process failed to write; nothing was committed.
        RemoteError: a hook or the state of a callback failed on another process; likewise.
    """
    require_neighbour("checkpoint_io")
    import checkpoint_io

    run = accel.loop.run
    url = target if isinstance(target, str) else target.path(run.global_step)
    with shared_failure("save_state"):
        shared, local = capture(accel)
        _call_save_hooks(accel, shared, url)
        accel.loop.fire("on_save_checkpoint", shared)
    labels = {"run_id": run.run_id, "step": run.global_step, "epoch": run.current_epoch}
    options: dict[str, Any] = {
        "local_state": local,
        "metadata": {**labels, **(metadata or {})},
        "group": _group(),
        "max_shard_size": max_shard_size,
    }
    if isinstance(target, str):
        checkpoint_io.save(url, shared, storage_options=storage_options, **options)
    else:
        target.save(run.global_step, shared, **options)
    accel.loop.fire("on_checkpoint_saved", url)
    return url


def _call_save_hooks(accel: Accelerator, shared: dict[str, Any], url: str) -> None:
    """Leave out the models that a hook saves itself, and note what it dropped of others."""
    if not accel.pre_hooks.save_some:
        return
    full = list(shared["models"].values())
    names = [set(weights) for weights in full]
    with writable_folder(url) as folder:
        chosen = accel.pre_hooks.save(accel.models, full, folder)
    shared["models"] = _numbered(chosen)
    shared["dropped_weights"] = {
        str(index): sorted(before - weights.keys())
        for index, (before, weights) in enumerate(zip(names, chosen, strict=True))
        if weights is not None and before - weights.keys()
    }


def read(url: str, storage_options: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read and verify a checkpoint on every process; an error on one is an error on all."""
    require_neighbour("checkpoint_io")
    import checkpoint_io

    with shared_failure(f"reading {url}"):
        return checkpoint_io.load(url, rank=collectives.rank(), storage_options=storage_options)


def read_latest(root: str, storage_options: Mapping[str, Any] | None = None) -> Checkpoint | None:
    """The newest checkpoint under ``root`` that every process can read whole, if there is one.

    Raises:
        checkpoint_io.CorruptCheckpointError: there are checkpoints, and all are damaged.
    """
    folder = open_folder(root, storage_options)
    import checkpoint_io

    try:
        return folder.load_latest(group=_group())
    except checkpoint_io.CheckpointNotFoundError:
        return None


def _group() -> ProcessGroupLike | None:
    import checkpoint_io

    return checkpoint_io.TorchGroup() if collectives.world_size() > 1 else None


def restore(accel: Accelerator, checkpoint: Checkpoint, *, strict: bool = False) -> None:
    """Put a verified checkpoint into the prepared objects; checked before anything changes.

    Args:
        accel: the Accelerator with the objects prepared.
        checkpoint: from :func:`read`.
        strict: raise where the resume cannot be exact, instead of warning.

    Raises:
        ResumeError: it does not fit the prepared objects (nothing was changed), or is not exact
            and ``strict`` was asked for.
        RemoteError: another process failed to restore it.
    """
    with accel.registered.all_or_nothing(), shared_failure("load_state"):
        ready = _make_ready(accel, checkpoint, strict)
    with shared_failure("load_state"):
        _restore(accel, checkpoint, ready)


class _Ready(NamedTuple):
    """What a restore found out before it changes anything."""

    models: list[int]  # those that no hook has loaded
    optimizers: list[dict[str, Any]]
    local: dict[str, Any] | None


def _make_ready(accel: Accelerator, checkpoint: Checkpoint, strict: bool) -> _Ready:
    """Check all, and let those load who may refuse: the hooks, and the registered objects."""
    state: dict[str, Any] = checkpoint.state
    check_counts(accel, state)
    models = list(range(len(accel.models)))
    if not accel.pre_hooks.load_some:
        check_weights(accel, state, models)
    local = own_part(accel, checkpoint, strict)
    _optimizer_states(accel, state)  # raises before anything changes; a hook may edit the state
    if accel.pre_hooks.load_some:
        left = {id(model) for model in accel.pre_hooks.load(accel.models, checkpoint.path)}
        models = [index for index in models if id(accel.models[index]) in left]
        check_weights(accel, state, models)
    accel.loop.fire("on_load_checkpoint", state)
    optimizers = _optimizer_states(accel, state)
    saved = state.get("registered", {"objects": {}, "unnamed": []})
    accel.registered.load_state_dict(saved, strict=strict)
    return _Ready(models, optimizers, local)


def _restore(accel: Accelerator, checkpoint: Checkpoint, ready: _Ready) -> None:
    state, local = checkpoint.state, ready.local
    for index in ready.models:
        weights = weights_for(accel.bare_models[index].state_dict(), state, index)
        accel.strategy.load_model_state_dict(accel.models[index], weights)
    for optimizer, saved in zip(accel.optimizers, ready.optimizers, strict=True):
        optimizer.load_state_dict(saved)
    for index, scheduler in enumerate(accel.schedulers):
        scheduler.load_state_dict(_same_types(scheduler, state["schedulers"][str(index)]))
    accel.precision.load_state_dict(state["precision"])
    run = accel.loop.run
    run.load_state_dict(state["run"])
    run.resumed_from = checkpoint.path
    for index, loader in enumerate(accel.loaders):
        loader.load_state_dict(with_own(state["loaders"], local, str(index)))
        if not run.epoch_open:
            loader.end_pass()
        elif loader.done:
            loader.skip_next_pass()  # the open epoch has read it to its end
    accel.loop.dispatch.load_state_dict(state["callbacks"])
    accel.tracking.load_state_dict(state["trackers"])
    _restore_window(accel, None if local is None else local.get("window"))
    if local is not None:
        restore_rng(local["rng"], accel.device)


def _optimizer_states(accel: Accelerator, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = parameter_names(accel.bare_models)
    return [
        positional_optimizer_state(state["optimizers"][str(i)], optimizer.optimizer, names)
        for i, optimizer in enumerate(accel.optimizers)
    ]


def _restore_window(accel: Accelerator, saved: Mapping[str, Any] | None) -> None:
    window = accel.loop.window
    window.close()
    window.normalizer.forget()
    window.dirty = False
    gradients = {} if saved is None else saved["gradients"]
    for index, model in enumerate(accel.bare_models):
        for name, parameter in model.named_parameters():
            gradient = gradients.get(f"{index}.{name}")
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
    if saved is not None:
        window.position, window.divisor = saved["position"], saved["divisor"]
        window.sync, window.touched = False, True
        window.normalizer.load_state_dict(saved["normalizer"])


def _same_types(scheduler: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Counters (MultiStepLR's milestones) travel as plain dicts and come back as counters."""
    inner = getattr(scheduler, "_schedulers", [])
    restored: dict[str, Any] = {}
    for key, value in state.items():
        if key == "_schedulers":
            value = [_same_types(one, own) for one, own in zip(inner, value, strict=True)]
        elif isinstance(getattr(scheduler, key, None), Counter):
            value = Counter(value)
        restored[key] = value
    return restored
