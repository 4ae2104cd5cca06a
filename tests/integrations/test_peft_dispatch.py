"""Adapters of the real peft on dispatched bases, which it knows by `_hf_hook`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import dispatch_model, load_checkpoint_and_dispatch
from accel_callbacks.compat import hooks
from accel_callbacks.models.offload.placeholder import AbsentWeight
from checkpoint_io import save_model

peft = pytest.importorskip("peft", reason="peft is not installed: scripts/test_adapters")

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our classes and functions where peft looks for Accelerate's."""
    monkeypatch.setattr("peft.tuners.tuners_utils.AlignDevicesHook", hooks.AlignDevicesHook)
    for name in ("AlignDevicesHook", "add_hook_to_module", "remove_hook_from_submodules"):
        monkeypatch.setattr(f"peft.peft_model.{name}", getattr(hooks, name))
    monkeypatch.setattr("peft.peft_model.dispatch_model", dispatch_model)


def body() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)
    )


@pytest.fixture
def base(tmp_path: Path) -> torch.nn.Module:
    save_model(body().state_dict(), tmp_path / "base")
    return load_checkpoint_and_dispatch(body(), tmp_path / "base", {"": "disk"})


def adapted(base: torch.nn.Module, **options: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False, **options)
    return peft.get_peft_model(base, config)


def test_an_adapter_is_merged(base: torch.nn.Module) -> None:
    expected = adapted(body()).merge_and_unload()(X)
    merged = adapted(base).merge_and_unload()
    assert torch.equal(merged(X), expected)
    assert isinstance(merged[3].weight, AbsentWeight)
    hooks.remove_hook_from_submodules(merged)
    assert torch.equal(merged(X), expected)


def test_an_adapter_is_merged_and_taken_out_again(base: torch.nn.Module) -> None:
    plain, model = adapted(body()), adapted(base)
    for one in (plain, model):
        one.merge_adapter()
    assert torch.equal(model(X), plain(X))
    for one in (plain, model):
        one.unmerge_adapter()
    assert torch.equal(model(X), plain(X))


def test_a_saved_adapter_is_loaded_onto_it(
    base: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # peft writes the base once more, with its own names, to a path that it makes relative.
    monkeypatch.chdir(tmp_path)
    plain = adapted(body())
    plain.save_pretrained(tmp_path / "adapter")
    base._no_split_modules = []  # type: ignore[assignment]
    model = peft.PeftModel.from_pretrained(
        base, tmp_path / "adapter", device_map={"": "disk"}, offload_dir=tmp_path / "folder"
    )
    assert torch.equal(model(X), plain(X))
    assert not (tmp_path / "folder").exists()  # what is on disk is read from peft's file
    assert isinstance(model.base_model.model[3].weight, AbsentWeight)
