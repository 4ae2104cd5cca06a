"""Units of a model: blocks, layers outside of them, and single tensors."""

from __future__ import annotations

import torch
from torch import nn

from accel_callbacks.models.offload.weights import parts
from accel_callbacks.offload import Unit, Weights
from tests.support.random_trees import case


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.mlp = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.register_buffer("table", torch.zeros(2))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(5, 3)
        self.drop = nn.Dropout()
        self.h = nn.ModuleList(Block() for _ in range(11))
        self.ln_f = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.wte.weight
        self.bias = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))


def test_a_model_is_cut_into_blocks_layers_and_single_tensors() -> None:
    weights = Weights.of_model(Language())
    named = {unit.name: unit for unit in weights.units}
    expected = ["bias", "wte", "drop", *(f"h.{n}" for n in range(11)), "ln_f", "head", "mask"]
    assert list(named) == expected
    assert named["h.3"] == Unit("h.3", 60, 8)
    assert named["wte"] == Unit("wte", 60, ties=("wte.weight",))
    assert named["head"] == Unit("head", 0, shared=60, ties=("wte.weight",))
    assert named["mask"] == Unit("mask", 0, 4)
    held = sum(t.nbytes for t in [*Language().parameters(), *Language().buffers()])
    assert weights.nbytes == held


def test_a_model_on_the_meta_device_has_the_same_units() -> None:
    with torch.device("meta"):
        empty = Language()
    assert Weights.of_model(empty) == Weights.of_model(Language())


def test_classes_that_are_not_split_are_the_models_or_given() -> None:
    model = Language()
    split = Weights.of_model(model, no_split=[])
    assert {"h.0.scale", "h.0.mlp.0", "h.0.table"} <= {unit.name for unit in split.units}
    model._no_split_modules = ["Sequential"]  # what the model says comes before what is repeated
    assert "h.0.mlp" in {unit.name for unit in Weights.of_model(model).units}
    assert "h" in {unit.name for unit in Weights.of_model(model, "ModuleList").units}


def test_dtypes_are_those_after_the_load() -> None:
    half = Weights.of_model(Language(), dtype="bfloat16", special_dtypes={"bias": torch.float32})
    named = {unit.name: unit for unit in half.units}
    assert named["h.0"] == Unit("h.0", 30, 4)
    assert (named["bias"].nbytes, named["mask"].nbytes) == (8, 4)


def test_no_tensor_is_in_two_units_or_in_none() -> None:
    for seed in range(40):
        model = case(seed).model
        found: list[int] = []
        for part in parts(model, ["Whole"]):
            found += {id(tensor) for tensor in part.tensors}
        own = [t for m in model.modules() for t in [*m._parameters.values(), *m._buffers.values()]]
        assert set(found) == {id(t) for t in own}
        total = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
        assert Weights.of_model(model, ["Whole"]).nbytes == total


def test_each_name_of_a_tensor_is_a_unit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.first = nn.Parameter(torch.ones(3))
    model.second = model.first
    units = {unit.name: unit for unit in Weights.of_model(model).units}
    assert (units["first"].nbytes, units["second"].nbytes) == (12, 0)
    assert units["first"].ties == units["second"].ties == ("first",)
