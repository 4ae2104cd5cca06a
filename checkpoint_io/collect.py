"""Gathering the tensors of a state: a unique key for each, tied ones only once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from checkpoint_io.tree import Path

_LOCAL_ROOT = "ranks"


def escape(segment: Any) -> str:
    """Write one path segment as JSON Pointer does."""
    return str(segment).replace("~", "~0").replace("/", "~1")


def shared_key(path: Path) -> str:
    """Build the key of a tensor in the shared state; "ranks" in front is kept for local ones."""
    parts = [escape(segment) for segment in path]
    if parts and parts[0] == _LOCAL_ROOT:
        parts[0] = f"~{_LOCAL_ROOT}"  # "~r" is no escape, so no other key looks like this
    return "/".join(parts)


def local_key(rank: int, path: Path) -> str:
    """Build the key of a tensor that belongs to one rank."""
    return "/".join([_LOCAL_ROOT, str(rank), *(escape(segment) for segment in path)])


def local_prefix(rank: int) -> str:
    """Return what every key of one rank's own tensors starts with."""
    return f"{_LOCAL_ROOT}/{rank}/"


def is_shared(key: str) -> bool:
    """Say whether a key belongs to the shared state."""
    return not key.startswith(f"{_LOCAL_ROOT}/")


def identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what two tied tensors have in common; None for one that has no memory."""
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return None
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )


class TensorCollector:
    """The tensors of one save on one rank, in the order in which the state names them."""

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        # the header key of the safetensors format is taken from the start
        self._taken = {"__metadata__"}
        self._by_identity: dict[tuple[Any, ...], str] = {}

    def add(self, wanted: str, tensor: torch.Tensor) -> str:
        """Register a tensor under a key like `wanted` and return the key it got."""
        key, number = wanted, 1
        while key in self._taken:  # {1: a, "1": b} ask for the same key
            number += 1
            key = f"{wanted}~~{number}"
        self._taken.add(key)
        mark = identity(tensor)
        if mark is not None and mark in self._by_identity:
            self.aliases[key] = self._by_identity[mark]
            return key
        if mark is not None:
            self._by_identity[mark] = key
        self.tensors[key] = tensor
        return key


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]], limit: int, names_limit: int = 32 * 1024 * 1024
) -> list[list[tuple[str, torch.Tensor]]]:
    """Split tensors over files of at most `limit` bytes (or one tensor), in the given order.

    A file's names are limited too, because the format limits its header to 100 MB.
    """
    shards: list[list[tuple[str, torch.Tensor]]] = []
    size = names = 0
    for key, tensor in tensors:
        # 6 bytes for an escaped character, and room for the numbers
        entry = 6 * len(key) + 22 * tensor.dim() + 128
        if not shards or size + tensor.nbytes > limit or names + entry > names_limit:
            shards.append([])
            size = names = 0
        shards[-1].append((key, tensor))
        size += tensor.nbytes
        names += entry
    return shards
