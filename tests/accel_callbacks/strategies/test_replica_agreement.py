"""What counts as a difference between the ranks of one replica."""

from __future__ import annotations

import math

import pytest
import torch

from accel_callbacks.strategies.replica_agreement import _are_apart, _differ, _marks, _summary


@pytest.mark.parametrize(
    ("values", "apart"),
    [
        ([0.0, 0.0], False),
        ([1.0, 1.0], False),
        ([1.0, 1.05], False),
        ([1.0, 1.2], True),
        ([-1.0, -1.2], True),
        ([-0.1, 0.1], True),
        ([2.0, 1.0, 2.0], True),
        ([math.nan, 1.0, 2.0], False),
        ([1.0, 2.0, math.nan], False),
        ([1.0, math.inf], False),
    ],
)
def test_values_are_apart_by_more_than_a_part_of_the_largest(values, apart):
    assert _are_apart(values, 0.1) is apart


def marks_of(*gradients):
    return [_marks(torch.tensor(gradient)) for gradient in gradients]


@pytest.mark.parametrize(
    ("marks", "total", "differ"),
    [
        (marks_of([3.0, 4.0], [3.0, 4.0]), 5.0, False),
        (marks_of([3.0, 4.0], [3.0, 4.0001]), 5.0, False),
        (marks_of([3.0, 4.0], [3.0, 5.0]), 5.0, True),
        (marks_of([3.0, 4.0], [3.0, -4.0]), 5.0, True),  # of the same norm
        (marks_of([1e-7, 0.0], [0.0, 0.0]), 1.0, False),  # nothing beside the others
        (marks_of([1e-4, 0.0], [0.0, 0.0]), 1.0, True),
        (marks_of([0.0, 0.0], [0.0, 0.0]), 0.0, False),
        (marks_of([math.nan, 0.0], [3.0, 4.0]), 5.0, False),
    ],
)
def test_gradients_differ_by_their_norm_or_their_sum(marks, total, differ):
    assert _differ(marks, 2, total) is differ


def test_a_missing_gradient_and_a_sparse_one_are_zeros():
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,))
    assert _marks(None) == _marks(sparse) == (0.0, 0.0)


def test_inputs_of_other_values_places_or_shapes_have_other_summaries():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    inputs = [
        (x, y),
        (y, x),
        (x.flip(0), y),
        (x,),
        (torch.zeros(2), y),
        (torch.zeros(3), y),
        {"a": x, "b": x},
    ]
    summaries = [_summary(value) for value in inputs]
    assert len(set(summaries)) == len(inputs)
    assert _summary({"a": x, "b": y}) == _summary((x, y))
    assert _summary((x, "a text", None, torch.empty(1, device="meta"))) == _summary((x,))
