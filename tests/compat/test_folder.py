"""Offload folders: Accelerate's format both ways, and what is noticed of strange files."""

from __future__ import annotations

import copy
import json
import os
import pickle
from types import MappingProxyType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from accel_callbacks.compat.folder import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
    stored_in_index,
)
from accel_callbacks.models.offload.source import WeightReadError
from checkpoint_io import CorruptCheckpointError

TENSORS = {
    "float": torch.randn(3, 4),
    "bf16": torch.randn(3).bfloat16(),
    "fp8": torch.randn(4).to(torch.float8_e4m3fn),
    "int": torch.arange(5),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(2, dtype=torch.complex64),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 5).t(),
}


def is_same(one, other):
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.contiguous().reshape(-1).view(torch.uint8).tolist()
        == other.contiguous().reshape(-1).view(torch.uint8).tolist()
    )


def write_as_accelerate(folder, tensors):
    """The files that Accelerate 1.15 writes: numpy's bytes, no checksum, one byte for nothing."""
    index = {}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        (folder / f"{name}.dat").write_bytes(raw or b"\0")
        index[name] = {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape)}
    (folder / "index.json").write_text(json.dumps(index))


def test_every_dtype_and_shape_comes_back(tmp_path):
    offload_state_dict(tmp_path / "new", TENSORS)
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "new")
    assert list(loader) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert is_same(loader[name], tensor), name
    assert not [name for name in os.listdir(tmp_path / "new") if "part" in name]


def test_a_folder_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offload_state_dict("folder", {"a": torch.ones(2)})
    assert OffloadedWeightsLoader(save_folder="folder")["a"].tolist() == [1, 1]


def test_a_folder_of_accelerate_is_read(tmp_path):
    write_as_accelerate(tmp_path, TENSORS)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    for name, tensor in TENSORS.items():
        assert is_same(loader[name], tensor), name


def test_the_files_are_those_that_numpy_maps(tmp_path):
    offload_state_dict(tmp_path, TENSORS)
    index = json.loads((tmp_path / "index.json").read_text())
    for name, kind in {"float": "float32", "bf16": "int16", "empty": "float32"}.items():
        shape = tuple(index[name]["shape"])
        found = np.memmap(tmp_path / f"{name}.dat", dtype=kind, shape=shape, mode="r")
        assert found.tobytes() == TENSORS[name].view(getattr(torch, kind)).numpy().tobytes()
    assert index["bf16"]["dtype"] == "bfloat16"


def test_weights_are_added_to_a_folder(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.ones(2)})
    offload_state_dict(tmp_path, {"b": torch.zeros(2), "a": torch.full((2,), 3.0)})
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert {name: loader[name].tolist() for name in loader} == {"a": [3, 3], "b": [0, 0]}


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2).double()], ids=["shape", "dtype"])
def test_a_folder_of_another_model_is_left_alone(tmp_path, other):
    offload_state_dict(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(ValueError, match="holds the weights of another model: its b is"):
        offload_state_dict(tmp_path, {"a": torch.zeros(2), "b": other})
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [1, 1]


def test_weights_that_are_replaced_under_a_loader_raise(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert loader["a"].tolist() == [1, 1]
    offload_state_dict(tmp_path, {"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(CorruptCheckpointError, match=r"a\.dat has changed since"):
        loader["a"]
    with pytest.raises(CorruptCheckpointError, match=r"b\.dat holds other bytes"):
        loader["b"]  # not read before: the checksum knows


def test_weights_that_are_replaced_in_a_folder_of_accelerate_raise(tmp_path):
    write_as_accelerate(tmp_path, {"a": torch.ones(2)})
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    os.utime(tmp_path / "a.dat", ns=(1, 1))
    with pytest.raises(CorruptCheckpointError, match="has changed"):
        loader["a"]


def test_damage_of_the_same_size_raises(tmp_path):
    index = offload_weight(torch.ones(2), "a", tmp_path, {})
    (tmp_path / "a.dat").write_bytes(bytes(8))
    with pytest.raises(CorruptCheckpointError, match=r"a\.dat holds other bytes"):
        load_offloaded_weight(tmp_path / "a.dat", index["a"])


@pytest.mark.parametrize("size", [0, 7, 9])
def test_a_file_of_another_size_raises(tmp_path, size):
    index = offload_weight(torch.ones(2), "a", tmp_path, {})
    (tmp_path / "a.dat").write_bytes(bytes(size))
    with pytest.raises(CorruptCheckpointError, match=rf"a\.dat has {size} bytes, and .* needs 8"):
        load_offloaded_weight(tmp_path / "a.dat", index["a"])


def test_a_missing_file_raises(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.ones(2)})
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    (tmp_path / "a.dat").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"a\.dat is missing"):
        loader["a"]


@pytest.mark.parametrize(
    "info",
    [
        {"dtype": "float32", "shape": [-1]},
        {"dtype": "Tensor", "shape": [2]},
        {"dtype": "float32"},
        {"dtype": "float32", "shape": ["2"]},
    ],
    ids=["negative", "no_dtype", "no_shape", "text"],
)
def test_a_strange_entry_raises(tmp_path, info):
    with pytest.raises(CorruptCheckpointError, match="no valid dtype and shape"):
        load_offloaded_weight(tmp_path / "a.dat", info)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}'])
def test_a_strange_index_raises(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match="is no index of an offload folder"):
        OffloadedWeightsLoader(save_folder=tmp_path)


def test_names_are_no_paths(tmp_path):
    (tmp_path / "secret.dat").write_bytes(bytes(4))
    index = {"../secret": {"dtype": "float32", "shape": [1]}}
    (tmp_path / "in").mkdir()
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "in", index=index)
    with pytest.raises(ValueError, match="it is a path"):
        loader["../secret"]
    with pytest.raises(ValueError, match="it is a path"):
        offload_weight(torch.ones(1), "../x", tmp_path / "in")
    with pytest.raises(ValueError, match="it is a path"):
        stored_in_index(index, tmp_path / "in")


