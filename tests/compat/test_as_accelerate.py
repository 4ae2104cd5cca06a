"""Functions of Accelerate, by which this library stands in for it, on two processes."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from accel_callbacks import PartialState, pad_across_processes
from accel_callbacks.compat.models import copy_tensor_to_devices, prepare_pippy
from accel_callbacks.compat.twins import Accelerator

pytestmark = pytest.mark.distributed


def staged():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    inputs = torch.randn(4, 2)
    with torch.no_grad():
        expected = model(inputs)
        PartialState(cpu=True)
        pipeline = prepare_pippy(model, split_points=["2"], example_args=(inputs,))
        return torch.allclose(pipeline(inputs), expected, atol=1e-6), pipeline.hf_split_points


def copied():
    rank = PartialState(cpu=True).process_index
    tensor = torch.arange(3, dtype=torch.int16) if rank == 1 else None
    try:
        return copy_tensor_to_devices(tensor).tolist(), copy_tensor_to_devices()
    except ValueError as error:
        return copy_tensor_to_devices(tensor).tolist(), str(error)


def test_a_pipeline_for_inference_returns_what_the_model_does(pool):
    assert pool.run(staged) == [(True, ["2"])] * 2


def test_a_tensor_of_one_process_is_copied_to_all(pool):
    text = "copy_tensor_to_devices: no process has a tensor; pass it on one."
    assert pool.run(copied) == [([0, 1, 2], text)] * 2


def padded():
    rank = PartialState(cpu=True).process_index
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(1 + rank)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = pad_across_processes({"ragged": ragged, "even": torch.ones(1 + rank)})
    assert result["ragged"] is ragged
    return result["even"].tolist(), [warning.category.__name__ for warning in caught]


def test_beside_a_nested_tensor_the_others_are_padded(pool):
    warned = ["NestedTensorWarning"]
    assert pool.run(padded) == [([1.0, 0.0], warned), ([1.0, 1.0], warned)]


def saved(folder):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    paths = [accelerator.save_state(f"{folder}/step_1") for _ in range(2)]  # new, and in place
    accelerator.load_state(paths[0])
    try:
        accelerator.save_state(f"{folder}/file/step_2")
    except Exception as error:
        paths.append(type(error).__name__)
    accelerator.end_training()
    return [path.removeprefix(str(folder)) for path in paths]


def test_a_new_state_gets_its_name_from_one_process(pool, tmp_path):
    (tmp_path / "file").write_text("no folder")
    first, second = pool.run(saved, tmp_path)
    assert first[:2] == second[:2] == ["/step_1", "/step_1"]
    assert len(first) == len(second) == 3
    assert sorted(os.listdir(tmp_path)) == ["file", "step_1"]
