"""The open gradient window of a checkpoint, restored on any number of ranks and any sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.selection import Selection
from accel_callbacks.checkpoint.training_state import TrainingState
from accel_callbacks.errors import ResumeError

if TYPE_CHECKING:
    from checkpoint_io import CheckpointReader, TensorView

__all__ = ["OpenWindow", "read_window", "restore_window"]


class OpenWindow(NamedTuple):
    """An open window, as this rank restores it.

    Attributes:
        state: its position, divisor and normalizer, and the row that is being logged.
        gradients: by ``"<model>.<name>"``, each sharded as its parameter is.
    """

    state: dict[str, Any]
    gradients: dict[str, torch.Tensor]


def read_window(
    training: TrainingState,
    reader: CheckpointReader,
    local: Mapping[str, Any] | None,
    selection: Selection,
) -> OpenWindow | None:
    """Read the open window of a checkpoint, None if it has none; not collective.

    Gradients that are sharded hold the mean over all ranks, and each rank reads its part. Those of
    a replica (DDP) are the rank's own until the window ends. Other ranks, or another sharding,
    restore their mean over the ranks of the save, to which it would have led.

    Args:
        training: the parameters to restore the gradients of.
        reader: the checkpoint.
        local: the part of this rank, with its tensors; None if it saved none.
        selection: of the load.

    Raises:
        checkpoint_io.CheckpointError: it is damaged.
    """
    # The ranks enter and leave windows together, so that none has one if this rank has not.
    if not selection.takes("window") or (local is not None and "window" not in local):
        return None
    parameters = {
        f"{index}.{name}": parameter
        for index, model in enumerate(training.bare_models)
        for name, parameter in model.named_parameters()
        if not parameter.is_meta  # of another rank
    }
    saved = reader.manifest.world_size // reader.state.get("copies", 1)
    ranks = training.strategy.data
    same = saved == ranks.world
    window = local.get("window") if same and local is not None else None
    if window is not None and window.get("averaged_over", saved) != ranks.averaged_over:
        window = None  # each rank had seen a part of the tokens of its data rank alone
    names = () if window is None else map(selection.weight, window["gradients"])
    sharded = any(collectives.is_sharded(parameters.get(name)) for name in names)
    if window is not None and not sharded:
        gradients = {
            name: gradient.to(parameters[name].device)
            for saved_name, gradient in window["gradients"].items()
            if (name := selection.weight(saved_name)) in parameters
        }
        state = window
    else:
        parts = _windows_of_all(reader)
        if not parts:
            return None
        gradients = _means(parts, parameters, selection)
        state = _combined(parts, ranks.averaged_over)
        state["logged"] = local["window"]["logged"] if local and "window" in local else None
    if training.strategy.gradients.keeps_gradients_apart:
        raise ResumeError(
            f"{reader.path} was saved inside of a gradient window, and this engine does not take "
            'its gradients: load it with only=lambda key: key != "window", which begins the window '
            "anew, or with another engine."
        )
    shared = reader.state.get("window", {}).get("gradients", {})
    gradients |= _read(reader, shared, parameters, selection)
    before, now = state.get("averaged_over", saved), ranks.averaged_over
    if state["normalizer"]["pending"] and before != now:
        # Losses of a normalizer are sums: it multiplies their mean by the number of ranks.
        for gradient in gradients.values():
            gradient.mul_(before / now)
    return OpenWindow(state, gradients)


def restore_window(training: TrainingState, saved: OpenWindow | None) -> None:
    """Continue a saved window, or begin a new one."""
    window = training.loop.window
    window.close()
    window.normalizer.forget()
    window.dirty = False
    # Those of the window that is left, which an engine may hold beside parameter.grad.
    for optimizer in training.optimizers:
        training.strategy.gradients.drop_gradients(optimizer.optimizer)
    gradients = {} if saved is None else saved.gradients
    for index, model in enumerate(training.bare_models):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients.get(f"{index}.{name}")
    if saved is not None:
        window.position, window.divisor = saved.state["position"], saved.state["divisor"]
        # Without a position, they are of a script that accumulates by itself.
        window.sync, window.touched = window.position == 0, True
        window.normalizer.load_state_dict(saved.state["normalizer"])
    logged = None if saved is None else saved.state.get("logged")
    training.tracking.row.load_state_dict(logged, training.loop.run)


def _windows_of_all(reader: CheckpointReader) -> list[tuple[CheckpointReader, dict[str, Any]]]:
    """Return the windows of all ranks of the save, with views; none if no window was open."""
    import checkpoint_io

    windows = []
    for rank in range(reader.manifest.world_size):
        rank_reader = checkpoint_io.CheckpointReader(reader.source.store, reader.manifest, rank)
        window = (rank_reader.local_state or {}).get("window")
        if window is None:  # the ranks enter and leave windows together
            return []
        windows.append((rank_reader, window))
    return windows


def _means(
    parts: list[tuple[CheckpointReader, dict[str, Any]]],
    parameters: Mapping[str, torch.Tensor],
    selection: Selection,
) -> dict[str, torch.Tensor]:
    """Return the means of the gradients over the ranks of the save; none counts as zero."""
    sums: dict[str, torch.Tensor] = {}
    for reader, window in parts:  # one rank after the other: gradients of two are in memory
        for name, gradient in _read(reader, window["gradients"], parameters, selection).items():
            sums[name] = sums[name].add_(gradient) if name in sums else gradient
    return {name: total.div_(len(parts)) for name, total in sums.items()}


def _read(
    reader: CheckpointReader,
    views: Mapping[str, TensorView],
    parameters: Mapping[str, torch.Tensor],
    selection: Selection,
) -> dict[str, torch.Tensor]:
    """Read gradients of the parameters here; of sharded ones, the part of this rank."""
    gradients: dict[str, torch.Tensor] = {}
    pairs = []
    for name, view in views.items():
        parameter = parameters.get(selection.weight(name))
        if parameter is None or tuple(parameter.shape) != view.shape:
            continue
        gradient = torch.empty_like(parameter, dtype=view.dtype, requires_grad=False)
        gradients[selection.weight(name)] = gradient
        pairs.append((view, gradient))
    if pairs:
        reader.read(pairs, progress=False)
    return gradients


def _combined(
    parts: list[tuple[CheckpointReader, dict[str, Any]]], averaged_over: int
) -> dict[str, Any]:
    """Return the state of a window for each of another number of ranks.

    Args:
        parts: the windows of all ranks of the save.
        averaged_over: number of ranks here that read different data.
    """
    first = dict(parts[0][1])
    world = len(parts)
    total = sum(window["normalizer"]["total"] for _, window in parts)
    # Copies of a data rank have counted the same units.
    counted = total * first.get("averaged_over", world) / world
    first["normalizer"] = {**first["normalizer"], "total": counted / averaged_over}
    return first
