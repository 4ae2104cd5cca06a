"""Geometry of boxes: intersect them with chunks and with ranges of elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]
Slices = tuple[slice, ...]


class Axis(NamedTuple):
    """Indices of a box along one dimension: `length` of them from `start`, `step` apart."""

    start: int
    length: int
    step: int = 1

    @property
    def reach(self) -> int:
        """One past the last index."""
        return self.start + (self.length - 1) * self.step + 1 if self.length else self.start


Axes = tuple[Axis, ...]


def axes_of(offsets: Sequence[int], lengths: Sequence[int]) -> Axes:
    """Return the axes of a box with step 1."""
    return tuple(map(Axis, offsets, lengths))


def volume(axes: Axes) -> int:
    """Return the number of elements of a box."""
    return math.prod(axis.length for axis in axes)


def within(axes: Axes, offsets: Shape, shape: Shape) -> tuple[Axes, Slices] | None:
    """Clip a box to a chunk: return the box in the chunk, and its place in the result, or None."""
    inner, places = [], []
    for axis, low, length in zip(axes, offsets, shape, strict=True):
        first, stop = _hits(axis, low, low + length)
        if first >= stop:
            return None
        inner.append(Axis(axis.start + first * axis.step - low, stop - first, axis.step))
        places.append(slice(first, stop))
    return tuple(inner), tuple(places)


def _hits(axis: Axis, low: int, high: int) -> tuple[int, int]:
    """Return the range of positions on the axis whose indices lie between low and high."""
    if axis.step == 1:
        return max(0, low - axis.start), min(axis.length, high - axis.start)
    # Negated floor divisions round up.
    first = max(0, -((axis.start - low) // axis.step))
    return first, min(axis.length, -((axis.start - high) // axis.step))


def merge(shape: Shape, axes: Axes) -> tuple[Shape, Axes]:
    """Merge dimensions where possible; return an equal shape and axes with at least one."""
    merged_shape: list[int] = [1]
    merged: list[Axis] = [Axis(0, 1)]
    for length, axis in zip(shape, axes, strict=True):
        outer, whole = merged[-1], axis == Axis(0, length)
        if outer.length == 1:
            joined: Axis | None = Axis(outer.start * length + axis.start, axis.length, axis.step)
        elif whole and outer.step == 1:
            joined = Axis(outer.start * length, outer.length * length)
        else:
            joined = outer if length == 1 else None
        if joined is None:
            merged_shape.append(length)
            merged.append(axis)
        else:
            merged_shape[-1] *= length
            merged[-1] = joined
    return tuple(merged_shape), tuple(merged)


def blocks(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Split elements `begin` to `end` of a C-ordered array into boxes of (offsets, lengths).

    There are at most 2 * dimensions - 1 boxes, in the order of their elements.
    """
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    inner = shape[1:]
    size = math.prod(inner)
    first, head = divmod(begin, size)
    last, tail = divmod(end, size)
    if first == last:
        for offsets, lengths in blocks(inner, head, tail):
            yield (first, *offsets), (1, *lengths)
        return
    if head:
        for offsets, lengths in blocks(inner, head, size):
            yield (first, *offsets), (1, *lengths)
        first += 1
    if last > first:
        yield (first, *(0,) * len(inner)), (last - first, *inner)
    if tail:
        for offsets, lengths in blocks(inner, 0, tail):
            yield (last, *offsets), (1, *lengths)


def intersect(axes: Axes, offsets: Shape, lengths: Shape) -> tuple[Slices, Slices] | None:
    """Intersect a box with a block: return slices of the block and of the box, or None."""
    source, target = [], []
    for axis, low, length in zip(axes, offsets, lengths, strict=True):
        first, stop = _hits(axis, low, low + length)
        if first >= stop:
            return None
        begin = axis.start + first * axis.step - low
        source.append(slice(begin, begin + (stop - first - 1) * axis.step + 1, axis.step))
        target.append(slice(first, stop))
    return tuple(source), tuple(target)


def parts_with(shape: Shape, axes: Axes, part: int) -> list[int]:
    """Return the indices of the parts, of `part` elements each, that contain elements of a box."""
    if volume(axes) == 0:
        return []
    shape, axes = merge(shape, axes)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    low = sum(axis.start * stride for axis, stride in zip(axes, strides, strict=True))
    high = sum((axis.reach - 1) * stride for axis, stride in zip(axes, strides, strict=True))
    numbers = range(low // part, high // part + 1)
    if len(shape) == 1 and axes[0].step <= part:
        return list(numbers)
    total = math.prod(shape)
    return [
        number
        for number in numbers
        if any(
            intersect(axes, offsets, lengths) is not None
            for offsets, lengths in blocks(shape, number * part, min((number + 1) * part, total))
        )
    ]


def cover_fault(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> str | None:
    """Return why boxes, as (offsets, lengths), do not cover a shape exactly once, else None."""
    for offsets, lengths in boxes:
        if not len(offsets) == len(lengths) == len(shape) or any(
            low + n > whole for low, n, whole in zip(offsets, lengths, shape, strict=True)
        ):
            return "one reaches outside of it"
    covered = sum([math.prod(lengths) for _, lengths in boxes])
    if covered != math.prod(shape):
        return f"they hold {covered} of {math.prod(shape)} elements"
    # torch's own check compares each box with each of a tensor, if it is cut along a dimension that
    # is not its longest: half of a minute for a large model on 512 ranks.
    if overlapping([box for box in boxes if 0 not in box[1]]):
        return "two of them overlap"
    return None


def overlapping(boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Return whether any two boxes share an element; no length may be zero."""
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1  # boxes of a 0-dim tensor are all the same
    starts = np.array([offsets for offsets, _ in boxes], dtype=np.int64)
    ends = starts + np.array([lengths for _, lengths in boxes], dtype=np.int64)
    # Sweep along the dimension with the most distinct starts, where the fewest boxes overlap.
    axis = max(range(starts.shape[1]), key=lambda dim: len(np.unique(starts[:, dim])))
    order = np.argsort(starts[:, axis], kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.searchsorted(starts[:, axis], ends[:, axis], side="left")
    near = np.flatnonzero(reach > np.arange(1, len(reach) + 1))  # none, for a cut along one dim
    for number, stop in zip(near.tolist(), reach[near].tolist(), strict=True):
        others = slice(number + 1, stop)
        overlaps = (starts[others] < ends[number]) & (starts[number] < ends[others])
        if overlaps.all(axis=1).any():
            return True
    return False
