"""Optimizers that train parameters of no prepared model: a state has them, with a warning."""

from __future__ import annotations

import warnings

import pytest
import torch

from accel_callbacks.compat.names import resolve
from tests.compat.test_checkpoints import written_weights
from tests.support.bound import BOUND

WARNING = r"SGD trains parameters of no prepared model \(\(1, 2\), \(1,\)\)"


class Head(torch.nn.Module):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(size, 1)


def trained(size: int = 2, steps: int = 0):
    """Return an Accelerator with a model, an optimizer of it and of a head, and the head."""
    torch.manual_seed(size)
    accelerator = resolve("accelerate", "Accelerator")(cpu=True, timeout=BOUND)
    model, head = torch.nn.Linear(2, size), Head(size)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(steps):
        accelerator.backward(head.linear(model(torch.ones(1, 2))).sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer, head


def values(model, optimizer, head) -> list[list[float]]:
    momenta = [state["momentum_buffer"] for state in optimizer.optimizer.state.values()]
    return [t.flatten().tolist() for t in (*model.parameters(), *head.parameters(), *momenta)]


def resumed(place: str) -> tuple[bool, int]:
    accelerator, *parts = trained(steps=3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        accelerator.save_state(place)
    expected = values(*parts)
    accelerator.save_state(f"{place}-again")  # not told again
    other, *parts = trained()
    other.load_state(place)
    return values(*parts) == expected, sum("no prepared model" in str(one.message) for one in told)


def test_a_resume_has_them(tmp_path, recwarn):
    assert resumed(str(tmp_path / "state")) == (True, 1)


@pytest.mark.distributed
def test_a_resume_of_two_processes_has_them(pool, tmp_path):
    found = pool.run(resumed, str(tmp_path / "state"))
    assert [equal for equal, _ in found] == [True, True]


def test_others_than_those_of_the_state_are_refused(tmp_path):
    accelerator, *_ = trained()
    with pytest.warns(UserWarning, match=WARNING):
        accelerator.save_state(tmp_path / "state")
    torch.manual_seed(0)
    other = resolve("accelerate", "Accelerator")(cpu=True)
    model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1, momentum=0.9)
    model, _ = other.prepare(model, optimizer)
    before = model.weight.detach().clone()
    with (
        pytest.warns(UserWarning, match="no prepared model"),
        pytest.raises(ValueError, match=r"\(3, 2\), \(3,\)"),
    ):
        other.load_state(tmp_path / "state")
    assert torch.equal(model.weight, before)


def test_a_registered_head_is_saved_once(tmp_path):
    accelerator, *_, head = trained()
    accelerator.register_for_checkpointing(head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save_state(tmp_path / "state")
    assert accelerator.training_state.registered.names == ["Head"]


def test_a_state_of_accelerate_has_no_file_for_them(tmp_path):
    accelerator, model, optimizer, _ = trained(steps=1)
    written_weights(tmp_path / "theirs", {k: v * 0 for k, v in model.state_dict().items()})
    torch.save(optimizer.state_dict(), tmp_path / "theirs" / "optimizer.bin")
    with pytest.warns(UserWarning, match=WARNING):
        accelerator.save_state(tmp_path / "own")
    accelerator.load_state(tmp_path / "theirs")
    assert not any(parameter.any() for parameter in model.parameters())
