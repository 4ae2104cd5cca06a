"""InPlaceReads: what of a checkpoint is read into the memory of prepared objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.errors import ResumeError
from accel_callbacks.gradients import local_part

if TYPE_CHECKING:
    from accel_callbacks.strategy.base import Strategy
    from checkpoint_io import CheckpointReader, TensorView

__all__ = ["InPlaceReads", "place_optimizer_state", "place_weights"]

NewPart = Callable[[tuple[int, ...], torch.dtype], "torch.Tensor | None"]


class InPlaceReads:
    """Collects pairs of a checkpoint's view and the tensor that it is read into, and reads them.

    Nothing is changed before :meth:`run`.

    Args:
        reader: the checkpoint.

    Attributes:
        changes: True if some of the memory is that of prepared objects.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.changes = False
        self._reader = reader
        self._pairs: list[tuple[TensorView, torch.Tensor]] = []
        self._targets: dict[tuple[Any, ...], tuple[str, str]] = {}  # memory to key and name
        self._storages: set[int] = set()

    def into(self, name: str, view: TensorView, target: torch.Tensor) -> None:
        """Add a view to be read into a tensor of a model; tied tensors are read once.

        Raises:
            ResumeError: two names are one tensor here, and two in the checkpoint.
        """
        local = local_part(target)
        memory = (_storage(local), local.storage_offset(), local.shape, local.stride())
        stored_key, first = self._targets.setdefault(memory, (view.stored_key, name))
        if local.numel() and first != name:
            if stored_key != view.stored_key:
                raise ResumeError(
                    f"{first!r} and {name!r} are one tensor in the model and two in the "
                    "checkpoint: tie them after loading, or load one of them with only=."
                )
            return
        self._storages.add(memory[0])
        self.changes = True
        self._pairs.append((view, target.detach()))

    def into_new(self, pairs: Iterable[tuple[TensorView, torch.Tensor]]) -> None:
        """Add views to be read into tensors that nothing else uses yet."""
        self._pairs.extend(pairs)

    @staticmethod
    def is_view(saved: Any) -> bool:
        """Return whether a part of a saved state is a view that is still to be read."""
        from checkpoint_io import TensorView

        return isinstance(saved, TensorView)

    def replace(
        self,
        saved: Any,
        current: Any = None,
        parameter: torch.Tensor | None = None,
        key: Any = None,
        part: NewPart | None = None,
    ) -> Any:
        """Return a part of a saved state with tensors in place of its views.

        A current tensor that fits is used again; else a new one is made.

        Args:
            saved: the part in the checkpoint.
            current: the same part of the current state, if there is one.
            parameter: the parameter that the part belongs to; without one, tensors are on the CPU.
            key: the name of the part.
            part: makes tensors of which a rank reads its part, by shape and dtype.
        """
        if isinstance(saved, Mapping):
            inner = current if isinstance(current, Mapping) else {}
            return {k: self.replace(v, inner.get(k), parameter, k, part) for k, v in saved.items()}
        if isinstance(saved, (list, tuple, deque)):
            items = current if isinstance(current, (list, tuple, deque)) else ()
            filled = [*items, *[None] * len(saved)]
            values = (
                self.replace(value, filled[i], parameter, key, part)
                for i, value in enumerate(saved)
            )
            return deque(values, saved.maxlen) if isinstance(saved, deque) else type(saved)(values)
        if not self.is_view(saved):
            return saved
        return self._leaf(saved, current, parameter, key, part)

    def _leaf(
        self, view: TensorView, current: Any, parameter: Any, key: Any, part: NewPart | None
    ) -> Any:
        if view.is_array:
            return self._new(view, None, key).numpy()
        sharded = None if part is None else part(view.shape, view.dtype)
        if sharded is not None:
            self._pairs.append((view, sharded))
            return sharded
        if not self._reusable(current, view):
            return self._new(view, parameter, key)
        self._storages.add(_storage(local_part(current)))
        self.changes = True
        self._pairs.append((view, current.detach()))
        return current

    def _new(self, view: TensorView, parameter: torch.Tensor | None, key: Any) -> torch.Tensor:
        """Make a tensor for a state, sharded like its parameter if it has the same shape."""
        # torch moves the step count to where the optimizer wants it.
        if parameter is None or key == "step":
            target = torch.empty(view.shape, dtype=view.dtype, device="cpu")
        elif view.shape == tuple(parameter.shape):
            target = torch.empty_like(parameter, dtype=view.dtype, requires_grad=False)
        else:
            target = torch.empty(view.shape, dtype=view.dtype, device=parameter.device)
        self._pairs.append((view, target))
        return target

    def _reusable(self, current: Any, view: TensorView) -> bool:
        """Return whether a tensor fits, and shares its memory with no other."""
        if not isinstance(current, torch.Tensor) or current.is_meta:
            return False
        if tuple(current.shape) != view.shape or current.dtype != view.dtype:
            return False
        local = local_part(current)
        unshared = local.untyped_storage().nbytes() == local.nbytes
        return unshared and _storage(local) not in self._storages

    def run(self, progress: bool | None = None) -> None:
        """Read all views; every byte is verified before it is written."""
        self._reader.read(self._pairs, progress=progress)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def place_weights(
    strategy: Strategy,
    models: Sequence[torch.nn.Module],
    weights: dict[int, dict[str, Any]],
    reads: InPlaceReads,
    converted: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> dict[int, dict[str, Any]]:
    """Add weights to be read in place; return those that their model loads itself.

    Args:
        strategy: knows what a rank reads, and how.
        models: the prepared models.
        weights: saved weights by the index of their model, which fit.
        reads: gets the views and their targets.
        converted: gets targets of another dtype, each with the tensor that is read for it.
    """
    loaded_by_model: dict[int, dict[str, Any]] = {}
    for index, saved in weights.items():
        model = models[index]
        plain = strategy.states.loads_in_place(model)
        if plain and all(map(reads.is_view, saved.values())):
            targets = strategy.states.local_state_dict(model)
            for name, view in saved.items():
                target = targets[name]
                if converted is None or target.dtype == view.dtype:
                    reads.into(name, view, target)
                else:
                    converted.append((target, reads.replace(view, parameter=target)))
        else:
            part = partial(strategy.states.read_target, model)
            loaded_by_model[index] = reads.replace(saved, part=part)
    return loaded_by_model


def place_optimizer_state(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    reads: InPlaceReads,
    strategy: Strategy,
) -> dict[str, Any]:
    """Return a saved state by position with tensors to be read in place of its views.

    Args:
        optimizer: as the user made it; tensors of its state that fit are used again.
        saved: from ``StateAccess.fit_optimizer_state``.
        reads: gets the tensors.
        strategy: knows which of them a rank reads in part.
    """
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    part = partial(strategy.states.read_target, optimizer)
    states = {
        place: reads.replace(
            state,
            optimizer.state.get(parameters.get(place, place)),
            parameters.get(place),
            part=part,
        )
        for place, state in saved["state"].items()
    }
    # The groups apart: a learning rate may be a tensor, and belongs to no parameter.
    return {**reads.replace({**saved, "state": {}}), "state": states}
