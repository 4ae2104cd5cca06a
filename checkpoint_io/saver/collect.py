"""Collect the tensors of a state, each under a unique key, and find those that are tied."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, TypeVar

import torch

from checkpoint_io.format.tree import Path
from checkpoint_io.sharding.dtensor import is_dtensor, local_of
from checkpoint_io.sharding.local_tensors import WriteBox

_LOCAL_ROOT = "ranks"


def escape(segment: Any) -> str:
    """Escape one path segment as JSON Pointer does."""
    text = str(segment)
    if "~" in text or "/" in text:
        return text.replace("~", "~0").replace("/", "~1")
    return text


def shared_key(path: Path) -> str:
    """Build the key of a tensor in the shared state; a leading "ranks" is for local ones."""
    parts = [escape(segment) for segment in path]
    if parts and parts[0] == _LOCAL_ROOT:
        parts[0] = f"~{_LOCAL_ROOT}"  # "~r" is not an escape, so no other key is equal
    return "/".join(parts)


def free_key(wanted: str, used: Container[str]) -> str:
    """Return a key, or the first variant of it that is not used yet."""
    key, number = wanted, 1
    # {1: a, "1": b} would give one key twice, and "__metadata__" is reserved by safetensors.
    while key in used or key == "__metadata__":
        number += 1
        key = f"{wanted}~~{number}"
    return key


def local_prefix(rank: int) -> str:
    """Return the common prefix of the keys of one rank's own tensors."""
    return f"{_LOCAL_ROOT}/{rank}/"


def is_shared(key: str) -> bool:
    """Return whether a key belongs to the shared state."""
    return not key.startswith(f"{_LOCAL_ROOT}/")


def identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a value that only tied tensors share; None for a tensor that cannot be tied."""
    address = _address(tensor)
    return None if address is None else (address, *_view(tensor))


def tied_names(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the names of tied tensors, each with the first name of the same tensor."""
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors:
        mark = identity(tensor)
        if mark is not None and first.setdefault(mark, name) != name:
            tied[name] = first[mark]
    return tied


def _address(tensor: torch.Tensor) -> int | None:
    """Return the address at which a tensor starts; None if it cannot be tied."""
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return None
    if is_dtensor(tensor):
        local = local_of(tensor)
        # It may be empty, without an address; its storage still identifies it.
        return local.data_ptr() or local.untyped_storage()._cdata
    address = tensor.data_ptr()
    if not address and not tensor.is_meta:
        return None  # a device such as XLA: nothing tells one view of a storage from another
    return address or tensor.untyped_storage()._cdata


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how a tensor views the memory at its address."""
    if is_dtensor(tensor):
        sharded: Any = tensor
        local = local_of(sharded)
        return (*_view(local), tuple(tensor.shape), sharded.placements, sharded.device_mesh)
    return (tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())


class TensorCollector:
    """The tensors of one state on one rank, in the order in which the state names them.

    Attributes:
        tensors: every tensor by its key; kept alive, so that no address is reused meanwhile.
        tied: keys of tied tensors, to the first key of the same memory.
        sharded: True if there is any DTensor.

    Args:
        rank: the rank whose own state it is; None for the shared state.
    """

    def __init__(self, rank: int | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        self.sharded = False
        self._rank = rank
        self._containers: dict[Path, str] = {}
        self._by_address: dict[int, str] = {}
        self._by_view: dict[tuple[Any, ...], str] = {}

    def _key_for(self, path: Path) -> str:
        """Return the key of the tensor at a path, as if no other had it."""
        # Most tensors have neighbors in their container, whose path is escaped once.
        container, last = path[:-1], path[-1]
        text = last if type(last) is str and "/" not in last and "~" not in last else escape(last)
        if (begin := self._containers.get(container)) is not None:
            return begin + text
        if self._rank is None:
            key = shared_key(path)
        else:
            key = local_prefix(self._rank) + "/".join(map(escape, path))
        if container:  # at the root, `shared_key` escapes one name in another way
            self._containers[container] = key.removesuffix(text)
        return key

    def add(self, path: Path, tensor: torch.Tensor) -> str:
        """Register a tensor; return its key, or a variant of it that is still free."""
        key = free_key(self._key_for(path), self.tensors)
        self.tensors[key] = tensor
        # Views are compared only among tensors of one address, which are few.
        if type(tensor) is torch.Tensor:
            address: int | None = tensor.data_ptr()
        else:
            address = _address(tensor)
            self.sharded = self.sharded or is_dtensor(tensor)
        if address and self._by_address.setdefault(address, key) != key:
            self._tie(address, key, tensor)
        return key

    def _tie(self, address: int, key: str, tensor: torch.Tensor) -> None:
        """Tie a tensor to the first one with the same view of the same memory."""
        other = self._by_address[address]
        if (mark := identity(self.tensors[other])) is not None:
            self._by_view.setdefault(mark, other)
        mark = identity(tensor)
        if mark is not None and (first := self._by_view.setdefault(mark, key)) != key:
            self.tied[key] = first


def untied(collected: TensorCollector) -> dict[str, torch.Tensor]:
    """Return the tensors to store: one of each that are tied."""
    tied = collected.tied
    return {key: tensor for key, tensor in collected.tensors.items() if key not in tied}


T = TypeVar("T", torch.Tensor, WriteBox)


def pack(
    tensors: Iterable[tuple[str, T]], limit: int, names_limit: int = 32 * 1024 * 1024
) -> list[list[tuple[str, T]]]:
    """Split tensors over files of at most `limit` bytes (or one tensor), in the given order.

    The names of a file are limited too, because safetensors limits the header to 100 MB.
    """
    shards: list[list[tuple[str, T]]] = []
    size = names = 0
    for key, tensor in tensors:
        # An upper bound of the header entry: 6 bytes for an escaped character, plus the numbers.
        nbytes, entry = tensor.nbytes, 6 * len(key) + 22 * tensor.dim() + 128
        if not shards or size + nbytes > limit or names + entry > names_limit:
            shards.append([])
            size = names = 0
        shards[-1].append((key, tensor))
        size += nbytes
        names += entry
    return shards
