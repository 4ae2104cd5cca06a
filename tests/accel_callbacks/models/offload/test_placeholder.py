"""A weight that is not there is known by its shape, and never computes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from accel_callbacks.models.offload.placeholder import AbsentWeight, AbsentWeightError, placeholder

SHAPE = (3, 4)


def absent(**options: object) -> AbsentWeight:
    like = torch.nn.Parameter(torch.zeros(SHAPE), requires_grad=False)
    return placeholder(like, "0.weight", "on disk", "cpu", **options)


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(lambda w: torch.ones(4) @ w.T, id="matmul"),
        pytest.param(lambda w: torch.nn.functional.linear(torch.ones(4), w), id="linear"),
        pytest.param(lambda w: torch._C._nn.linear(torch.ones(4), w), id="linear of C"),
        pytest.param(lambda w: torch.ops.aten.t(w), id="operator"),
        pytest.param(lambda w: torch.stack([w, w]), id="in a list"),
        pytest.param(lambda w: w + 1, id="add"),
        pytest.param(lambda w: w[0], id="index"),
        pytest.param(lambda w: w.clone(), id="clone"),
        pytest.param(lambda w: w.to("cpu"), id="to"),
        pytest.param(lambda w: w.mul_(2), id="in place"),
        pytest.param(lambda w: w.data.mul_(2), id="data in place"),
        pytest.param(lambda w: w.detach() + 1, id="detached"),
        pytest.param(lambda w: w.numpy(), id="numpy"),
        pytest.param(lambda w: w.tolist(), id="tolist"),
        pytest.param(lambda w: w.data_ptr(), id="pointer"),
        pytest.param(lambda w: w.untyped_storage(), id="storage"),
        pytest.param(lambda w: torch.nn.Parameter(w), id="another parameter"),
        pytest.param(lambda w: torch.ones(SHAPE).copy_(w), id="source of a copy"),
        pytest.param(lambda w: setattr(w, "data", torch.ones(SHAPE)), id="set data"),
    ],
)
def test_no_computation_and_the_error_has_the_name(compute):
    with pytest.raises(AbsentWeightError, match=r"0\.weight is on disk"):
        compute(absent())


def test_no_computation_past_the_functions_of_python():
    with torch._C.DisableTorchFunctionSubclass():
        with pytest.raises(AbsentWeightError, match=r"0\.weight"):
            torch.ones(4) @ absent().T
        with pytest.raises(AbsentWeightError, match=r"0\.weight"):
            torch.nn.functional.linear(torch.ones(4), absent())


def test_what_is_known_without_values():
    weight = absent()
    assert isinstance(weight, torch.nn.Parameter)
    assert (weight.shape, weight.numel(), weight.dtype) == (SHAPE, 12, torch.float32)
    assert (weight.stride(), weight.is_contiguous(), len(weight)) == ((4, 1), True, 3)
    assert (weight.grad, weight.is_leaf, weight.requires_grad) == (None, True, False)
    assert (weight.is_pinned(), weight.is_shared(), weight.is_floating_point()) == (0, 0, 1)
    assert weight in {weight}
    assert "0.weight" in repr(weight)
    weight.grad = None


def test_detached_is_no_parameter():
    for weight in (absent().detach(), absent().data):
        assert isinstance(weight, AbsentWeight)
        assert not isinstance(weight, torch.nn.Parameter)


def test_freezing_is_allowed_and_training_is_not():
    trained = placeholder(torch.nn.Parameter(torch.zeros(1)), "0.bias", "on disk")
    trained.requires_grad_(False)
    assert not trained.requires_grad
    assert not trained.is_trained
    with pytest.raises(AbsentWeightError, match="cannot be trained"):
        trained.requires_grad = True


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_stand_for_the_same(duplicate):
    first, second = duplicate([weight := absent(), weight])
    assert first is second
    assert first is not weight
    assert (repr(first), isinstance(first, torch.nn.Parameter)) == (repr(weight), True)


class _Double(torch.autograd.Function):
    """Runs something in the backward pass, as activation checkpointing does."""

    @staticmethod
    def forward(context, x, run):
        context.run = run
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * context.run(), None


def in_backward(run):
    x = torch.ones(1, requires_grad=True)
    _Double.apply(x, run).backward()
    return x.grad


def test_in_a_backward_pass_the_weight_is_fetched():
    weight = absent(fetch=lambda: torch.full(SHAPE, 3.0))
    assert in_backward(lambda: torch.stack([weight, weight]).sum()).item() == 72
    with pytest.raises(AbsentWeightError):
        weight.sum()


def test_in_a_backward_pass_it_is_not_changed():
    weight = absent(fetch=lambda: torch.full(SHAPE, 3.0))
    with pytest.raises(AbsentWeightError, match="changed in place"):
        in_backward(lambda: weight.mul_(2).sum())


def test_in_a_backward_pass_a_trained_weight_is_not_fetched():
    """Its gradient would be lost."""
    weight = absent(fetch=lambda: torch.full(SHAPE, 3.0))
    weight.is_trained = True
    with pytest.raises(AbsentWeightError, match="needs it"):
        in_backward(lambda: weight.sum())
