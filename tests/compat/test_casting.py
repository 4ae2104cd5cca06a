"""Layerwise casting: rounded once, whatever the number of forwards."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from accel_callbacks.compat.casting import LayerwiseCastingHook, attach_layerwise_casting_hooks
from accel_callbacks.compat.hooks import add_hook_to_module, remove_hook_from_submodules

FP8 = torch.float8_e4m3fn
X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(5, 4),
            "block": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)),
            "norm_out": torch.nn.Linear(4, 4),
            "head": torch.nn.Linear(4, 5, bias=False),
        }
    )


def test_weights_are_stored_small_and_rounded_once(model):
    layer = model["block"][0]
    parameter, bits = layer.weight, layer.weight.detach().to(FP8).view(torch.uint8)
    expected = torch.nn.functional.linear(
        X, layer.weight.to(FP8).float(), layer.bias.to(FP8).float()
    )
    attach_layerwise_casting_hooks(model, FP8, torch.float32)
    for _ in range(3):
        assert torch.equal(layer(X), expected)
        assert layer.weight is parameter
        assert torch.equal(layer.weight.data.view(torch.uint8), bits)
    assert layer.weight.dtype is FP8
    assert (model["block"][1].weight.dtype, model["embedding"].weight.dtype) == (torch.float32,) * 2
    assert model.state_dict()["block.0.weight"].dtype is FP8


def test_the_weight_in_a_forward_is_a_new_one_each_time(model):
    """A cast back would write the stored tensor again."""
    layer = model["head"]
    attach_layerwise_casting_hooks(layer, FP8, torch.float32)
    pointer, version = layer.weight.data_ptr(), layer.weight._version
    layer(X)
    assert (layer.weight.data_ptr(), layer.weight._version) == (pointer, version)


@pytest.mark.parametrize(
    ("pattern", "cast"),
    [
        (None, ["block.0", "norm_out", "head"]),
        ("norm", ["block.0", "head"]),
        (["^block", "head"], ["norm_out"]),
    ],
)
def test_patterns_leave_modules_out(model, pattern, cast):
    attach_layerwise_casting_hooks(model, FP8, torch.float32, skip_modules_pattern=pattern)
    found = [name for name, one in model.named_modules() if hasattr(one, "_hf_hook")]
    assert found == cast


def test_classes_leave_modules_out(model):
    attach_layerwise_casting_hooks(
        model, FP8, torch.float32, skip_modules_classes=(torch.nn.Sequential,)
    )
    found = [name for name, one in model.named_modules() if hasattr(one, "_hf_hook")]
    assert found == ["norm_out", "head"]


def test_a_head_that_is_tied_to_an_embedding_is_left_as_it_is(model):
    model["head"].weight = model["embedding"].weight
    attach_layerwise_casting_hooks(model, FP8, torch.float32)
    assert model["head"].weight.dtype is torch.float32
    assert model["embedding"](torch.tensor([1])).dtype is torch.float32


def test_layers_tied_to_each_other_are_cast_together(model):
    model["norm_out"].weight = model["block"][0].weight
    expected = [layer(X).dtype for layer in (model["norm_out"], model["block"][0])]
    attach_layerwise_casting_hooks(model, FP8, torch.float32)
    assert [layer(X).dtype for layer in (model["norm_out"], model["block"][0])] == expected
    assert model["norm_out"].weight is model["block"][0].weight
    assert model["norm_out"].weight.dtype is FP8


def test_hooks_are_attached_once(model):
    for _ in range(2):
        attach_layerwise_casting_hooks(model, FP8, torch.float32)
    assert isinstance(model["head"]._hf_hook, LayerwiseCastingHook)


def test_stored_weights_come_back_after_a_forward_that_raises(model):
    attach_layerwise_casting_hooks(model, FP8, torch.float32)
    with pytest.raises(RuntimeError):
        model["head"](torch.ones(2, 3))
    assert model["head"].weight.dtype is FP8


def test_gradients_are_those_of_the_rounded_weights(model):
    layer = model["block"][0]
    layer.weight.data = layer.weight.data.bfloat16().float()
    layer.bias.data = layer.bias.data.bfloat16().float()
    plain, own, other = copy.deepcopy(layer), X.clone().requires_grad_(), X.clone().requires_grad_()
    attach_layerwise_casting_hooks(layer, torch.bfloat16, torch.float32)
    layer(own).square().sum().backward()
    plain(other).square().sum().backward()
    assert torch.equal(own.grad, other.grad)
    assert torch.equal(layer.weight.grad, plain.weight.grad.bfloat16())


def test_frozen_fp8_weights_pass_gradients_on(model):
    layer = model["head"].requires_grad_(False)
    attach_layerwise_casting_hooks(layer, FP8, torch.float32)
    own = X.clone().requires_grad_()
    layer(own).sum().backward()
    assert torch.equal(own.grad, layer.weight.float().sum(0).expand(2, 4))


def test_a_buffer_that_the_forward_writes_is_stored(model):
    norm = torch.nn.BatchNorm1d(4)
    add_hook_to_module(norm, LayerwiseCastingHook(torch.bfloat16, torch.float32))
    norm(X)
    assert norm.running_mean.dtype is torch.bfloat16
    assert norm.num_batches_tracked == 1
    assert norm.running_var.float().sum() != 4


def test_removed_hooks_leave_the_dtype_of_the_computation(model):
    attach_layerwise_casting_hooks(model, FP8, torch.bfloat16)
    remove_hook_from_submodules(model)
    assert model["head"].weight.dtype is torch.bfloat16


def test_cast_models_are_pickled_and_copied(model):
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)  # fp8 has no pickles
    expected = model["head"](X)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(other["head"](X), expected)
        assert other["head"].weight.dtype is torch.bfloat16


def test_only_floating_point_dtypes_are_taken():
    with pytest.raises(ValueError, match=r"torch.int8 is no floating-point dtype"):
        LayerwiseCastingHook(torch.int8, torch.float32)
