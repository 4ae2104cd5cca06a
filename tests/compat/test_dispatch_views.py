"""Dispatched modules as peft, transformers and diffusers look at them."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accel_callbacks.models.offload.placeholder import AbsentWeight
from accel_callbacks.utils import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    align_module_device,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from tests.accel_callbacks.models.offload.small_model import Small, empty, saved, tokens, trained
from tests.accel_callbacks.models.offload.test_dispatch import absent, files, same


@pytest.fixture(params=["disk", "held"])
def offloaded(request: pytest.FixtureRequest, tmp_path: Path) -> Small:
    if request.param == "held":
        return cpu_offload(trained())
    return load_checkpoint_and_dispatch(empty(), saved(tmp_path / "checkpoint"), {"": "disk"})


def test_attributes(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    model = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk", "blocks.0": "cpu"})
    hook = model.blocks[1].up._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    assert has_offloaded_params(model.blocks[1].up)
    assert not has_offloaded_params(model.blocks[0].up)
    assert hook.execution_device == torch.device("cpu")
    assert hook.original_devices == dict.fromkeys(("weight", "bias"), torch.device("meta"))
    assert torch.equal(hook.weights_map["bias"], trained().blocks[1].up.bias)
    assert sorted(hook.weights_map) == ["bias", "weight"]
    assert model._hf_hook.io_same_device
    assert not hook.io_same_device
    hook.io_same_device = True  # as transformers does for an encoder
    assert model.blocks[1].up._hf_hook.io_same_device
    assert model._hf_hook.skip_keys is None
    model._hf_hook.skip_keys = "cache"
    assert model._hf_hook.skip_keys == ["cache"]
    assert same(model)


def test_nothing_of_a_dispatch_is_left_by_one_that_keeps_all_in_memory(tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), saved(tmp_path), {"": "disk"})
    plain = {name for module in trained().modules() for name in vars(module)}
    dispatch_model(model, {"": "cpu"})
    left = {name for module in model.modules() for name in vars(module)} - plain
    assert left == {"hf_device_map"}
    assert same(model.double().float())


def test_an_index_made_of_the_attributes(tmp_path: Path) -> None:
    """As peft's `from_pretrained` does, which takes the hooks off in between."""
    model = load_checkpoint_and_dispatch(empty(), saved(tmp_path / "one"), {"": "disk"})
    on_disk, index = [], None
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook") and hasattr(module._hf_hook, "original_devices"):
            if hasattr(module._hf_hook.weights_map, "dataset"):
                index = module._hf_hook.weights_map.dataset.index
            for key, device in module._hf_hook.original_devices.items():
                if device == torch.device("meta"):
                    on_disk.append(f"{name}.{key}".lstrip("."))
    assert index is not None
    weights = dict(model.named_parameters())
    offload_index = {
        name: {
            "safetensors_file": index[name]["safetensors_file"],
            "weight_name": name,
            "dtype": str(weights[name].dtype).replace("torch.", ""),
        }
        for name in weights
        if name in on_disk
    }
    remove_hook_from_submodules(model)
    assert same(model)
    assert same(dispatch_model(model, {"": "disk"}, offload_index=offload_index))
    assert "emb.weight" in absent(model)


def test_hooks_are_removed(offloaded: Small, tmp_path: Path) -> None:
    assert absent(offloaded)
    remove_hook_from_submodules(offloaded)
    assert absent(offloaded) == []
    for module in offloaded.modules():
        assert not {"_hf_hook", "_offload_hook", "_align_hook", "_call_impl"} & vars(module).keys()
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert offloaded.head.weight is offloaded.emb.weight
    assert same(offloaded)
    assert offloaded.to(torch.float64).position.dtype is torch.float64


def test_weights_that_come_back_are_not_written_again(tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), saved(tmp_path / "one"), {"": "disk"})
    remove_hook_from_submodules(model)
    folder = tmp_path / "folder"
    assert same(dispatch_model(model, {"": "disk"}, offload_dir=folder))
    assert not folder.exists()
    remove_hook_from_submodules(model)
    model.position.data += 1  # a write that autograd does not count
    reference = deepcopy(model)
    model = dispatch_model(model, {"": "disk"}, offload_dir=folder)
    assert same(model, reference)
    assert sum(map(os.path.getsize, files(folder))) < 8192


def test_one_module_is_taken_out(offloaded: Small) -> None:
    remove_hook_from_module(offloaded.blocks[1].up)
    gone = {"blocks.1.up.weight", "blocks.1.up.bias"}
    assert gone.isdisjoint(absent(offloaded))
    assert "blocks.1.down.weight" in absent(offloaded)
    assert same(offloaded)