def test_what_has_no_values_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="a has no values"):
        offload_state_dict(tmp_path, {"a": torch.ones(2, device="meta")})
    with pytest.raises(ValueError, match="a is sparse or sharded"):
        offload_weight(torch.eye(2).to_sparse(), "a", tmp_path)
    assert os.listdir(tmp_path) == []


def test_an_index_is_replaced_in_one_step(tmp_path, monkeypatch):
    offload_state_dict(tmp_path, {"a": torch.ones(2)})
    before = (tmp_path / "index.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_offload_index({"b": {}}, tmp_path)
    assert (tmp_path / "index.json").read_text() == before
    save_offload_index({}, tmp_path / "nowhere")  # nothing to save


def test_weights_are_read_into_a_model(tmp_path):
    trained, layer = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1, device="meta")
    offload_state_dict(tmp_path, trained.state_dict())
    load_offloaded_weights(layer, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert torch.equal(layer.weight, trained.weight)
    assert isinstance(layer.bias, torch.nn.Parameter)
    load_offloaded_weights(layer, None, tmp_path)  # nothing to do


# --- loader ----------------------------------------------------------------------------------


@pytest.fixture
def shard(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.arange(3.0), "y": torch.ones(2, dtype=torch.bfloat16)}, file)
    return file


def entry(file, **other):
    return {"safetensors_file": str(file), **other}


def test_a_tensor_in_memory_comes_first(tmp_path, shard):
    loader = OffloadedWeightsLoader({"x": torch.zeros(1)}, index={"x": entry(shard), "y": {}})
    assert loader["x"].tolist() == [0]
    assert (list(loader), len(loader), "y" in loader, "z" in loader) == (["x", "y"], 2, True, False)


def test_safetensors_under_another_name_and_dtype(shard):
    index = {"a": entry(shard, weight_name="x", dtype="float16"), "y": entry(shard)}
    loader = OffloadedWeightsLoader(index=index, device="cpu")
    assert loader["a"].dtype is torch.float16
    assert loader["a"].tolist() == [0, 1, 2]
    assert loader["y"].tolist() == [1, 1]


def test_a_header_is_read_once(shard, monkeypatch):
    from checkpoint_io.weights import safetensors

    parsed, parse = [], safetensors.parse_header
    monkeypatch.setattr(safetensors, "parse_header", lambda *args: parsed.append(1) or parse(*args))
    loader = OffloadedWeightsLoader(index={name: entry(shard) for name in "xy"})
    for _ in range(3):
        assert [loader[name].shape[0] for name in "xy"] == [3, 2]
    assert parsed == [1]


def test_a_shard_that_is_replaced_raises(shard):
    loader = OffloadedWeightsLoader(index={name: entry(shard) for name in "xy"})
    assert loader["x"].tolist() == [0, 1, 2]
    save_file({"x": torch.zeros(3), "y": torch.zeros(2, dtype=torch.bfloat16)}, shard)
    for name in "xy":
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors has changed"):
            loader[name]


def test_a_tensor_that_a_shard_lacks_raises(shard):
    loader = OffloadedWeightsLoader(index={"z": entry(shard)})
    with pytest.raises(CorruptCheckpointError, match="has no tensor 'z'"):
        loader["z"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (10).to_bytes(8, "little") + b"{}"])
