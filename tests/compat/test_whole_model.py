"""Whole models that take turns on the device; "meta" and a record of moves play the device."""

from __future__ import annotations

import pickle

import pytest
import torch

from accel_callbacks.compat import hooks
from accel_callbacks.compat.hooks import (
    CpuOffload,
    ModelHook,
    add_hook_to_module,
    cpu_offload_with_hook,
)
from accel_callbacks.models.offload import assignment


class Moved(torch.nn.Module):
    """A model that notes where it is sent, and is there."""

    def __init__(self, name, moves):
        super().__init__()
        self.name, self.moves = name, moves
        self.weight = torch.nn.Parameter(torch.ones(1))

    def to(self, device):
        self.moves.append(f"{self.name} to {device}")
        data = torch.empty(1, device=device) if str(device) == "meta" else torch.ones(1)
        self._parameters["weight"] = torch.nn.Parameter(data)
        return self

    def forward(self, x, scale=None):
        return x, scale


def test_models_of_a_pipeline_take_turns():
    moves = []
    one, first = cpu_offload_with_hook(Moved("one", moves), "meta")
    two, second = cpu_offload_with_hook(Moved("two", moves), "meta", prev_module_hook=first)
    assert moves == ["one to cpu", "two to cpu"]
    moves.clear()
    x, scale = one(torch.ones(1), scale=torch.ones(1))
    assert (x.is_meta, scale.is_meta) == (True, True)
    for _ in range(3):
        two(torch.ones(1))
    assert moves == ["one to meta", "one to cpu", "two to meta"]
    moves.clear()
    second.offload()
    assert moves == ["two to cpu"]
    two(torch.ones(1))
    assert moves == ["two to cpu", "two to meta"]


def test_inputs_come_to_a_model_that_is_there_already():
    model, _ = cpu_offload_with_hook(Moved("one", []), "meta")
    model(torch.ones(1))
    assert model(torch.ones(1))[0].is_meta


def test_a_removed_hook_leaves_the_model_where_it_is():
    moves = []
    model, hook = cpu_offload_with_hook(Moved("one", moves), "meta")
    hook.remove()
    moves.clear()
    assert not hasattr(model, "_hf_hook")
    assert not model(torch.ones(1))[0].is_meta
    assert moves == []


def test_a_hook_that_is_there_stays():
    model = add_hook_to_module(Moved("one", []), ModelHook())
    cpu_offload_with_hook(model, "meta")
    assert [type(one) for one in model._hf_hook.hooks] == [ModelHook, CpuOffload]


def test_a_model_without_parameters_runs():
    one, first = cpu_offload_with_hook(torch.nn.ReLU(), "cpu")
    two, _ = cpu_offload_with_hook(torch.nn.ReLU(), "cpu", first)
    assert two(one(torch.ones(1))).tolist() == [1]


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")])
def test_the_default_device_is_the_accelerator_or_the_cpu(accelerator, monkeypatch):
    monkeypatch.setattr(hooks, "own_accelerator", lambda: accelerator)
    assert CpuOffload().execution_device == (accelerator or torch.device("cpu"))


def test_numbers_and_names_are_devices(monkeypatch):
    monkeypatch.setattr(assignment, "own_accelerator", lambda: torch.device("cuda"))
    assert CpuOffload(1).execution_device == torch.device("cuda:1")
    assert CpuOffload("cuda").execution_device == torch.device("cuda")


def test_a_pipeline_is_pickled():
    one, first = cpu_offload_with_hook(torch.nn.Linear(2, 2), "cpu")
    two, second = cpu_offload_with_hook(torch.nn.Linear(2, 2), "cpu", first)
    copies = pickle.loads(pickle.dumps((one, first, two, second)))
    assert copies[2]._hf_hook.prev_module_hook is copies[1]
    assert torch.equal(copies[2](torch.ones(1, 2)), two(torch.ones(1, 2)))
