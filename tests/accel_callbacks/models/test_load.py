"""load_checkpoint_in_model: Accelerate's arguments, without what they cost there."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_callbacks.utils
from accel_callbacks import Accelerator, load_checkpoint_in_model
from checkpoint_io import CorruptCheckpointError, StateMismatchError, save_model


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(v.to(theirs[k].dtype), theirs[k]) for k, v in one.state_dict().items())


def test_it_is_where_scripts_look_for_it() -> None:
    assert accel_callbacks.utils.load_checkpoint_in_model is load_checkpoint_in_model


@pytest.mark.parametrize("limit", ["5GB", "50B"])
def test_what_save_model_wrote(tmp_path: Path, limit: str) -> None:
    trained, fresh = model(), model()
    Accelerator(cpu=True).save_model(trained, tmp_path, max_shard_size=limit)
    load_checkpoint_in_model(fresh, tmp_path)
    assert same(trained, fresh)
    names = sorted(os.listdir(tmp_path))
    fresh = model()
    load_checkpoint_in_model(fresh, str(tmp_path / names[-1]))  # the file, or the index
    assert same(trained, fresh)


def test_what_save_state_wrote(tmp_path: Path) -> None:
    accel = Accelerator(cpu=True)
    trained, fresh = accel.prepare(model()), model()
    accel.save_state(tmp_path / "state")
    load_checkpoint_in_model(fresh, tmp_path / "state")
    assert same(trained, fresh)


def test_dtype_and_modules_kept_in_fp32(tmp_path: Path) -> None:
    trained = model()
    save_model(trained.state_dict(), tmp_path)
    for dtype in ("float16", "torch.bfloat16", torch.bfloat16):
        fresh = model()
        load_checkpoint_in_model(fresh, tmp_path, dtype=dtype, keep_in_fp32_modules=["1"])
        assert fresh[0].weight.dtype in (torch.float16, torch.bfloat16)
        assert fresh[1].weight.dtype == torch.float32
        assert fresh[1].num_batches_tracked.dtype == torch.int64
        assert torch.equal(fresh[0].weight, trained[0].weight.to(fresh[0].weight.dtype))
    for wrong in ("int8", "double_float", torch.int64):
        with pytest.raises(ValueError, match="floating-point"):
            load_checkpoint_in_model(model(), tmp_path, dtype=wrong)


def test_one_device_for_all(tmp_path: Path) -> None:
    trained = model()
    save_model(trained.state_dict(), tmp_path)
    with torch.device("meta"):
        empty = model()
    load_checkpoint_in_model(empty, tmp_path, device_map={"": "cpu"})
    assert same(trained, empty)
    fresh = model()
    load_checkpoint_in_model(fresh, tmp_path, device_map={"0": "cpu", "1": "cpu"})
    assert same(trained, fresh)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"device_map": {}}, "has no device"),
        ({"device_map": "auto"}, "is no mapping"),
        ({"device_map": {"": "nowhere"}}, "is no device"),
        ({"device_map": {"0": "disk"}}, r"no device for '1\.weight'"),
        ({"offload_8bit_bnb": True}, "transformers loads such a model"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    save_model(model().state_dict(), tmp_path)
    with pytest.raises(ValueError, match=text):
        load_checkpoint_in_model(model(), tmp_path, **arguments)


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    weights = model().state_dict()
    weights["more"] = weights.pop("0.bias")
    save_model(weights, tmp_path)
    fresh = model()
    with pytest.warns(UserWarning, match="did not have|has unused") as caught:
        load_checkpoint_in_model(fresh, tmp_path)
    texts = [str(warning.message) for warning in caught]
    assert any("did not have 0.bias" in text for text in texts)
    assert any("has unused more" in text for text in texts)
    assert torch.equal(fresh[0].weight, weights["0.weight"])
    with pytest.raises(StateMismatchError, match=r"0\.bias"):
        load_checkpoint_in_model(fresh, tmp_path, strict=True)


def test_broadcast_needs_no_group_when_alone(tmp_path: Path) -> None:
    trained, fresh = model(), model()
    save_model(trained.state_dict(), tmp_path)
    load_checkpoint_in_model(fresh, tmp_path, broadcast_from_rank0=True, full_state_dict=False)
    assert same(trained, fresh)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    save_model(model().state_dict(), tmp_path)
    (tmp_path / "model.safetensors").rename(outside)
    (tmp_path / "m").mkdir()
    index = {"weight_map": dict.fromkeys(model().state_dict(), "../outside.safetensors")}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match="weight_map"):
        load_checkpoint_in_model(model(), tmp_path / "m")


def test_the_arguments_are_those_of_accelerate() -> None:
    """In the order of its version 1.15, so that a call by position means the same."""
    parameters = inspect.signature(load_checkpoint_in_model).parameters.values()
    assert [(one.name, one.default) for one in parameters][2:] == [
        ("device_map", None),
        ("offload_folder", None),
        ("dtype", None),
        ("offload_state_dict", False),
        ("offload_buffers", False),
        ("keep_in_fp32_modules", None),
        ("offload_8bit_bnb", False),
        ("strict", False),
        ("full_state_dict", True),
        ("broadcast_from_rank0", False),
        ("mapped", False),  # ours
    ]
    assert [one.name for one in parameters][:2] == ["model", "checkpoint"]


def test_mapped_weights_are_views_of_the_file(tmp_path: Path) -> None:
    trained = model()
    save_model(trained.state_dict(), tmp_path)
    with torch.device("meta"):
        empty = model()
    load_checkpoint_in_model(empty, tmp_path, device_map={"": "cpu"}, mapped=True)
    assert same(trained, empty)
    before = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        empty[0].weight.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="broadcast_from_rank0"):
        load_checkpoint_in_model(empty, tmp_path, mapped=True, broadcast_from_rank0=True)