def test_a_damaged_shard_raises(tmp_path, content):
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"bad\.safetensors"):
        OffloadedWeightsLoader(index={"z": entry(file)})["z"]


def test_a_dispatched_model_refuses_what_the_loader_refuses(tmp_path):
    """Both look weights up in one way."""
    for entry in ({"dtype": "float32", "shape": [-1]}, {"dtype": "Tensor", "shape": [2]}):
        with pytest.raises(WeightReadError, match="no valid dtype and shape"):
            stored_in_index({"a": entry}, tmp_path)
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(WeightReadError, match="is no index of an offload folder"):
        stored_in_index(None, tmp_path)


def test_tensors_that_are_read_have_memory_of_their_own(tmp_path):
    offload_state_dict(tmp_path, TENSORS)
    weights = stored_in_index(None, tmp_path)
    for name, tensor in zip(TENSORS, weights.read(list(TENSORS)), strict=True):
        assert is_same(tensor, TENSORS[name]), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


def test_a_loader_is_pickled_and_copied(tmp_path, shard):
    offload_state_dict(tmp_path / "f", {"a": torch.ones(2)})
    index = json.loads((tmp_path / "f" / "index.json").read_text())
    memory = {"m": torch.ones(1)}
    loader = OffloadedWeightsLoader(memory, tmp_path / "f", {**index, "x": entry(shard)})
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert [other[name].tolist() for name in other] == [[1], [1, 1], [0, 1, 2]]
        assert other["m"] is not memory["m"]


def test_other_values_are_kept_in_memory(tmp_path):
    offload_state_dict(tmp_path, {"a": torch.ones(2)})
    held = torch.ones(1)
    loader = OffloadedWeightsLoader({"m": held}, save_folder=tmp_path)
    loader.put("a", torch.zeros(2))
    loader.put("m", torch.zeros(1))
    assert (loader["a"].tolist(), held.tolist()) == ([0, 0], [0])
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["ours", "accelerate", "safetensors"])
def test_other_values_than_those_in_files_are_noticed(tmp_path, kind):
    tensor = torch.tensor([1.0, float("nan")])
    if kind == "safetensors":
        save_file({"a": tensor}, tmp_path / "one.safetensors")
        loader = OffloadedWeightsLoader(index={"a": entry(tmp_path / "one.safetensors")})
    else:
        write = offload_state_dict if kind == "ours" else write_as_accelerate
        write(tmp_path, {"a": tensor})
        loader = OffloadedWeightsLoader(save_folder=tmp_path)
    loader.check("a", tensor.clone())
    loader.check("a", tensor.double())
    loader.check("unknown", tensor)
    for other in (torch.ones(2), torch.ones(3)):
        with pytest.raises(ValueError, match="weights of another model"):
            loader.check("a", other)


def test_weights_are_somewhere(tmp_path):
    with pytest.raises(ValueError, match="give one"):
        OffloadedWeightsLoader()
    with pytest.raises(CorruptCheckpointError, match="nothing is offloaded there"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ValueError, match="give save_folder"):
        OffloadedWeightsLoader(index={"a": {"dtype": "float32", "shape": [1]}})["a"]


# --- prefixes --------------------------------------------------------------------------------


def test_a_prefixed_map_is_a_map():
    found = PrefixedDataset({"a.x": 1, "a.y": 2, "ab.x": 3}, "a.")
    assert (dict(found), len(found), list(found)) == ({"x": 1, "y": 2}, 2, ["x", "y"])
    assert ("x" in found, "z" in found, found.get("z")) == (True, False, None)
    assert found.dataset["ab.x"] == 3


def test_looking_up_a_name_does_not_walk_the_map():
    class Large(dict):
        def __iter__(self):
            raise AssertionError("walked")

    found = PrefixedDataset(Large({"a.x": 1}), "a.")
    assert found["x"] == 1
    assert "y" not in found


def test_other_values_go_into_the_map_under_the_prefix():
    whole = {"a.x": torch.ones(1)}
    PrefixedDataset(whole, "a.").put("x", torch.zeros(2))
    assert whole["a.x"].tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="cannot store it: use a dict"):
        PrefixedDataset(MappingProxyType(whole), "a.").put("x", torch.ones(2))


def test_entries_of_modules_are_extracted():
    state = dict.fromkeys(["h.1.w", "h.10.w", "h.1", "x", "h.2.a.b"], 0)
    assert list(extract_submodules_state_dict(state, ["h.1", "h.2"])) == ["h.1.w", "h.1", "h.2.a.b"]
    assert list(extract_submodules_state_dict(state, ["x"])) == ["x"]
    assert extract_submodules_state_dict(state, [""]) == state
