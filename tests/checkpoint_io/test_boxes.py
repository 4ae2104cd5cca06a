from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_io.sharding.boxes import (
    Axes,
    Axis,
    axes_of,
    blocks,
    intersect,
    merge,
    overlapping,
    parts_with,
    within,
)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Axes]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    axes = []
    for length in shape:
        start, step = draw(st.integers(0, length - 1)), draw(st.integers(1, 3))
        axes.append(Axis(start, draw(st.integers(1, 1 + (length - 1 - start) // step)), step))
    return shape, tuple(axes)


def slices(axes: Axes) -> tuple[slice, ...]:
    return tuple(slice(axis.start, axis.reach, axis.step) for axis in axes)


@settings(max_examples=300, deadline=None)
@given(boxes(), st.integers(1, 7), st.booleans())
def test_parts_rebuild_the_box(box: tuple[tuple[int, ...], Axes], part: int, merged: bool) -> None:
    shape, axes = box
    array = np.arange(math.prod(shape)).reshape(shape)
    wanted = array[slices(axes)]
    if merged:
        shape, axes = merge(shape, axes)
    flat = array.ravel()
    found = np.full([axis.length for axis in axes], -1)
    numbers = parts_with(shape, axes, part)
    assert numbers == sorted({int(value) // part for value in wanted.ravel()})
    for number in numbers:
        at, end = number * part, min(flat.size, (number + 1) * part)
        cut = list(blocks(shape, at, end))
        assert len(cut) <= 2 * len(shape) - 1
        for offsets, lengths in cut:
            size = math.prod(lengths)
            if (common := intersect(axes, offsets, lengths)) is not None:
                assert (found[common[1]] == -1).all()
                found[common[1]] = flat[at : at + size].reshape(lengths)[common[0]]
            at += size
        assert at == end
    assert np.array_equal(found.ravel(), wanted.ravel())


@settings(max_examples=200, deadline=None)
@given(boxes(), st.integers(0, 5))
def test_chunks_rebuild_the_box(box: tuple[tuple[int, ...], Axes], cut: int) -> None:
    shape, axes = box
    cut = min(cut, shape[0])
    array = np.arange(math.prod(shape)).reshape(shape)
    found = np.full([axis.length for axis in axes], -1)
    for low, high in ((0, cut), (cut, shape[0])):
        rest = (0,) * (len(shape) - 1)
        inside = within(axes, (low, *rest), (high - low, *shape[1:]))
        if inside is not None:
            found[inside[1]] = array[low:high][slices(inside[0])]
    assert np.array_equal(found, array[slices(axes)])


def test_a_whole_array_is_one_run() -> None:
    assert merge((3, 1, 4, 5), axes_of((0, 0, 0, 0), (3, 1, 4, 5))) == ((60,), (Axis(0, 60),))
    assert merge((), ()) == ((1,), (Axis(0, 1),))
    assert merge((4, 6), (Axis(1, 2), Axis(0, 6))) == ((24,), (Axis(6, 12),))


def test_a_thin_column_needs_only_its_own_parts() -> None:
    # rows of 10 parts: the column lies in one part of each row
    assert parts_with((3, 1000), axes_of((0, 250), (3, 1)), 100) == [2, 12, 22]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([((0,), (2,)), ((2,), (2,))], False),
        ([((0,), (3,)), ((2,), (2,))], True),
        ([((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4))], False),
        ([((0, 0), (2, 3)), ((0, 2), (2, 2))], True),
        ([((), ())], False),
        ([((), ()), ((), ())], True),
        ([], False),
    ],
)
def test_overlapping(found: list[tuple[tuple[int, ...], tuple[int, ...]]], expected: bool) -> None:
    assert overlapping(found) is expected
    assert overlapping(found[::-1]) is expected
