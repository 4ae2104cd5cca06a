"""Single tensors of a module: set, aligned, tied, and collected."""

from __future__ import annotations

import copy

import pytest
import torch

from accel_callbacks.compat import tensors
from accel_callbacks.compat.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
)
from accel_callbacks.compat.tensors import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    id_tensor_storage,
    recursive_getattr,
    retie_parameters,
    set_module_tensor_to_device,
)
from accel_callbacks.models.offload import assignment
from accel_callbacks.models.offload.assignment import device_of
from accel_callbacks.models.offload.placeholder import AbsentWeight, AbsentWeightError


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


class Kept(torch.nn.Parameter):
    """A parameter of a class of its own, whose constructor takes what it has noted."""

    def __new__(cls, data, requires_grad=True, note=None):
        new = torch.Tensor._make_subclass(cls, data, requires_grad)
        new.note = note
        return new


def test_a_tensor_gets_values_in_its_own_dtype(model):
    model.half()
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 2))
    assert model[0].weight.dtype is torch.float16
    assert isinstance(model[0].weight, torch.nn.Parameter)
    assert model[0].weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_a_tensor_gets_the_dtype_that_is_asked_for(model, dtype):
    set_module_tensor_to_device(model, "0.weight", "cpu", dtype=dtype)
    set_module_tensor_to_device(model, "0.bias", "cpu", value=torch.ones(2), dtype=dtype)
    count = torch.ones((), dtype=torch.int64)
    set_module_tensor_to_device(model, "1.num_batches_tracked", "cpu", value=count, dtype=dtype)
    assert (model[0].weight.dtype, model[0].bias.dtype) == (torch.bfloat16,) * 2
    assert model[1].num_batches_tracked.dtype is torch.int64


def test_a_buffer_stays_a_buffer(model):
    set_module_tensor_to_device(model, "1.running_mean", "cpu", value=torch.ones(2))
    assert "running_mean" in dict(model[1].named_buffers())
    assert model[1].running_mean.tolist() == [1, 1]


def test_a_tensor_that_is_there_stays_the_same_object(model):
    weight = model[0].weight
    set_module_tensor_to_device(model, "0.weight", "cpu")
    assert model[0].weight is weight


def test_on_meta_a_tensor_raises_with_its_name_and_comes_back(model):
    weight = model[0].weight.detach().clone()
    model[0].weight.requires_grad_(False)._is_hf_initialized = True
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert model[0].weight.device == torch.device("meta")
    assert isinstance(model[0].weight, torch.nn.Parameter)
    with pytest.raises(AbsentWeightError, match=r"0\.weight is on the meta device"):
        model(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"0\.weight has no values: give `value`"):
        set_module_tensor_to_device(model, "0.weight", "cpu")
    set_module_tensor_to_device(model, "0.weight", "cpu", value=weight)
    assert torch.equal(model[0].weight, weight)
    assert not model[0].weight.requires_grad
    assert model[0].weight._is_hf_initialized


def test_on_meta_a_dtype_counts_too(model):
    set_module_tensor_to_device(model, "0.weight", "meta", dtype=torch.float16)
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert model[0].weight.dtype is torch.float16


def test_a_parameter_keeps_its_class_and_what_it_has_noted(model):
    model[0].weight = Kept(torch.zeros(2, 2), note="mine")
    for absent in (False, True):
        if absent:
            set_module_tensor_to_device(model, "0.weight", "meta")
        set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 2))
        assert type(model[0].weight) is Kept
        assert (model[0].weight.note, model[0].weight.tolist()) == ("mine", [[1, 1], [1, 1]])


@pytest.mark.parametrize("name", ["weight", "0.no", "7.weight", "0.weight.x"])
def test_a_name_that_is_not_there_raises(model, name):
    with pytest.raises(ValueError, match="no parameter or buffer named"):
        set_module_tensor_to_device(model, name, "cpu")


def test_values_of_another_shape_raise(model):
    with pytest.raises(ValueError, match=r"0\.weight has shape \(2, 2\).* \(3,\)"):
        set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(3))


def test_a_tied_copy_is_used_and_noted(model):
    weight, copy_of_it = model[0].weight, torch.nn.Parameter(torch.ones(2, 2))
    known = {weight.data_ptr(): {"cpu": copy_of_it}}
    set_module_tensor_to_device(model, "0.weight", "cpu", tied_params_map=known)
    assert model[0].weight is copy_of_it
    value = torch.zeros(2, 2)
    known = {value.data_ptr(): {}}
    set_module_tensor_to_device(model, "0.weight", "cpu", value=value, tied_params_map=known)
    assert known[value.data_ptr()]["cpu"] is model[0].weight


def test_the_cache_is_emptied_only_if_asked_for(model, monkeypatch):
    emptied = []
    monkeypatch.setattr(tensors, "clear_device_cache", lambda: emptied.append(1))
    monkeypatch.setattr(tensors, "device_of", lambda place: torch.device("cuda"))
    monkeypatch.setattr(tensors, "new_like", lambda old, value, device: old)
    set_module_tensor_to_device(model, "0.weight", 0)
    assert emptied == []
    set_module_tensor_to_device(model, "0.weight", 0, clear_cache=True)
    assert emptied == [1]


