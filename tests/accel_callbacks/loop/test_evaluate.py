"""evaluate: eval mode and no gradients in the block, and all as before after it."""

from __future__ import annotations

import pytest
import torch

from accel_callbacks import Accelerator


def frozen_norm() -> torch.nn.Module:
    """A model in training mode with one part that its user keeps in eval mode."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
    model[0].eval()
    return model


def modes(model: torch.nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_evaluate_sets_every_module_to_eval_mode_and_each_back_to_its_own():
    accel = Accelerator(cpu=True)
    model = accel.prepare(frozen_norm())
    with accel.evaluate(model):
        assert modes(model) == [False] * 3
        inputs = torch.ones(4, 2)
        assert torch.equal(model(inputs), model(inputs))  # nothing is dropped
    assert modes(model) == [True, False, True]


def test_evaluate_sets_all_of_its_models_to_eval_mode_and_no_other():
    accel = Accelerator(cpu=True)
    first, second, other = accel.prepare(*(torch.nn.Dropout() for _ in range(3)))
    with accel.evaluate(first, second):
        assert [model.training for model in (first, second, other)] == [False, False, True]
    assert first.training
    assert second.training


def test_evaluate_computes_no_gradients():
    accel = Accelerator(cpu=True)
    model = accel.prepare(torch.nn.Linear(2, 1))
    with accel.evaluate(model):
        assert not torch.is_grad_enabled()
        assert not model(torch.ones(1, 2)).requires_grad
    assert torch.is_grad_enabled()
    assert model(torch.ones(1, 2)).requires_grad


def test_evaluate_inside_of_no_grad_leaves_gradients_off():
    accel = Accelerator(cpu=True)
    with torch.no_grad():
        with accel.evaluate(accel.prepare(torch.nn.Linear(2, 1))):
            pass
        assert not torch.is_grad_enabled()


def test_an_error_while_evaluating_puts_modes_and_gradients_back():
    accel = Accelerator(cpu=True)
    model = accel.prepare(frozen_norm())
    with pytest.raises(ZeroDivisionError), accel.evaluate(model):
        _ = 1 / 0
    assert modes(model) == [True, False, True]
    assert torch.is_grad_enabled()
