"""WindowPart: the open gradient window, restored on any number of ranks and any sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_callbacks import collectives
from accel_callbacks.checkpoint.part import CheckpointPart, Load, Sections
from accel_callbacks.checkpoint.selection import Selection
from accel_callbacks.checkpoint.training_state import TrainingState
from accel_callbacks.errors import ResumeError
from accel_callbacks.gradients import parameters_of

if TYPE_CHECKING:
    from checkpoint_io import CheckpointReader, TensorView

__all__ = ["WindowPart"]


class _Window(NamedTuple):
    """An open window, as this rank restores it.

    Attributes:
        state: its position, divisor and normalizer, and the row that is being logged.
        gradients: by ``"<model>.<name>"``, each sharded as its parameter is.
    """

    state: dict[str, Any]
    gradients: dict[str, torch.Tensor]


class WindowPart(CheckpointPart):
    """The open gradient window, or gradients that wait for a step outside of one.

    Args:
        training: the window, and the parameters that have the gradients.
    """

    name = "window"

    def __init__(self, training: TrainingState) -> None:
        self._training = training

    def capture(self) -> Sections:
        """Return the window with its gradients, none where nothing waits.

        Raises:
            RuntimeError: the engine keeps the gradients.
        """
        training, window = self._training, self._training.loop.window
        if window.is_open and training.strategy.gradients.keeps_gradients_apart:
            raise RuntimeError(
                "save_state inside of a gradient window: the engine keeps its gradients, and they "
                "would be lost. Save after optimizer.step() has ended the window."
            )
        gradients = self._gradients_to_save()
        # Averaged over the ranks already, so that any number of ranks can go on with them.
        sharded = {name: g for name, g in gradients.items() if collectives.is_sharded(g)}
        if not window.is_open and not gradients:
            return {}, {}
        state = {
            "position": window.position,
            "divisor": window.divisor,
            "normalizer": window.normalizer.state_dict(),
            "averaged_over": training.strategy.data.averaged_over,
            "gradients": {name: g for name, g in gradients.items() if name not in sharded},
            "logged": training.tracking.row.state_dict(),
        }
        return {self.name: {"gradients": sharded}} if sharded else {}, {self.name: state}

    def _gradients_to_save(self) -> dict[str, torch.Tensor]:
        """Return the gradients that wait for a step.

        These are all in an open window. Outside of one, a script may accumulate by itself: those of
        optimizers that have not stepped since the batch began.
        """
        training, loop = self._training, self._training.loop
        waiting = None  # all
        if not loop.window.is_open:
            left = [o for o in training.optimizers if o not in loop.stepped_in_batch()]
            if not left or training.strategy.gradients.keeps_gradients_apart:
                return {}
            waiting = {id(p) for optimizer in left for p in parameters_of([optimizer])}
        gradients: dict[str, torch.Tensor] = {}
        for index, model in enumerate(training.models):
            found = training.strategy.states.open_gradients(model)
            for name, parameter in training.strategy.unwrap(model).named_parameters():
                # One without memory here is of another rank, which steps together with this one.
                mine = waiting is None or id(parameter) in waiting or parameter.is_meta
                if name in found and mine:
                    gradients[f"{index}.{name}"] = found[name]
        return gradients

    def check(self, load: Load) -> None:
        """Refuse nothing: most checkpoints hold no open window."""

    def plan(self, load: Load) -> None:
        """Read the shared gradients by themselves: a rank reads its part."""
        load.in_place[self.name] = load.first.pop(self.name, None)

    def read(self, load: Load) -> None:
        """Read the gradients into new memory, as the memory of now is in use until all fits."""
        load.plans[self.name] = self._read(load)

    def _read(self, load: Load) -> _Window | None:
        """Read the open window of a checkpoint, None if it has none; not collective.

        Gradients that are sharded hold the mean over all ranks, and each rank reads its part. Those
        of a replica (DDP) are the rank's own until the window ends. Other ranks, or another
        sharding, restore their mean over the ranks of the save, to which it would have led.

        Raises:
            checkpoint_io.CheckpointError: it is damaged.
        """
        training, reader, local = self._training, load.reader, load.local
        selection = load.options.selection
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
            state = _combine(parts, ranks.averaged_over)
            state["logged"] = local["window"]["logged"] if local and "window" in local else None
        if training.strategy.gradients.keeps_gradients_apart:
            raise ResumeError(
                f"{reader.path} was saved inside of a gradient window, and this engine does not "
                'take its gradients: load it with only=lambda key: key != "window", which begins '
                "the window anew, or with another engine."
            )
        shared = reader.state.get("window", {}).get("gradients", {})
        gradients |= _read(reader, shared, parameters, selection)
        before, now = state.get("averaged_over", saved), ranks.averaged_over
        if state["normalizer"]["pending"] and before != now:
            # Losses of a normalizer are sums: it multiplies their mean by the number of ranks.
            for gradient in gradients.values():
                gradient.mul_(before / now)
        return _Window(state, gradients)

    def restore(self, load: Load) -> None:
        """Continue the saved window, or begin a new one."""
        training, saved = self._training, load.plans[self.name]
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


def _combine(
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
