"""Adapters of the real peft on bases whose weights are offloaded by our hooks."""

from __future__ import annotations

import copy

import pytest
import torch

from accel_callbacks.compat import hooks
from accel_callbacks.compat.folder import OffloadedWeightsLoader, offload_state_dict
from accel_callbacks.compat.tensors import has_offloaded_params
from accel_callbacks.models.offload.placeholder import AbsentWeight

peft = pytest.importorskip("peft", reason="peft is not installed: scripts/test_adapters")

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes that peft looks for; what it calls of Accelerate's functions stays theirs."""
    monkeypatch.setattr("peft.tuners.tuners_utils.AlignDevicesHook", hooks.AlignDevicesHook)


def body() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)
    )


def adapted(base: torch.nn.Module, **options) -> peft.PeftModel:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False, **options)
    return peft.get_peft_model(base, config)


@pytest.fixture(params=["memory", "folder"])
def offloaded(request, tmp_path):
    base, weights = body(), None
    if request.param == "folder":
        offload_state_dict(tmp_path, base.state_dict())
        weights = OffloadedWeightsLoader(save_folder=tmp_path)
    hooks.attach_align_device_hook(base, "cpu", offload=True, weights_map=weights)
    return base


def test_an_adapter_trains_as_on_a_resident_base(offloaded):
    plain, model = adapted(body()), adapted(offloaded)
    assert isinstance(model.base_model.model[0].base_layer.weight, AbsentWeight)
    for one in (plain, model):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            one(X).square().sum().backward()
            optimizer.step()
    trained = dict(plain.named_parameters())
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(found) == 4
    for name, parameter in found.items():
        assert torch.equal(parameter, trained[name]), name
        assert torch.equal(parameter.grad, trained[name].grad), name


def test_an_adapter_is_merged_into_an_offloaded_base(offloaded):
    expected = adapted(body()).merge_and_unload()(X)
    merged = adapted(offloaded).merge_and_unload()
    assert has_offloaded_params(merged[0])
    assert torch.equal(merged(X).detach(), expected)
    hooks.remove_hook_from_submodules(merged)
    assert torch.equal(merged(X), expected)


def test_a_trained_copy_of_an_offloaded_module_has_weights_of_its_own(offloaded):
    before = copy.deepcopy(offloaded.state_dict())
    model = adapted(offloaded, modules_to_save=["3"])
    plain = adapted(body(), modules_to_save=["3"])
    assert torch.equal(model(X), plain(X))
    name = "base_model.model.3.original_module.weight"
    assert torch.equal(model.state_dict()[name], before["3.weight"])


def test_an_adapter_of_an_offloaded_base_is_saved_and_loaded(offloaded, tmp_path):
    expected = adapted(body())(X)
    adapted(offloaded).save_pretrained(tmp_path / "adapter")
    assert sorted(one.suffix for one in (tmp_path / "adapter").iterdir()) == [
        ".json", ".md", ".safetensors",
    ]  # fmt: skip
    again = peft.PeftModel.from_pretrained(body(), tmp_path / "adapter")
    assert torch.equal(again(X), expected)
