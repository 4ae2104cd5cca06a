"""Models over several devices: inputs move to each part, outputs come back to the caller."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import cpu_offload, dispatch_model
from tests.accel_callbacks.models.offload.small_model import Small, tokens, trained
from tests.support.fake_devices import fake_devices

ZERO, ONE, CPU = torch.device("ipu:0"), torch.device("ipu:1"), torch.device("cpu")


@pytest.fixture(autouse=True)
def _devices() -> Iterator[None]:
    with fake_devices():
        yield


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "ipu:0", "blocks.1": "ipu:1"},
        {"": "ipu:1", "blocks": "ipu:0", "head": "ipu:0"},
        {"emb": ZERO, "position": ZERO, "blocks.0": ONE, "blocks": ZERO, "head": ONE},
    ],
    ids=lambda one: "-".join(f"{name}={place}" for name, place in one.items()),
)
def test_parts_on_devices(device_map: dict[str, Any]) -> None:
    wanted = trained()(tokens())
    model = trained()
    model = dispatch_model(model, device_map)
    for _ in range(2):
        output = model(tokens())
        assert output.device == CPU
        assert torch.equal(output, wanted)
    assert model.head.weight is model.emb.weight
    assert model.scale.device == torch.device(device_map.get("", "ipu:0"))


def test_where_parts_are() -> None:
    model = dispatch_model(trained(), {"": "ipu:0", "blocks.1": "ipu:1"})
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.device == (ONE if name.startswith("blocks.1.") else ZERO), name


def test_a_module_whose_tied_weight_is_elsewhere_runs_there() -> None:
    model = dispatch_model(trained(), {"": "ipu:0", "head": "ipu:1"})
    assert model.head.bias.device == model.head.weight.device == ZERO


def test_the_output_is_where_the_input_was() -> None:
    model = dispatch_model(trained(), {"": "ipu:0", "blocks.1": "ipu:1"})
    assert model(tokens().to("ipu:1")).device == ONE


def test_a_model_on_one_device_has_no_hooks() -> None:
    model = dispatch_model(trained(), {"": "ipu:0", "blocks.1": "ipu:1"})
    assert model._forward_pre_hooks
    assert model.blocks[1].norm._forward_pre_hooks
    model = dispatch_model(trained(), {"": "ipu:0", "blocks": torch.device("ipu:0")})
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not dispatch_model(trained(), {"": "ipu:0"})._forward_pre_hooks


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, cache: Any = None, seen: Any = None) -> Any:
        seen.append(cache["x"].device)
        return {"x": self.second(self.first(x)), "cache": cache["x"].to("ipu:1")}


@pytest.mark.parametrize("skip_keys", [None, "cache", ["cache"]], ids=str)
def test_keys_that_are_skipped(skip_keys: Any) -> None:
    model = dispatch_model(Cached(), {"first": "ipu:0", "second": "ipu:1"}, skip_keys=skip_keys)
    seen: list[torch.device] = []
    x = torch.ones(1, 2)
    output = model(x, cache={"x": x}, seen=seen)
    assert output["x"].device == CPU
    assert output["cache"].device == (CPU if skip_keys is None else ONE)
    assert seen == [ZERO if skip_keys is None else CPU]  # the list is the caller's own


def test_moves_are_warned_of() -> None:
    model = dispatch_model(trained(), {"": "ipu:0", "blocks.1": "ipu:1"})
    with pytest.warns(UserWarning, match="You shouldn't move a model"):
        model.to("ipu:0")
    model.to(torch.float32)


def test_copies_have_hooks_of_their_own() -> None:
    wanted = trained()(tokens())
    model = dispatch_model(trained(), {"": "ipu:0", "blocks.1": "ipu:1"})
    copy = deepcopy(model)
    assert copy.to.args[0] is copy
    del model
    assert torch.equal(copy(tokens()), wanted)


def test_after_a_forward_that_raises() -> None:
    model = dispatch_model(trained(), {"": "ipu:0", "blocks.1": "ipu:1"})
    with pytest.raises(IndexError):
        model(torch.full((1, 1), 99).to("ipu:1"))
    assert model(tokens()).device == CPU


def test_hooks_pickle() -> None:
    model = dispatch_model(Small(), {"": "cpu"}, force_hooks=True)
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens()), model(tokens()))


def test_shapes_on_meta() -> None:
    """Held weights go through the window to another device."""
    model = cpu_offload(trained(), "meta", preload_module_classes=["Block"])
    output = model(tokens().to("meta"))
    assert output.is_meta
    assert output.shape == (2, 7, 20)


def test_an_optimizer_keeps_the_parameters_of_parts_that_stay(tmp_path: Path) -> None:
    model = trained()
    optimizer = torch.optim.SGD(model.parameters())
    dispatch_model(model, {"": "cpu", "blocks": "disk"}, offload_dir=tmp_path)
    assert any(model.position is one for one in optimizer.param_groups[0]["params"])
