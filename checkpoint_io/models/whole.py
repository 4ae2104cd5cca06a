"""Whole tensors out of DTensors, on the rank that writes them; the other ranks only take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checkpoint_io.errors import CheckpointError
from checkpoint_io.group import ProcessGroupLike
from checkpoint_io.sharding.dtensor import in_mesh, is_dtensor


class Gathering:
    """Gathers DTensors one after the other, in the same order on every rank.

    Args:
        tensors: names to tensors on this rank.
        order: the names of the DTensors to gather; rank 0's order counts.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], order: Sequence[str]) -> None:
        self._tensors = tensors
        self._left = [name for name in order if is_dtensor(tensors[name])]
        self._broken = False

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor, gathered if it is spread; memory for one at a time."""
        tensor: Any = self._tensors[name]
        if not is_dtensor(tensor):
            return self._tensors[name]
        if self._left.pop(0) != name:
            raise AssertionError(f"{name} is not the next tensor to be gathered")
        try:
            full: torch.Tensor = tensor.detach().full_tensor()
        except BaseException:
            self._broken = True
            raise
        return full

    def finish(self) -> None:
        """Take part in what others may still wait for, also after a failure of this rank."""
        while self._left and not self._broken:
            name = self._left[0]
            if in_mesh(self._tensors[name]):
                self.whole(name)
            else:
                self._left.pop(0)


def check_spread(tensors: Mapping[str, torch.Tensor], group: ProcessGroupLike) -> list[list[Any]]:
    """Return names, shapes and dtypes of the DTensors, which must be the same on all ranks."""
    found = []
    for name, tensor in tensors.items():
        if not is_dtensor(tensor):
            continue
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        if mesh.size() > group.world_size:
            raise CheckpointError(
                f"state_dict[{name!r}] is spread over {mesh.size()} processes, and "
                f"{group.world_size} take part: call save_model on all of them"
            )
        if group.rank == 0 and not in_mesh(tensor):
            raise CheckpointError(
                f"state_dict[{name!r}] is spread over processes of which the one that writes "
                "(rank 0) is none: pass a group whose first rank holds a part of it"
            )
        found.append([name, list(tensor.shape), str(tensor.dtype)])
    return sorted(found)
