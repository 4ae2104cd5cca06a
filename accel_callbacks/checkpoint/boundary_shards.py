"""BoundaryShards: the parts of sharded tensors that living ranks leave in memory for each other."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks.launch_memory import free_bytes
from accel_callbacks.terminal_text import size_of

if TYPE_CHECKING:
    from checkpoint_io.sharding.local_tensors import Entry

__all__ = ["BoundaryShards"]

_SUFFIX = ".safetensors"


class BoundaryShards:
    """The shards of one boundary, in a folder that the ranks of a machine share.

    Replicas hold the same shards, so that one of them is enough. Tensors are told by their order,
    which is that of the state, and the same on all ranks.

    Args:
        folder: in host memory; made with the first shard.
        tensors: DTensors, with the shards of this rank.

    Raises:
        checkpoint_io.UnsupportedStateError: a tensor is a sum that is not finished.
    """

    def __init__(self, folder: Path, tensors: Sequence[Any]) -> None:
        from checkpoint_io.sharding.local_tensors import LocalTensors

        self._folder, self._tensors = folder, tensors
        named = {str(number): tensor for number, tensor in enumerate(tensors)}
        self._local = LocalTensors(named, {}, 0, replicated=False)
        self._entries: dict[str, Any] = self._local.to_plain()["entries"]

    def leave(self) -> None:
        """Write the shards of this rank, unless a replica of it has written them.

        Raises:
            OSError: there is no room.
        """
        from safetensors.torch import save_file

        text = json.dumps(self._entries)
        path = self._folder / (hashlib.sha256(text.encode()).hexdigest()[:16] + _SUFFIX)
        if path.exists():
            return
        shards = {
            f"{key}.{part}": self._local.box(key, offsets).tensor
            for key, (_, _, boxes) in self._entries.items()
            for part, (offsets, _) in enumerate(boxes)
        }
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        nbytes, free = sum(shard.nbytes for shard in shards.values()), free_bytes(str(self._folder))
        if nbytes > free:
            raise OSError(f"it needs {size_of(nbytes)}, and {size_of(free)} are free")
        # Safetensors writes no tensors that share a storage, as several parts of one shard do.
        copies = {
            key: shard.detach().clone(memory_format=torch.contiguous_format)
            for key, shard in shards.items()
        }
        # Others see a whole file or none.
        partial = self._folder / f"{path.stem}-{os.getpid()}.tmp"
        save_file(copies, partial, metadata={"entries": text})
        partial.replace(path)

    def are_complete(self) -> bool:
        """Return whether the shards that ranks have left are all of these tensors."""
        return self._cover(self._files())

    def whole(self) -> list[torch.Tensor]:
        """Return these tensors whole.

        Raises:
            ValueError: shards are missing.
        """
        from safetensors import safe_open

        files = self._files()
        if not self._cover(files):
            raise ValueError("shards of the boundary are missing")
        whole = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in self._tensors]
        for path, entries in files:
            with safe_open(path, "pt") as file:
                for number, entry in enumerate(entries):
                    for part, (offsets, shape) in enumerate(entry.boxes or ()):
                        extents = zip(offsets, shape, strict=True)
                        place = tuple(slice(start, start + length) for start, length in extents)
                        whole[number][place] = file.get_tensor(f"{number}.{part}")
        return whole

    def _files(self) -> list[tuple[Path, list[Entry]]]:
        """Return each file of a rank with these tensors, and which boxes of them it has."""
        from safetensors import safe_open

        from checkpoint_io.sharding.local_tensors import entry_of

        kinds = [entry[:2] for entry in map(entry_of, self._entries.values())]
        files = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            with safe_open(path, "pt") as file:
                entries = list(map(entry_of, json.loads(file.metadata()["entries"]).values()))
            if [entry[:2] for entry in entries] == kinds:
                files.append((path, entries))
        return files

    def _cover(self, files: Sequence[tuple[Path, list[Entry]]]) -> bool:
        """Return whether files have all elements of each tensor."""
        held = [set[Any]() for _ in self._tensors]
        for _, entries in files:
            for boxes, entry in zip(held, entries, strict=True):
                boxes.update(entry.boxes or ())
        counts = [sum(math.prod(shape) for _, shape in boxes) for boxes in held]
        return counts == [tensor.numel() for tensor in self._tensors]
