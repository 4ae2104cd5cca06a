"""Capture: the training state as a tree; optimizer state by parameter name; what is left out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks._siblings import require_neighbour
from accel_callbacks.checkpoint.async_save import Then, check_when_busy
from accel_callbacks.checkpoint.tensor_file import local_path, writable_folder
from accel_callbacks.data.stream import take_own
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.rng import capture_rng
from accel_callbacks.errors import ResumeError, nearest, refuse_half_loaded

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from accel_callbacks.data.loader import DataLoaderShard
    from checkpoint_io import CheckpointFolder, Manifest, ProcessGroupLike, SaveJob

__all__ = [
    "ExtraFiles",
    "alike_on_all",
    "capture",
    "choose_weights",
    "named_optimizer_state",
    "open_folder",
    "parameter_names",
    "positional_optimizer_state",
    "process_group",
    "write",
]


def parameter_names(models: Sequence[torch.nn.Module]) -> dict[int, str]:
    """``id(parameter) -> "<model index>.<name>"`` for all parameters of the models.

    Example:
        >>> import torch
        >>> from accel_callbacks.checkpoint.training_state import parameter_names
        >>> sorted(parameter_names([torch.nn.Linear(1, 1)]).values())
        ['0.bias', '0.weight']
    """
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{index}.{name}")
    return names


def _ordered_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """Names in the order of torch's positions; a parameter of no model is named by position."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"parameter.{i}") for i, p in enumerate(parameters)]


def named_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with names for positions."""
    ordered = _ordered_names(optimizer, names)
    state = optimizer.state_dict()
    return {
        **state,
        "state": {ordered[i]: value for i, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [ordered[i] for i in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def positional_optimizer_state(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """The inverse of :func:`named_optimizer_state` for this optimizer's own order.

    Raises:
        ResumeError: the optimizer holds other parameters than the saved one.
    """
    ordered = _ordered_names(optimizer, names)
    position = {name: i for i, name in enumerate(ordered)}
    here, first = [], 0
    for group in optimizer.param_groups:
        here.append(ordered[first : first + len(group["params"])])
        first += len(group["params"])
    _check_groups([group["params"] for group in state["param_groups"]], here)
    return {
        **state,
        "state": {position[name]: value for name, value in state["state"].items()},
        # torch pairs parameters by their place in the group, so they go in today's order.
        "param_groups": [
            {**group, "params": [position[name] for name in own]}
            for group, own in zip(state["param_groups"], here, strict=True)
        ],
    }


def _check_groups(saved: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> None:
    if len(saved) != len(here):
        raise ResumeError(
            f"the optimizer has {len(here)} parameter groups and the checkpoint's {len(saved)}: "
            "add the groups before loading."
        )
    for number, (before, now) in enumerate(zip(saved, here, strict=True)):
        for name in sorted(set(before) ^ set(now)):
            place, other = ("checkpoint", now) if name in before else ("optimizer", before)
            raise ResumeError(
                f"{name!r} is only in the {place}'s parameter group {number}.{nearest(name, other)}"
            )


def choose_weights(
    accel: Accelerator, shared: dict[str, Any], url: str, *, trainable_only: bool = False
) -> None:
    """Leave weights out of a captured state, and note there which ones.

    What is left out: frozen parameters, if ``trainable_only``; the models that a save hook saves
    itself, and what it drops of others.

    Args:
        accel: whose state it is.
        shared: what `capture` returned; changed in place.
        url: where the checkpoint will be.
        trainable_only: without frozen parameters.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.checkpoint.training_state import capture
        >>> from accel_callbacks.checkpoint.training_state import choose_weights
        >>> accel, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
        >>> _ = model.bias.requires_grad_(False)
        >>> model = accel.prepare(model)
        >>> shared, _ = capture(accel)
        >>> choose_weights(accel, shared, "memory://doc-weights", trainable_only=True)
        >>> list(shared["models"]["0"]), shared["dropped_weights"]
        (['weight'], {'0': ['bias']})
    """
    full: list[Any] = list(shared["models"].values())
    chosen = full
    if trainable_only:
        chosen = [
            _without(weights, _frozen(model))
            for weights, model in zip(full, accel.bare_models, strict=True)
        ]
    names = [set(weights) for weights in full]  # a hook may edit them in place
    if accel.pre_hooks.save_some:
        with writable_folder(url) as folder:
            chosen = accel.pre_hooks.save(accel.models, chosen, folder)
    elif not trainable_only:
        return
    shared["models"] = {str(index): weights for index, weights in enumerate(chosen)}
    shared["dropped_weights"] = {
        str(index): sorted(before - weights.keys())
        for index, (before, weights) in enumerate(zip(names, chosen, strict=True))
        if weights is not None and before - weights.keys()
    }


def _without(weights: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: weight for name, weight in weights.items() if name not in names}


def _frozen(model: Any) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def alike_on_all(accel: Accelerator) -> Callable[[str], bool] | bool:
    """Collective: which keys of a checkpoint hold tensors that any process may write.

    These are the parameters that the strategy keeps alike, and the states of their optimizers.
    Where hooks may have put other tensors in their place, it is none: the main process's count.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.checkpoint.training_state import alike_on_all
        >>> alike_on_all(Accelerator(cpu=True))("models/0/weight")
        False
    """
    edited = accel.pre_hooks.save_some or accel.loop.dispatch.edits_saves
    if collectives.any_process(edited):
        return False
    names = {
        str(index): accel.strategy.alike_on_all(model) for index, model in enumerate(accel.models)
    }

    def alike(key: str) -> bool:
        section, *path = (part.replace("~1", "/").replace("~0", "~") for part in key.split("/"))
        if section == "models" and len(path) == 2:
            return path[1] in names.get(path[0], ())
        if section == "optimizers" and len(path) == 4 and path[1] == "state":
            model, _, name = path[2].partition(".")
            return name in names.get(model, ())
        return False

    return alike


class ExtraFiles:
    """The files that save hooks write beside a checkpoint, to be removed with it.

    Only what is new or changed since this object was made counts, and only on this machine's disks.

    Args:
        url: where the checkpoint will be.

    Example:
        >>> import pathlib, tempfile
        >>> from accel_callbacks.checkpoint.training_state import ExtraFiles
        >>> folder = tempfile.mkdtemp()
        >>> extra = ExtraFiles(folder)
        >>> _ = pathlib.Path(folder, "adapter.json").write_text("{}")
        >>> extra.labels()
        {'extra_files': ['adapter.json']}
    """

    def __init__(self, url: str) -> None:
        self._path = local_path(url)
        self._before = self._files()

    def labels(self) -> dict[str, Any]:
        """Metadata that name the files, if there are any."""
        files = self._files()
        found = sorted(name for name in files if files[name] != self._before.get(name))
        return {"extra_files": found} if found else {}

    def _files(self) -> dict[str, tuple[int, ...]]:
        if self._path is None or not os.path.isdir(self._path):
            return {}
        with os.scandir(self._path) as entries:
            stats = {e.name: e.stat() for e in entries if e.is_file(follow_symlinks=False)}
        return {name: (s.st_mtime_ns, s.st_size, s.st_ino) for name, s in stats.items()}


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
