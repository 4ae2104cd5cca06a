"""Models without weights on one process: how they are built, filled, initialized and refused."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import pytest
import torch

import accel_callbacks.utils
from accel_callbacks import Accelerator, init_empty_weights, init_on_device, initialize_weights
from accel_callbacks.models.absent_weights import AbsentWeights

CPU = torch.device("cpu")


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("positions", torch.arange(3.0), persistent=False)
        self.register_buffer("count", torch.tensor(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.positions


def test_names_and_signatures_are_those_of_accelerate() -> None:
    for function, names in (
        (init_empty_weights, ["include_buffers"]),
        (init_on_device, ["device", "include_buffers"]),
    ):
        assert list(inspect.signature(function).parameters) == names
        assert getattr(accel_callbacks.utils, function.__name__) is function


def test_parameters_have_no_memory_and_buffers_have_values() -> None:
    with init_empty_weights():
        model = Table()
    assert model.weight.is_meta
    assert model.positions.tolist() == [0.0, 1.0, 2.0]
    assert int(model.count) == 4
    with init_empty_weights(include_buffers=True):
        model = Table()
    assert all(one.is_meta for one in (model.weight, model.positions, model.count))


def test_modules_are_built_as_ever_after_it() -> None:
    with pytest.raises(KeyError), init_empty_weights():
        raise KeyError
    assert Table().weight.device == CPU


def test_another_thread_builds_as_ever() -> None:
    built: list[torch.nn.Module] = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: built.append(Table()))
        thread.start()
        thread.join()
    assert built[0].weight.device == CPU


def test_nothing_is_drawn_for_parameters_that_torch_initializes() -> None:
    before = torch.get_rng_state()
    with init_empty_weights():
        torch.nn.TransformerEncoderLayer(8, 2, 16)
    assert torch.equal(torch.get_rng_state(), before)


def test_ties_and_attributes_are_kept() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
            weight.tag = "mine"  # type: ignore[attr-defined]
            self.one, self.other = torch.nn.Module(), torch.nn.Module()
            self.one.weight = weight
            self.other.weight = weight
            self.late = torch.nn.Linear(2, 2)
            self.later = torch.nn.Linear(2, 2)
            self.later.weight = self.late.weight

    with init_empty_weights():
        model = Tied()
    assert model.one.weight is model.other.weight
    assert model.later.weight is model.late.weight
    assert (model.one.weight.tag, model.one.weight.requires_grad) == ("mine", False)


def test_lazy_modules_have_no_shape_to_take_away() -> None:
    with init_empty_weights():
        model = torch.nn.LazyLinear(3)
    assert isinstance(model.weight, torch.nn.UninitializedParameter)


def test_absent_weights_stay_the_same_objects() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2))
    real = [parameter.clone() for parameter in model[1].parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    held = list(model.parameters())
    absent = AbsentWeights(model, CPU)
    assert all(one is other for one, other in zip(model.parameters(), held, strict=True))
    assert all(torch.equal(*pair) for pair in zip(model[1].parameters(), real, strict=True))
    assert absent.names() == ["0.weight", "0.bias"]
    with pytest.raises(ValueError, match=r"'0.weight', '0.bias' of Sequential have no values"):
        model(torch.ones(1, 2))
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(model)
    assert initialize_weights(model) == ["0.bias", "0.weight"]
    before = model[0].weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert not model._forward_pre_hooks
    copy.deepcopy(model)


@pytest.mark.parametrize("way", ["in place", "data", "copy", "state", "no part of it"])
def test_what_counts_as_values(way: str) -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    absent = AbsentWeights(model, CPU)
    with torch.no_grad():
        if way == "in place":
            torch.nn.init.zeros_(model.weight)
        elif way == "data":
            model.weight.data.normal_()
        elif way == "copy":
            model.weight.copy_(torch.full((2, 2), float("nan")))  # NaN on purpose
        elif way == "state":
            model.load_state_dict({"weight": torch.ones(2, 2)}, strict=False)
    assert absent.names() == (["weight", "bias"] if way == "no part of it" else ["bias"])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_are_looked_after_too(backend: str) -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    model.compile(backend=backend)
    AbsentWeights(model, CPU)
    with pytest.raises(ValueError, match="no values"):
        model(torch.ones(1, 2))
    initialize_weights(model)
    assert model(torch.ones(1, 2)).isfinite().all()


def no_memory(module: torch.nn.Module) -> None:
    """What Accelerate has for FSDP1 by default: it initializes nothing."""
    module.to_empty(device="cpu", recurse=False)


def rewrite(module: Any) -> None:
    module.weight = torch.nn.Parameter(torch.full((3,), 2.0))
    module.positions = torch.arange(3.0)
    module.count.fill_(7)


def test_functions_that_initialize() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(Table())
    AbsentWeights(model, CPU)
    with pytest.raises(ValueError, match=r"'0.weight', '0.positions', '0.count' cannot be init"):
        initialize_weights(model)
    with pytest.raises(ValueError, match=r"after param_init_fn, which did not write there") as info:
        initialize_weights(model, no_memory)
    assert "No checkpoint has '0.positions'" in str(info.value)
    weight = model[0].weight
    assert initialize_weights(model, rewrite) == ["0.count", "0.positions", "0.weight"]
    assert model[0].weight is weight
    assert model(torch.ones(3)).tolist() == [2.0, 3.0, 4.0]
    assert int(model[0].count) == 7


def test_values_of_a_seed_are_those_of_the_plain_model() -> None:
    torch.manual_seed(3)
    plain = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    after = torch.get_rng_state()
    with init_empty_weights():
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        )
    AbsentWeights(model, CPU)
    torch.manual_seed(3)
    initialize_weights(model)
    assert torch.equal(torch.get_rng_state(), after)
    pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_what_has_values_is_left_alone() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    AbsentWeights(model, CPU)
    with torch.no_grad():
        model.bias.fill_(7.0)
    assert initialize_weights(model) == ["weight"]
    assert model.bias.tolist() == [7.0, 7.0]


def test_other_strategies_refuse_what_they_cannot_fill() -> None:
    accel = Accelerator(cpu=True)
    with init_empty_weights():
        model = torch.nn.Linear(2, 2)
    for evaluation in (False, True):
        with pytest.raises(ValueError, match="on the meta device"):
            accel.prepare_model(model, evaluation_mode=evaluation)
    with accel.init_module():
        model = torch.nn.Linear(2, 2)
    assert accel.prepare(model).weight.device == CPU
