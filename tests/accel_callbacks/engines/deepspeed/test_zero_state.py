"""Steps of an optimizer of ZeRO over one flat vector, arranged as by DeepSpeed, without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from accel_callbacks.engines.deepspeed.zero_state import protect_from_step

#: Where each parameter lies in the vector of seven elements of this rank: offset and length.
PLACES = {"first": (0, 3), "last": (3, 4), "elsewhere": (7, 2), "other_rank": None}


def engine_with(flat: torch.Tensor, optimizer: torch.optim.Optimizer) -> tuple[Any, dict[str, Any]]:
    """Return an engine of stage 2, and its parameters by name."""
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in PLACES}
    for name, place in PLACES.items():
        if place is not None:
            address = SimpleNamespace(start=place[0], numel=place[1])
            parameters[name]._hp_mapping = SimpleNamespace(hp_fragment_address=address)
    outer = SimpleNamespace(
        optimizer=optimizer,
        single_partition_of_fp32_groups=[flat],
        bit16_groups=[list(parameters.values())],
    )
    return SimpleNamespace(optimizer=outer), parameters


def step(optimizer: torch.optim.Optimizer, flat: torch.Tensor) -> None:
    flat.grad = torch.ones_like(flat)
    optimizer.step()


def test_parameters_that_no_rank_used_and_their_states_outlive_a_step() -> None:
    flat = torch.nn.Parameter(torch.arange(7.0))
    optimizer = torch.optim.AdamW([flat], lr=0.1, weight_decay=0.5)
    engine, parameters = engine_with(flat, optimizer)
    step(optimizer, flat)
    before, average = flat.detach().clone(), optimizer.state[flat]["exp_avg"].clone()
    with protect_from_step(engine, [parameters["last"]]):
        step(optimizer, flat)
    assert torch.equal(flat[3:], before[3:])
    assert torch.equal(optimizer.state[flat]["exp_avg"][3:], average[3:])
    assert (flat[:3] != before[:3]).all()
    assert (optimizer.state[flat]["exp_avg"][:3] != average[:3]).all()
    step(optimizer, flat)  # for this step alone
    assert (flat != before).all()


def test_a_state_that_a_step_makes_is_zero_for_them() -> None:
    flat = torch.nn.Parameter(torch.ones(7))
    optimizer = torch.optim.AdamW([flat], lr=0.1)
    engine, parameters = engine_with(flat, optimizer)
    with protect_from_step(engine, [parameters["first"]]):
        step(optimizer, flat)
    assert optimizer.state[flat]["exp_avg"][:3].tolist() == [0.0] * 3
    assert (optimizer.state[flat]["exp_avg"][3:] != 0).all()


def test_what_this_rank_does_not_hold_is_left_to_others() -> None:
    flat = torch.nn.Parameter(torch.ones(7))
    optimizer = torch.optim.SGD([flat], lr=1.0)
    engine, parameters = engine_with(flat, optimizer)
    with protect_from_step(engine, [parameters["elsewhere"], parameters["other_rank"]]):
        step(optimizer, flat)
    assert flat.tolist() == [0.0] * 7
    with protect_from_step(engine, []):
        step(optimizer, flat)
    assert flat.tolist() == [-1.0] * 7
