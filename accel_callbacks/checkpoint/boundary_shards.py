"""BoundaryShards: the parts of sharded tensors that living ranks leave in memory for each other."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from accel_callbacks.launch_memory import free_bytes
from accel_callbacks.terminal_text import size_of

__all__ = ["BoundaryShards"]

_SUFFIX = ".safetensors"


class BoundaryShards:
    """The shards of one boundary, in a folder that the ranks of a machine share.

    Replicas hold the same shards, so that one of them is enough. Tensors are told by their order,
    which is that of the state, and the same on all ranks.

    Args:
        folder: in host memory; made with the first shard.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def leave(self, tensors: Sequence[Any]) -> None:
        """Write the shards of this rank, unless a replica of it has written them.

        Args:
            tensors: DTensors, of which each rank calls this with its own shards.

        Raises:
            OSError: there is no room.
            checkpoint_io.UnsupportedStateError: a tensor is a sum that is not finished.
        """
        from safetensors.torch import save_file

        from checkpoint_io.sharding import local_boxes, local_of

        shards: dict[str, torch.Tensor] = {}
        boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        for number, tensor in enumerate(tensors):
            for box in local_boxes(tensor, "a tensor of the boundary"):
                shard = local_of(tensor)
                for dim, (start, length) in enumerate(
                    zip(box.local_offsets, box.shape, strict=True)
                ):
                    shard = shard.narrow(dim, start, length)
                shards[str(len(boxes))] = shard.detach().clone(
                    memory_format=torch.contiguous_format
                )
                boxes.append((number, box.offsets, box.shape))
        text = json.dumps({"tensors": _kinds_of(tensors), "boxes": boxes})
        path = self._folder / (hashlib.sha256(text.encode()).hexdigest()[:16] + _SUFFIX)
        if path.exists():
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        nbytes, free = sum(shard.nbytes for shard in shards.values()), free_bytes(str(self._folder))
        if nbytes > free:
            raise OSError(f"it needs {size_of(nbytes)}, and {size_of(free)} are free")
        # Others see a whole file or none.
        partial = self._folder / f"{path.stem}-{os.getpid()}.tmp"
        save_file(shards, partial, metadata={"boxes": text})
        partial.replace(path)

    def are_complete(self, tensors: Sequence[Any]) -> bool:
        """Return whether the shards that ranks have left are all of these tensors."""
        held = [0] * len(tensors)
        for number, _, shape in {box for _, boxes in self._files(tensors) for box in boxes}:
            held[number] += math.prod(shape)
        return held == [tensor.numel() for tensor in tensors]

    def whole(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """Return these tensors whole.

        Raises:
            ValueError: shards are missing.
        """
        from safetensors import safe_open

        if not self.are_complete(tensors):
            raise ValueError("shards of the boundary are missing")
        full = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
        for path, boxes in self._files(tensors):
            with safe_open(path, "pt") as file:
                for key, (number, offsets, shape) in enumerate(boxes):
                    view = full[number]
                    for dim, (start, length) in enumerate(zip(offsets, shape, strict=True)):
                        view = view.narrow(dim, start, length)
                    view.copy_(file.get_tensor(str(key)))
        return full

    def _files(
        self, tensors: Sequence[Any]
    ) -> list[tuple[Path, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]]:
        """Return each file with its boxes: the number of a tensor, offsets and shape in it."""
        from safetensors import safe_open

        kinds, files = _kinds_of(tensors), []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            with safe_open(path, "pt") as file:
                head = json.loads(file.metadata()["boxes"])
            if (
                head["tensors"] == kinds
            ):  # else a rank has other tensors, and the cover is not whole
                boxes = [(n, tuple(offsets), tuple(shape)) for n, offsets, shape in head["boxes"]]
                files.append((path, boxes))
        return files


def _kinds_of(tensors: Sequence[Any]) -> list[list[Any]]:
    return [[str(tensor.dtype), *tensor.shape] for tensor in tensors]
