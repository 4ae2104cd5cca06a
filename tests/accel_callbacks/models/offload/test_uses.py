"""Hooks, folders and tensors as peft, diffusers and transformers use them, without them."""

from __future__ import annotations

import copy
import inspect
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_callbacks import init_empty_weights
from accel_callbacks.utils import (
    AlignDevicesHook,
    CpuOffload,
    OffloadedWeightsLoader,
    add_hook_to_module,
    attach_align_device_hook,
    cpu_offload_with_hook,
    get_state_dict_from_offload,
    load_offloaded_weights,
    offload_weight,
    remove_hook_from_module,
    remove_hook_from_submodules,
    save_offload_index,
    set_module_tensor_to_device,
)

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


def block() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval()


def test_diffusers_fills_a_model_that_was_built_without_weights():
    """``load_model_dict_into_meta``: by name, in a dtype, with checks of shapes."""
    state = block().half().state_dict()
    with init_empty_weights():
        model = block()
    for name, tensor in state.items():
        takes = set(inspect.signature(set_module_tensor_to_device).parameters)
        options = {"dtype": torch.float32} if "dtype" in takes else {}
        set_module_tensor_to_device(model, name, "cpu", value=tensor, **options)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert torch.allclose(model(X), block().half().float()(X))


def test_diffusers_keeps_weights_for_later_in_a_temporary_folder(tmp_path):
    state, index = block().state_dict(), {}
    for name, tensor in state.items():
        index = offload_weight(tensor, name, tmp_path, index)
    save_offload_index(index, tmp_path)
    with init_empty_weights():
        model = block()
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert torch.equal(model(X), block()(X))


def test_diffusers_takes_hooks_off_and_puts_others_on():
    """``enable_model_cpu_offload`` after ``enable_sequential_cpu_offload``."""
    model, expected = block(), block()(X)
    attach_align_device_hook(model, "cpu", offload=True)
    found = [type(one._hf_hook) for one in model.modules() if hasattr(one, "_hf_hook")]
    assert found == [AlignDevicesHook] * 2
    remove_hook_from_module(model, recurse=True)
    model, hook = cpu_offload_with_hook(model, "cpu")
    assert isinstance(model._hf_hook, CpuOffload)
    assert torch.equal(model(X), expected)
    hook.remove()


def test_diffusers_finds_where_a_model_runs():
    """``_execution_device``: of the first module whose hook has one."""
    model = block()
    attach_align_device_hook(model, torch.device("cpu"), offload=True)
    devices = [
        torch.device(one._hf_hook.execution_device)
        for one in model.modules()
        if getattr(getattr(one, "_hf_hook", None), "execution_device", None) is not None
    ]
    assert devices[0] == torch.device("cpu")


def test_transformers_saves_a_model_whose_weights_are_away():
    """``save_pretrained``: entry by entry, through the module that holds it."""
    model, expected = block(), block().state_dict()
    attach_align_device_hook(model, "cpu", offload=True)
    for name, module in model.named_modules():
        wanted = {f"{name}.{key}": "" for key in module._parameters} if name else {}
        for full in wanted:
            found = get_state_dict_from_offload(module, full, {full: ""})
            assert torch.equal(found[full], expected[full])


@pytest.mark.parametrize("how", ["memory", "safetensors"])
def test_peft_changes_an_offloaded_layer_between_two_forwards(tmp_path, how):
    """``onload_layer``: fetches by hand, changes ``data``, and hands over a new map."""
    model, index = block(), None
    if how == "safetensors":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        file = str(tmp_path / "model.safetensors")
        index = {name: {"safetensors_file": file} for name in model.state_dict()}
        with init_empty_weights():
            model = block()
    loader = None if index is None else OffloadedWeightsLoader(index=index)
    attach_align_device_hook(model, "cpu", offload=True, weights_map=loader)
    hook = model[0]._hf_hook
    away = torch.device("meta") in hook.original_devices.values()
    assert away is (how == "safetensors")
    assert away is hasattr(hook.weights_map, "dataset")
    if away:
        name = next(iter(dict(hook.weights_map.dataset).keys()))
        assert hook.weights_map.dataset.index[name]["safetensors_file"] == file
    hook.pre_forward(model[0])
    model[0].weight.data = model[0].weight.data + 1
    hook.weights_map = {name: one.to("cpu") for name, one in model[0].named_parameters()}
    hook.post_forward(model[0], torch.tensor([]))
    plain = block()
    plain[0].weight.data += 1
    for _ in range(2):
        assert torch.equal(model(X), plain(X))
    if away:
        assert torch.equal(load_file(file)["0.weight"], block()[0].weight)


def test_peft_makes_a_hook_of_its_own_for_a_copy():
    """``ModulesToSaveWrapper``: a copy with the hook's arguments, taken from its attributes."""
    layer = block()[0]
    expected = layer(X)
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    other = copy.deepcopy(layer)
    old = other._hf_hook
    names = [name for name in inspect.signature(type(old).__init__).parameters if name != "self"]
    new = type(old)(**{name: getattr(old, name) for name in names})
    remove_hook_from_module(other)
    add_hook_to_module(other, new)
    assert torch.equal(other(X), expected)
    remove_hook_from_submodules(other)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(layer(X), expected)
