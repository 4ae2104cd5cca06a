"""LocalSGD on one process, and what it refuses; test_tools.py has the rest."""

from __future__ import annotations

import pytest
import torch

from accel_callbacks import Accelerator, LocalSGD


def prepared() -> tuple:
    accel = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return accel, *accel.prepare(model, torch.optim.SGD(model.parameters(), 1.0))


def test_on_one_process_nothing_happens_but_counting():
    accel, model, optimizer = prepared()
    with LocalSGD(accel, model, 2) as local_sgd:
        assert not local_sgd.enabled
        for _ in range(3):
            accel.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
    assert local_sgd.num_steps == 3
    assert model.weight.item() == -3.0


def test_entering_again_counts_from_nothing():
    accel, model, _ = prepared()
    local_sgd = LocalSGD(accel, model, 2)
    for _ in range(2):
        with local_sgd:
            local_sgd.step()
        assert local_sgd.num_steps == 1


@pytest.mark.parametrize("steps", [0, -3])
def test_steps_below_one_are_an_error(steps):
    accel, model, _ = prepared()
    with pytest.raises(ValueError, match=f"local_sgd_steps={steps} must be at least 1"):
        LocalSGD(accel, model, steps)


@pytest.mark.parametrize("steps", [2.0, "2", True, None])
def test_steps_that_are_no_integer_are_an_error(steps):
    accel, model, _ = prepared()
    with pytest.raises(TypeError, match="must be an integer"):
        LocalSGD(accel, model, steps)


def test_a_model_that_is_not_prepared_is_an_error_that_says_what_to_do():
    accel, model, _ = prepared()
    with pytest.raises(ValueError, match=r"Linear is not prepared; pass it to .*prepare"):
        LocalSGD(accel, torch.nn.Linear(1, 1), 2)
    assert LocalSGD(accel, accel.unwrap_model(model), 2).model is model
