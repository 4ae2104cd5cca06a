"""Units of a model, and of stored tensors by their names alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import checkpoint_io
from accel_callbacks.models.offload.weights import parts
from accel_callbacks.offload import Unit, Weights, plan
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


def test_headers_alone_give_the_units_of_the_model(tmp_path: Path) -> None:
    model = Language()
    checkpoint_io.save_model(model.state_dict(), tmp_path)
    stored, real = Weights.of_checkpoint(tmp_path), Weights.of_model(model)
    sizes = {unit.name: unit.nbytes for unit in real.units if unit.nbytes or unit.shared}
    assert {unit.name: unit.nbytes for unit in stored.units} == sizes
    head = next(unit for unit in stored.units if unit.name == "head")
    assert (head.parameters, head.shared) == (0, 60)
    assert plan(stored, {0: 100, "cpu": 900}, prefetch=0).explain("head").count("tied to wte") == 1
    assert plan(stored, {"cpu": 300}, prefetch=0).device_map["head"] == "cpu"
    half = Weights.of_checkpoint(tmp_path / "model.safetensors", "float16")
    assert half.nbytes < stored.nbytes


def test_no_data_is_read(tmp_path: Path) -> None:
    """The bytes of the tensors may be absent from the disk: a sparse file has only a header."""
    path = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.zeros(1 << 18)}, path)
    header = path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    wide = header.replace(b"1048576", b"%d" % (1 << 40)).replace(b"262144", b"%d" % (1 << 38))
    wide = (len(wide) - 8).to_bytes(8, "little") + wide[8:]
    with open(path, "wb") as file:
        file.write(wide)
        file.truncate(len(wide) + (1 << 40))
    assert Weights.of_checkpoint(path).nbytes == 1 << 40


def test_a_checkpoint_elsewhere_is_planned_too() -> None:
    url = "memory://plans/model"
    checkpoint_io.save_model(Language().state_dict(), url)
    assert Weights.of_checkpoint(url).nbytes == Weights.of_model(Language()).nbytes


def test_damaged_headers_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(checkpoint_io.CorruptCheckpointError):
        Weights.of_checkpoint(tmp_path)


def test_names_are_in_the_order_in_which_they_are_used() -> None:
    names = [
        *("shared.w", "encoder.block.0.a.w", "encoder.block.9.a.w", "encoder.block.10.a.w"),
        *("encoder.final_layer_norm.w", "decoder.block.0.a.w", "decoder.block.1.a.w"),
        *("decoder.final_layer_norm.w", "lm_head.w"),
    ]
    for seed in range(5):
        mixed = list(names)
        random.Random(seed).shuffle(mixed)
        found = Weights.of_sizes(dict.fromkeys(mixed, 1))
        assert [f"{unit.name}." for unit in found.units] == [
            name[: -len("a.w")] if "block." in name else name[: -len("w")] for name in names
        ]


def test_stages_that_differ_are_split_into_their_blocks() -> None:
    sizes = {
        f"stages.{stage}.blocks.{block}.mlp.w": 10 * (stage + 1)
        for stage in range(3)
        for block in range(2)
    }
    found = Weights.of_sizes(sizes)
    assert [unit.name for unit in found.units] == [
        f"stages.{stage}.blocks.{block}" for stage in range(3) for block in range(2)
    ]


def test_experts_are_in_their_block() -> None:
    sizes = {f"layers.{n}.experts.{e}.up.w": 4 for n in range(3) for e in range(8)}
    assert [unit.name for unit in Weights.of_sizes(sizes).units] == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]


def test_names_that_cannot_be_are_an_error() -> None:
    for sizes in ({"a": 1, "a.b": 1}, {"a.b": 1, "a": 1}):
        with pytest.raises(ValueError, match="'a"):
            Weights.of_sizes(sizes)
