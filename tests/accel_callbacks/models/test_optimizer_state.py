"""The state of an optimizer follows its parameters to the device; "meta" stands in for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, Topology

META = torch.device("meta")


@pytest.fixture(autouse=True)
def parameters_stay_the_same_objects() -> Iterator[None]:
    """As they do on the way to a GPU; on the way to "meta" torch would make new ones."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def accelerator(**options: Any) -> Accelerator:
    """An Accelerator that places models on the stand-in."""
    accel = Accelerator(cpu=True, **options)
    accel.strategy.topology = Topology(META)
    return accel


def places(optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    """The types of the devices of each entry of the state, by its name."""
    found: dict[str, set[str]] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, torch.Tensor):
                    found.setdefault(name, set()).add(one.device.type)
    return found


def stepped(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """A model and an optimizer that has made a step on the CPU, as after ``torch.load``."""
    model = torch.nn.Linear(2, 2).to(dtype)
    optimizer = kind(model.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2, dtype=dtype)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    return model, optimizer


def test_what_adagrad_makes_at_once_and_what_adamw_had_loaded_goes_where_the_parameters_are():
    model = torch.nn.Linear(2, 2)
    adagrad = torch.optim.Adagrad(model.parameters())
    accelerator().prepare(model, adagrad)
    assert places(adagrad) == {"step": {"cpu"}, "sum": {"meta"}}
    model, adamw = stepped(torch.optim.AdamW)
    accelerator().prepare(model, adamw)
    assert places(adamw) == {"step": {"cpu"}, "exp_avg": {"meta"}, "exp_avg_sq": {"meta"}}


def test_scalars_that_the_host_reads_stay_there():
    model, nadam = stepped(torch.optim.NAdam)
    accelerator().prepare(model, nadam)
    assert places(nadam) == {
        **{"step": {"cpu"}, "mu_product": {"cpu"}},
        **{"exp_avg": {"meta"}, "exp_avg_sq": {"meta"}},
    }


@pytest.mark.parametrize("option", ["capturable", "fused"])
def test_the_step_count_goes_along_where_the_device_counts(option):
    model, optimizer = stepped(torch.optim.AdamW)
    for group in optimizer.param_groups:  # set as a loaded state does
        group[option] = True
    accelerator().prepare(model, optimizer)
    assert places(optimizer)["step"] == {"meta"}


def test_tensors_in_containers_go_along():
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters())
    history = [torch.ones(2), None]
    optimizer.state[model.weight].update(old_dirs=history, d=torch.ones(2), n_iter=3)
    accelerator().prepare(model, optimizer)
    state = next(iter(optimizer.state.values()))
    assert [one if one is None else one.device for one in state["old_dirs"]] == [META, None]
    assert state["d"].device == META
    assert state["n_iter"] == 3


def test_the_dtype_stays_and_neither_groups_nor_hooks_are_touched():
    model, optimizer = stepped(torch.optim.AdamW, torch.bfloat16)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float()
    groups = list(optimizer.param_groups)
    called = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("load"))
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("state"))
    accelerator().prepare(model, optimizer)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert {state["exp_avg"].device for state in optimizer.state.values()} == {META}
    assert all(now is then for now, then in zip(optimizer.param_groups, groups, strict=True))
    assert called == []


def test_what_is_there_already_is_not_copied():
    model, optimizer = stepped(torch.optim.AdamW)
    before = [value for state in optimizer.state.values() for value in state.values()]
    Accelerator(cpu=True).prepare(model, optimizer)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert list(map(id, after)) == list(map(id, before))


def test_an_optimizer_that_is_prepared_before_its_model_follows_it():
    model, optimizer = stepped(torch.optim.AdamW)
    accel = accelerator()
    accel.prepare_optimizer(optimizer)
    assert places(optimizer)["exp_avg"] == {"cpu"}
    accel.prepare_model(model)
    assert places(optimizer)["exp_avg"] == {"meta"}


def test_a_state_that_the_script_has_moved_since_is_left_when_other_objects_are_prepared():
    model, optimizer = stepped(torch.optim.AdamW)
    accel = Accelerator(cpu=True)
    accel.prepare(model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to(META)
    accel.prepare(torch.utils.data.DataLoader(range(2)))
    assert places(optimizer)["exp_avg"] == {"meta"}


@pytest.mark.parametrize("where", ["accelerator", "entry", "prepare_optimizer"])
def test_without_device_placement_the_state_is_left_alone(where):
    model, optimizer = stepped(torch.optim.AdamW)
    accel = accelerator(device_placement=where != "accelerator")
    if where == "prepare_optimizer":
        accel.prepare_optimizer(optimizer, device_placement=False)
        accel.prepare_model(model)
    else:
        place = None if where == "accelerator" else False
        accel.prepare(model, optimizer, device_placement=[True, place])
    assert model.weight.device == META
    assert places(optimizer)["exp_avg"] == {"cpu"}
