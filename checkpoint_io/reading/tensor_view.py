"""A tensor that is still in the checkpoint, and slices of it that read only their own bytes."""

from __future__ import annotations

import operator
from typing import Any

import torch

from checkpoint_io.format.safetensors import empty
from checkpoint_io.loader.source import Source
from checkpoint_io.reading.placing import dtype_of, nbytes_of, wants_for
from checkpoint_io.sharding.boxes import Axes, Axis

__all__ = ["TensorView"]


class TensorView:
    """A stored tensor that has not been read; indexing it reads only the bytes it needs.

    Views come from a `CheckpointReader` and stay usable as long as the checkpoint is there.

    Attributes:
        key: its name in the checkpoint.
        is_array: it was saved from a numpy array, and `load_tree` gives one back.

    Example:
        >>> import torch
        >>> from checkpoint_io import open_checkpoint, save
        >>> _ = save("memory://doc-view/v", {"w": torch.arange(12).reshape(3, 4)})
        >>> view = open_checkpoint("memory://doc-view/v")["w"]
        >>> view.dtype, view.shape, view.nbytes
        (torch.int64, (3, 4), 96)
        >>> view[1:, ::2]
        tensor([[ 4,  6],
                [ 8, 10]])
        >>> bool((view.read_into(torch.zeros(3, 4, dtype=torch.int64)) == view.read()).all())
        True
    """

    __slots__ = ("_source", "is_array", "key")

    def __init__(self, source: Source, key: str, is_array: bool = False) -> None:
        self._source = source
        self.key = key
        self.is_array = is_array

    @property
    def dtype(self) -> torch.dtype:
        """The saved dtype; CheckpointError if this torch does not have it."""
        return dtype_of(self._source.entry(self.key), self.key)

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape, however many ranks wrote it."""
        return self._source.entry(self.key).shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return nbytes_of(self._source.entry(self.key))

    @property
    def stored_key(self) -> str:
        """The key under which the bytes are stored; tied tensors have one in common."""
        return self._source.stored(self.key)

    def __repr__(self) -> str:
        name = self._source.entry(self.key).dtype
        return f"TensorView({self.key!r}, {name}, shape={self.shape})"

    def belongs_to(self, source: Source) -> bool:
        """Say whether this view reads from that opened checkpoint."""
        return self._source is source

    def numpy(self) -> TensorView:
        """Return a view of the same tensor that `load_tree` turns into a numpy array."""
        return TensorView(self._source, self.key, is_array=True)

    def read(self) -> torch.Tensor:
        """Read the whole tensor, verified, into a new one on the CPU.

        Raises:
            CorruptCheckpointError: its bytes are not the ones saved, or are gone.
        """
        tensors = self._source.new_tensors([self.key])
        self._source.fill([], fresh=tensors.items())
        return tensors[self.stored_key]

    def read_into(self, target: torch.Tensor, *, cast: bool = False) -> torch.Tensor:
        """Read into a tensor on any device, or into this rank's part of a DTensor.

        Args:
            target: a tensor of the saved shape. Of a DTensor only the local part is read.
            cast: convert to the target's dtype; default False: another dtype is an error.

        Returns:
            The target.

        Raises:
            StateMismatchError: shape or dtype differ; nothing was changed.
            CorruptCheckpointError: the bytes are not the ones saved; nothing was changed.
            TornLoadError: the same, but part of the target had been written before.
        """
        pairs = [(self.key, target)]
        self._source.check_targets(pairs, cast)
        self._source.fill(pairs)
        return target

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part of the tensor: ints, slices with a step of 1 or more, and `...`.

        Only the parts (of 1 MiB) that hold an element of it are read.

        Raises:
            IndexError: an index that is out of range, or of another kind.
            ValueError: a slice with a negative step.
        """
        entry = self._source.entry(self.key)
        axes, kept = parse_index(index, entry.shape)
        box = tuple(axis.length for axis in axes)
        target = empty(entry.dtype, box, f"tensor {self.key!r}")
        part = self._source.manifest.part_size
        self._source.transfer(wants_for(entry, self.key, target, part, axes))
        return target.reshape([axes[dim].length for dim in kept])


def parse_index(index: Any, shape: tuple[int, ...]) -> tuple[Axes, list[int]]:
    """Turn a basic index into a box, and the dimensions that it keeps."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [n for n, item in enumerate(items) if item is Ellipsis]
    missing = len(shape) - (len(items) - len(dots))
    if len(dots) > 1 or missing < 0:
        raise IndexError(f"{index!r:.200} does not index a tensor of shape {shape}")
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * missing
    axes = tuple(_axis(item, length) for item, length in zip(items, shape, strict=True))
    return axes, [dim for dim, item in enumerate(items) if isinstance(item, slice)]


def _axis(item: Any, length: int) -> Axis:
    """Turn an int or a slice into an axis."""
    if isinstance(item, slice):
        start, stop, step = item.indices(length)
        if step < 0:
            raise ValueError("a view takes steps of 1 or more: read() it and use torch.flip")
        return Axis(start, len(range(start, stop, step)), step if step < length else 1)
    try:
        if isinstance(item, bool):  # an int to Python, something else to torch
            raise TypeError
        number = operator.index(item)
    except TypeError:
        raise IndexError(
            f"a view takes ints, slices and ..., not {type(item).__name__}: "
            "read() it and index the tensor"
        ) from None
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of range for a dimension of {length}")
    return Axis(number % length, 1)
