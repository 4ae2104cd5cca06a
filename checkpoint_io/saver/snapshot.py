"""A snapshot of a state: its plain values at the time of a call, to be encoded on any thread."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from checkpoint_io.format.safetensors import NAMES
from checkpoint_io.format.tree import MAX_BITS, MAX_DEPTH, Path, TreeEncoder
from checkpoint_io.saver.collect import TensorCollector, identity

_HOLE = object()  # stands for a tensor in the tree
_FIXED = frozenset((type(None), bool, str, float, bytes, torch.dtype))  # they cannot change
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_KEYS = frozenset((str,))


class Snapshot:
    """The plain values of a state, copied, and its tensors, which are not, until they are taken.

    To take one is several times as fast as to encode the state. It is not a check: a state with
    values of other types is encoded at once, which handles or refuses them.

    Attributes:
        count: number of tensors, one of each that are tied.
    """

    def __init__(
        self, tree: dict[str, Any], tensors: list[torch.Tensor], order: Sequence[int]
    ) -> None:
        self._tree = tree
        self._order = order
        self._tensors = tensors
        self.count = len(tensors)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Snapshot | None:
        """Take a snapshot; return None for a state that holds anything unusual."""
        tensors: list[torch.Tensor] = []
        try:
            tree = _copy(dict(state), tensors, MAX_DEPTH)
        except _UnusualError:
            return None
        for tensor in tensors:
            if tensor.dtype not in NAMES:
                return None
        try:
            addresses = {tensor.data_ptr() for tensor in tensors}
        except RuntimeError:  # of a sparse tensor
            return None
        # A tensor without memory is an empty one, or on the device "meta".
        if 0 in addresses and any(tensor.is_meta for tensor in tensors):
            return None
        if len(addresses) == len(tensors):
            return cls(tree, tensors, range(len(tensors)))
        return cls(tree, *_one_of_tied(tensors))

    def take_tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the order of the state; the snapshot does not keep them."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def encode(self, root: str, collector: TensorCollector, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the JSON form; each tensor goes to the collector, and ties are as they were.

        Args:
            root: name of the state in errors.
            collector: takes the tensors.
            tensors: those that were taken, or copies of them.
        """
        return _Encoder(root, collector, (tensors[i] for i in self._order)).encode(self._tree)


class _UnusualError(Exception):
    """A value that is left to the encoder."""


def _copy(value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    """Copy a value; collect its tensors."""
    kind = type(value)
    if kind in _TENSORS:
        tensors.append(value)
        return _HOLE
    if kind in _DICTS:
        if not depth or not _KEYS.issuperset(map(type, value)):
            raise _UnusualError
        # Hot path: most items are tensors and plain values, which need no call of their own.
        copied = {}
        for key, item in value.items():
            kind = type(item)
            if kind in _TENSORS:
                tensors.append(item)
                copied[key] = _HOLE
            else:
                copied[key] = item if kind in _FIXED else _copy(item, tensors, depth - 1)
        return copied
    if kind is int and value.bit_length() <= MAX_BITS:
        return value
    if kind is list or kind is tuple:
        if not depth:
            raise _UnusualError
        # A state may hold a list of 100,000 numbers: those are checked together.
        kinds = set(map(type, value))
        if kinds <= _FIXED or (kinds == {int} and max(map(int.bit_length, value)) <= MAX_BITS):
            return kind(value)
        return kind([_copy(item, tensors, depth - 1) for item in value])
    if kind in _FIXED:
        return value
    raise _UnusualError


def _one_of_tied(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Sequence[int]]:
    """Return one of each tied tensors, and for each tensor which one that is."""
    firsts: dict[Any, int] = {}
    firsts_only: list[torch.Tensor] = []
    order = []
    for number, tensor in enumerate(tensors):
        mark = identity(tensor)
        index = firsts.setdefault(number if mark is None else mark, len(firsts_only))
        if index == len(firsts_only):
            firsts_only.append(tensor)
        order.append(index)
    return firsts_only, order


class _Encoder(TreeEncoder):
    """Encodes the tree of a snapshot, with a tensor for each hole."""

    def __init__(
        self, root: str, collector: TensorCollector, tensors: Iterator[torch.Tensor]
    ) -> None:
        super().__init__(root, collector.add)
        self._tensors = tensors

    def _encode_other(self, value: Any, path: Path) -> Any:
        if value is _HOLE:
            return self._tensor(next(self._tensors), path)
        return super()._encode_other(value, path)