def test_weights_are_read_in_place(offloaded: Small) -> None:
    up = offloaded.blocks[0].up
    stands = up.weight
    with align_module_device(up, "cpu"):
        assert torch.equal(up.weight, trained().blocks[0].up.weight)
        assert offloaded.head.weight is offloaded.emb.weight
    assert up.weight is stands
    assert same(offloaded)


@pytest.mark.parametrize("by_data", [False, True])
def test_weights_are_changed_in_place(offloaded: Small, by_data: bool) -> None:
    wanted = trained()
    for model in (wanted, offloaded):
        up = model.blocks[0].up
        with align_module_device(up, "cpu"), torch.no_grad():
            if by_data:
                up.weight.data += 1
            else:
                up.weight.add_(1)
    assert same(offloaded, wanted)
    assert torch.equal(offloaded.state_dict()["blocks.0.up.weight"], wanted.blocks[0].up.weight)
    assert offloaded.blocks[0].up.weight.weight_place == "in host memory"
    assert isinstance(offloaded.blocks[0].up.bias, AbsentWeight)
    assert same(deepcopy(offloaded), wanted)


def test_a_tied_weight_is_changed_in_place(offloaded: Small) -> None:
    wanted = trained()
    with torch.no_grad():
        wanted.emb.weight.add_(1)
        with align_module_device(offloaded.head):
            offloaded.head.weight.add_(1)
    assert offloaded.head.weight is offloaded.emb.weight
    assert same(offloaded, wanted)


def test_merged_weights_as_peft_stores_them(offloaded: Small) -> None:
    """It merges between the hook's two calls, and sets another map of weights."""
    wanted = trained()
    wanted.blocks[2].down.weight.data += 0.5
    base = offloaded.blocks[2].down
    hook: Any = base._hf_hook
    hook.pre_forward(base)
    base.weight.data += 0.5
    hook.weights_map = {name: one.to("cpu") for name, one in base.named_parameters()}
    hook.post_forward(base, torch.tensor([]))
    assert same(offloaded, wanted)
    assert hasattr(hook.weights_map, "dataset")


class Scaled(ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return output * 2


def test_further_hooks(offloaded: Small) -> None:
    add_hook_to_module(offloaded, Scaled(), append=True)
    add_hook_to_module(offloaded.head, Scaled(), append=True)
    with torch.no_grad():
        assert torch.equal(offloaded(tokens()), trained()(tokens()) * 4)
    add_hook_to_module(offloaded.blocks[0], AlignDevicesHook(io_same_device=True))
    with torch.no_grad():
        assert torch.equal(offloaded(tokens()), trained()(tokens()) * 4)
    remove_hook_from_submodules(offloaded)
    assert same(offloaded)


def test_copies_have_views_of_their_own(offloaded: Small) -> None:
    copy = deepcopy(offloaded)
    with align_module_device(copy.blocks[0].up), torch.no_grad():
        copy.blocks[0].up.weight.add_(1)
    assert same(offloaded)
    assert not same(copy)
    remove_hook_from_submodules(copy)
    assert absent(copy) == []
    assert same(offloaded)


def test_a_folder_of_raw_files_is_told_as_such(tmp_path: Path) -> None:
    from tests.accel_callbacks.models.offload.test_dispatch import accelerates_folder

    accelerates_folder(tmp_path / "folder", trained())
    model = disk_offload(empty(), tmp_path / "folder", offload_buffers=True)
    index = model.head._hf_hook.weights_map.dataset.index
    assert index["head.bias"] == {"dtype": "float32", "shape": [20]}


def test_a_hook_that_is_entered_twice_keeps_the_weights_until_it_is_left_twice(
    offloaded: Small,
) -> None:
    up = offloaded.blocks[0].up
    hook = up._hf_hook
    for _ in range(2):
        hook.pre_forward(up)
    hook.post_forward(up, None)
    assert torch.equal(up.weight, trained().blocks[0].up.weight)
    hook.post_forward(up, None)
    assert isinstance(up.weight, AbsentWeight)


def test_a_hook_fetches_for_its_own_module_alone(offloaded: Small) -> None:
    up, down = offloaded.blocks[0].up, offloaded.blocks[0].down
    up._hf_hook.pre_forward(down)
    assert isinstance(down.weight, AbsentWeight)
    up._hf_hook.pre_forward(up)
    assert torch.equal(up.weight, trained().blocks[0].up.weight)


def test_a_tied_weight_stays_with_the_others_if_one_of_them_drops_it(offloaded: Small) -> None:
    head = offloaded.head
    head._hf_hook.pre_forward(head)
    head._parameters["weight"] = None
    head._hf_hook.post_forward(head, None)
    assert not isinstance(offloaded.emb.weight, AbsentWeight)
    assert torch.equal(offloaded.emb(tokens()), trained().emb(tokens()))