def test_a_number_is_an_accelerator(monkeypatch):
    monkeypatch.setattr(assignment, "own_accelerator", lambda: torch.device("cuda"))
    assert device_of(1) == torch.device("cuda:1")
    monkeypatch.setattr(assignment, "own_accelerator", lambda: None)
    with pytest.raises(ValueError, match="there is no accelerator 1"):
        device_of(1)


def test_parameters_are_tied_again(model):
    other = torch.nn.Linear(2, 2, device="meta")
    both = torch.nn.ModuleDict({"a": other, "b": model[0]})
    retie_parameters(both, [["a.weight", "b.weight"]])
    assert both["a"].weight is both["b"].weight
    assert not both["a"].weight.is_meta
    empty = torch.nn.Sequential(other, other)
    retie_parameters(empty, [["0.bias", "1.bias"]])  # nothing to tie to


def test_parameters_of_different_shapes_are_not_tied():
    both = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3))
    before = [one.weight for one in both]
    with pytest.raises(ValueError, match="different shapes"):
        retie_parameters(both, [["0.bias", "0.bias"], ["0.weight", "1.weight"]])
    assert all(one.weight is old for one, old in zip(both, before, strict=True))


def test_an_offloading_hook_is_found_in_a_chain(model):
    hook = AlignDevicesHook("cpu", offload=True)
    add_hook_to_module(model[0], SequentialHook(ModelHook(), hook))
    assert has_offloaded_params(model[0])
    assert not has_offloaded_params(model)
    assert not has_offloaded_params(add_hook_to_module(model[1], AlignDevicesHook("cpu")))


def test_aligned_weights_are_there_and_go_again(model):
    expected = model[0].weight.detach().clone()
    attach_align_device_hook(model, "meta", offload=True)
    with align_module_device(model[0], "cpu"):
        assert torch.equal(model[0].weight, expected)
    assert isinstance(model[0].weight, AbsentWeight)
    assert model[0]._hf_hook.execution_device == "meta"
    with align_module_device(model[0]):
        assert model[0].weight.is_meta
        assert not isinstance(model[0].weight, AbsentWeight)


def test_changes_of_aligned_weights_are_kept(model):
    state = {name: one.clone() for name, one in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, weights_map=state)
    with torch.no_grad(), align_module_device(model[0], "cpu"):
        model[0].weight.fill_(7)

    def stop():
        model[0].bias.fill_(8)
        raise OSError("stop")

    with pytest.raises(OSError, match="stop"), torch.no_grad(), align_module_device(model[0]):
        stop()
    assert isinstance(model[0].weight, AbsentWeight)
    found = model.state_dict()
    assert (found["0.weight"].unique().item(), found["0.bias"].unique().item()) == (7, 8)


def test_a_module_without_hooks_is_moved_and_keeps_its_parameters(model, monkeypatch):
    """A dtype plays the other device."""
    weight, bias = model[0].weight, model[0].bias

    def other_device(module, name, device):
        module._parameters[name] = torch.nn.Parameter(module._parameters[name].detach().double())

    monkeypatch.setattr(tensors, "set_module_tensor_to_device", other_device)
    with torch.no_grad(), align_module_device(model[0], "cpu"):
        assert model[0].weight.dtype is torch.float64
        model[0].weight.fill_(5)
    assert model[0].weight is weight
    assert model[0].bias is bias
    assert weight.unique().tolist() == [5]
    with align_module_device(model[0]):
        assert model[0].weight is weight


def test_a_module_without_values_cannot_be_aligned():
    layer = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(AbsentWeightError, match="weight of Linear has no values"):
        with align_module_device(layer, "cpu"):
            pass


def test_the_state_dict_has_the_parameters_of_the_root():
    class Root(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.own = torch.nn.Parameter(torch.ones(2))
            self.layer = torch.nn.Linear(2, 2)

    model = Root()
    state = {name: one.clone() for name, one in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True)
    found = get_state_dict_offloaded_model(model)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], one) for name, one in state.items())


def test_a_state_dict_without_values_raises():
    with pytest.raises(AbsentWeightError, match="weight has no values"):
        get_state_dict_offloaded_model(torch.nn.Linear(2, 2, device="meta"))


def test_a_state_dict_that_does_not_fit_says_so(model, monkeypatch):
    attach_align_device_hook(model, "cpu", offload=True)

    def full(module):
        raise MemoryError

    monkeypatch.setattr(model[0]._hf_hook, "pre_forward", full)
    with pytest.raises(MemoryError, match="must fit the CPU's memory"):
        get_state_dict_offloaded_model(model)


@pytest.mark.parametrize("offload", [False, True])
def test_entries_of_one_module_are_filled(model, offload):
    weight = model[0].weight.detach().clone()
    if offload:
        attach_align_device_hook(model, "cpu", offload=True)
    state = {"head.weight": "", "other.weight": ""}
    assert get_state_dict_from_offload(model[0], "head.weight", state) is state
    assert torch.equal(state["head.weight"], weight)
    assert state["other.weight"] == ""
    bare = get_state_dict_from_offload(model[0], "weight", {"weight": ""})
    assert torch.equal(bare["weight"], weight)


def test_paths_and_storages():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    assert recursive_getattr(model, "0.weight") is model[0].weight
    weight = model[0].weight
    assert id_tensor_storage(weight) == id_tensor_storage(weight[1])
    assert id_tensor_storage(weight) != id_tensor_storage(copy.deepcopy(weight))
