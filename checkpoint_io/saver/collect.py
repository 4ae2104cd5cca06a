"""Gathering the tensors of a state: a unique key for each, and which of them are tied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import torch

from checkpoint_io.format.tree import Path
from checkpoint_io.sharding.dtensor import is_dtensor, local_of

_LOCAL_ROOT = "ranks"


def escape(segment: Any) -> str:
    """Write one path segment as JSON Pointer does."""
    text = str(segment)
    if "~" in text or "/" in text:
        return text.replace("~", "~0").replace("/", "~1")
    return text


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
    place = _place(tensor)
    return None if place is None else (place, *_look(tensor))


def _place(tensor: torch.Tensor) -> int | None:
    """Return the address that a tensor starts at; None for one that cannot be tied."""
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return None
    # of a DTensor this process may hold nothing: its (empty) memory still tells it from others
    mine = local_of(tensor) if is_dtensor(tensor) else tensor
    return mine.data_ptr() or mine.untyped_storage()._cdata


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how a tensor looks at the memory that starts at its address."""
    if is_dtensor(tensor):
        sharded: Any = tensor
        mine = local_of(sharded)
        return (*_look(mine), tuple(tensor.shape), sharded.placements, sharded.device_mesh)
    return (tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())


class TensorCollector:
    """The tensors of one state on one rank, in the order in which the state names them.

    Attributes:
        tensors: every tensor by its key; they stay alive, so that no memory is used twice.
        tied: keys of tensors that are tied, to the first key of the same memory.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        self._at: dict[int, str] = {}
        self._by_identity: dict[tuple[Any, ...], str] = {}

    def add(self, wanted: str, tensor: torch.Tensor) -> str:
        """Register a tensor under a key like `wanted` and return the key it got."""
        key, number = wanted, 1
        # {1: a, "1": b} ask for the same key; the header key of the format is taken from the start
        while key in self.tensors or key == "__metadata__":
            number += 1
            key = f"{wanted}~~{number}"
        self.tensors[key] = tensor
        place = _place(tensor)
        if place is not None and self._at.setdefault(place, key) != key:
            self._tie(place, key, tensor)
        return key

    def _tie(self, place: int, key: str, tensor: torch.Tensor) -> None:
        """Tie a tensor to the first one that looks at the same memory in the same way."""
        other = self._at[place]
        self._by_identity.setdefault((place, *_look(self.tensors[other])), other)
        first = self._by_identity.setdefault((place, *_look(tensor)), key)
        if first != key:
            self.tied[key] = first


class HasBytes(Protocol):
    """What is packed into files, here called by its name: something with bytes and dimensions."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""

    def dim(self) -> int:
        """How many dimensions it has."""


T = TypeVar("T", bound=HasBytes)


def pack(
    tensors: Iterable[tuple[str, T]], limit: int, names_limit: int = 32 * 1024 * 1024
) -> list[list[tuple[str, T]]]:
    """Split tensors over files of at most `limit` bytes (or one tensor), in the given order.

    A file's names are limited too, because the format limits its header to 100 MB.
    """
    shards: list[list[tuple[str, T]]] = []
    size = names = 0
    for key, tensor in tensors:
        # 6 bytes for an escaped character, and room for the numbers
        nbytes, entry = tensor.nbytes, 6 * len(key) + 22 * tensor.dim() + 128
        if not shards or size + nbytes > limit or names + entry > names_limit:
            shards.append([])
            size = names = 0
        shards[-1].append((key, tensor))
        size += nbytes
        names += entry
    return shards
