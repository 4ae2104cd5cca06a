"""What counts as a difference between the ranks of one replica."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from accel_callbacks.engines.replica_agreement import (
    ReplicaAgreement,
    _are_apart,
    _differ,
    _marks,
    _summary,
)


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


class Pair(ReplicaAgreement):
    """Compares with a rank that has the same values, but for some places."""

    def __init__(self, apart=()):
        super().__init__(None)
        self.apart = apart
        self.asked = 0

    def _all(self, values):
        self.asked += 1
        return [
            list(values),
            [v + 1 if place in self.apart else v for place, v in enumerate(values)],
        ]


def with_gradients():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 3) for name in ("a", "b", "frozen")})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, model["frozen"].requires_grad_(False)


@pytest.mark.parametrize(
    ("apart", "names"),
    [
        # of each parameter its norm and its sum, in turn: a.weight, a.bias, b.weight, b.bias
        ({0}, "'a.weight'"),
        ({1}, "'a.weight'"),
        ({2}, "'a.bias'"),
        ({5}, "'b.weight'"),
        ({3, 6}, "'a.bias', 'b.bias'"),
    ],
)
def test_the_parameters_whose_gradients_differ_are_named_once(apart, names):
    model, _ = with_gradients()
    agreement = Pair(apart)
    with pytest.warns(UserWarning, match=f"^{names}: parameters that are whole"):
        agreement.check_gradients([model])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement.check_gradients([model])
    assert agreement.asked == 1


def test_equal_gradients_are_compared_in_two_steps():
    agreement = Pair()
    for _ in range(3):
        agreement.check_gradients([with_gradients()[0]])
    assert agreement.asked == 2
    assert not agreement.done  # the losses are not compared yet
    for _ in range(3):
        agreement.check_loss(torch.tensor(2.0))
    assert agreement.asked == 4
    assert agreement.done


def test_a_difference_is_measured_beside_the_norm_of_all_gradients():
    model, _ = with_gradients()
    model["a"].weight.grad *= 1e6
    agreement = Pair({2})  # 1 in the norm of a bias, where all have 2.4e6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement.check_gradients([model])


def test_another_loss_is_told_once():
    agreement = Pair({0})
    with pytest.warns(UserWarning, match=r"different losses \(2, 3\)"):
        agreement.check_loss(torch.tensor(2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement.check_loss(torch.tensor(2.0))


def test_inputs_are_compared_where_nothing_is_trained():
    agreement, model = Pair({0}), torch.nn.Linear(1, 1)
    agreement.check_inputs(model, (torch.ones(1),), {})  # a forward of training, whose loss is
    assert agreement.asked == 0
    with torch.no_grad(), pytest.warns(UserWarning, match="gave Linear different inputs"):
        agreement.check_inputs(model, (torch.ones(1),), {})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement.check_inputs(model, (torch.ones(1),), {})
    agreement = Pair()
    for _ in range(3):
        with torch.no_grad():
            agreement.check_inputs(model, (torch.ones(1),), {})
    assert agreement.asked == 2
