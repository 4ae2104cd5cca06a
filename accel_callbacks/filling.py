"""Tensors of a checkpoint and the memory they go to, so that all are read at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.errors import ResumeError

if TYPE_CHECKING:
    from checkpoint_io import CheckpointReader, TensorView

__all__ = ["Filling", "views_in"]


class Filling:
    """Collects which view of a checkpoint is read into which tensor; nothing is changed before
    :meth:`run`.

    Args:
        reader: the checkpoint.

    Attributes:
        changes: some of the memory is in use already.

    Example:
        >>> import torch
        >>> from accel_callbacks.filling import Filling
        >>> from checkpoint_io import open_checkpoint, save
        >>> _ = save("memory://doc-filling/c", {"weight": torch.ones(2)})
        >>> reader, here = open_checkpoint("memory://doc-filling/c"), torch.zeros(2)
        >>> filling = Filling(reader)
        >>> filling.into("weight", reader["weight"], here)
        >>> filling.run()
        >>> here
        tensor([1., 1.])
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.changes = False
        self._reader = reader
        self._pairs: list[tuple[TensorView, torch.Tensor]] = []
        self._places: dict[tuple[Any, ...], tuple[str, str]] = {}  # memory to key and name
        self._storages: set[int] = set()

    def into(self, name: str, view: TensorView, target: torch.Tensor) -> None:
        """Read a view into a tensor of a model; tied tensors are read once.

        Raises:
            ResumeError: two names are one tensor here and were two in the checkpoint.
        """
        local = _local(target)
        place = (_storage(local), local.storage_offset(), local.shape, local.stride())
        before = self._places.setdefault(place, (view.stored_key, name))
        if local.numel() and before[1] != name:
            if before[0] != view.stored_key:
                raise ResumeError(
                    f"{before[1]!r} and {name!r} are one tensor in the model and two in the "
                    "checkpoint: tie them after loading, or load one of them with only=."
                )
            return
        self._storages.add(place[0])
        self.changes = True
        self._pairs.append((view, target.detach()))

    @staticmethod
    def reads(saved: Any) -> bool:
        """Whether a part of a saved state is a view, which is still to be read."""
        from checkpoint_io import TensorView

        return isinstance(saved, TensorView)

    def replace(
        self,
        saved: Any,
        current: Any = None,
        parameter: torch.Tensor | None = None,
        key: Any = None,
    ) -> Any:
        """A part of a saved state with tensors in place of its views.

        A tensor that is here already and fits is used again, else there is a new one.

        Args:
            saved: the part in the checkpoint.
            current: the same part of the optimizer here, if there is one.
            parameter: what the part belongs to; without one, tensors are on the CPU.
            key: the part's own name.
        """
        if isinstance(saved, Mapping):
            inner = current if isinstance(current, Mapping) else {}
            return {k: self.replace(v, inner.get(k), parameter, k) for k, v in saved.items()}
        if isinstance(saved, (list, tuple)):
            here = current if isinstance(current, (list, tuple)) else ()
            filled = [*here, *[None] * len(saved)]
            return type(saved)(
                self.replace(value, filled[i], parameter, key) for i, value in enumerate(saved)
            )
        return self._leaf(saved, current, parameter, key) if self.reads(saved) else saved

    def _leaf(self, view: TensorView, current: Any, parameter: Any, key: Any) -> Any:
        if view.is_array:
            return self._new(view, None, key).numpy()
        if not self._reusable(current, view):
            return self._new(view, parameter, key)
        self._storages.add(_storage(_local(current)))
        self.changes = True
        self._pairs.append((view, current.detach()))
        return current

    def _new(self, view: TensorView, parameter: torch.Tensor | None, key: Any) -> torch.Tensor:
        """Memory for a state: spread like its parameter where it has its shape."""
        if parameter is None or key == "step":  # torch moves a step to where the optimizer wants it
            target = torch.empty(view.shape, dtype=view.dtype)
        elif view.shape == tuple(parameter.shape):
            target = torch.empty_like(parameter, dtype=view.dtype, requires_grad=False)
        else:
            target = torch.empty(view.shape, dtype=view.dtype, device=parameter.device)
        self._pairs.append((view, target))
        return target

    def _reusable(self, current: Any, view: TensorView) -> bool:
        """Whether a tensor fits, and nothing else is in its memory."""
        if not isinstance(current, torch.Tensor) or current.is_meta:
            return False
        if tuple(current.shape) != view.shape or current.dtype != view.dtype:
            return False
        local = _local(current)
        own = local.untyped_storage().nbytes() == local.nbytes
        return own and _storage(local) not in self._storages

    def run(self, progress: bool | None = None) -> None:
        """Read all of it; every byte is verified before it is written."""
        self._reader.read(self._pairs, progress=progress)


def views_in(tree: Any) -> Iterator[TensorView]:
    """The views in a part of a saved state.

    Example:
        >>> from accel_callbacks.filling import views_in
        >>> list(views_in({"lr": [0.1]}))
        []
    """
    if Filling.reads(tree):
        yield tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from views_in(item)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is on this process."""
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)  # a DTensor, without importing torch's module
    local: torch.Tensor = tensor if to_local is None else to_local()
    return local


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
