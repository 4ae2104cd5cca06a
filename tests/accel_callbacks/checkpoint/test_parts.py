"""A part that somebody else registers is saved, checked and restored as those of the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.checkpoint.part import CheckpointPart, Load, Sections
from accel_callbacks.errors import ResumeError


class Counts(CheckpointPart):
    """Saves one number for all ranks, one of this rank, and a tensor."""

    name = "counts"

    def __init__(self, shared: int = 0, own: int = 0) -> None:
        self.shared, self.own = shared, own
        self.sums = torch.full((3,), float(shared))
        self.order: list[str] = []

    def capture(self) -> Sections:
        return {"counts": {"n": self.shared, "sums": self.sums}}, {"counts": self.own}

    def restore(self, load: Load) -> None:
        self.order.append("restore")
        saved = load.selected.get("counts")
        if saved is not None:
            self.shared, self.sums = saved["n"], saved["sums"]
        self.own = (load.local or {}).get("counts", self.own)

    def finish(self, load: Load) -> None:
        self.order.append("finish")


def prepared(*parts: CheckpointPart) -> Accelerator:
    accel = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for part in parts:
        accel.training_state.register(part)
    return accel


def save(path: Any, *parts: CheckpointPart) -> str:
    return prepared(*parts).save_state(path)


def test_what_it_captured_is_restored(tmp_path: Any) -> None:
    path = save(tmp_path / "c", Counts(shared=3, own=7))
    counts = Counts()
    prepared(counts).load_state(path)
    assert (counts.shared, counts.own) == (3, 7)
    assert counts.sums.tolist() == [3.0, 3.0, 3.0]
    assert counts.order == ["restore", "finish"]


def test_a_name_has_one_part() -> None:
    accel = prepared(Counts())
    with pytest.raises(ValueError, match="'counts' is a part of checkpoints already"):
        accel.training_state.register(Counts())
    other = Counts()
    other.name = "models"
    with pytest.raises(ValueError, match="'models' is a part"):
        accel.training_state.register(other)


def test_a_checkpoint_without_it_is_told(tmp_path: Any) -> None:
    path, counts = save(tmp_path / "c"), Counts(shared=5)
    accel = prepared(counts)
    with pytest.raises(ResumeError, match="holds no state of 'counts'"):
        accel.load_state(path, strict=True)
    with pytest.warns(UserWarning, match="holds no state of 'counts', which stays as it is"):
        accel.load_state(path)
    assert counts.shared == 5


def test_a_checkpoint_of_a_run_with_it_loads_without_it(tmp_path: Any) -> None:
    path = save(tmp_path / "c", Counts(shared=3))
    accel = prepared()
    assert accel.load_state(path, strict=True) == path


@pytest.mark.parametrize(("only", "expected"), [("counts", 3), ("models", 0)])
def test_a_load_may_select_it_or_leave_it_out(tmp_path: Any, only: str, expected: int) -> None:
    path, counts = save(tmp_path / "c", Counts(shared=3)), Counts()
    prepared(counts).load_state(path, only=only)
    assert counts.shared == expected


def test_its_refusal_leaves_everything_as_it_was(tmp_path: Any) -> None:
    class Strict(Counts):
        def check(self, load: Load) -> None:
            raise ResumeError(f"{load.state['counts']['n']} is too many")

    path = save(tmp_path / "c", Counts(shared=3))
    accel = prepared(Strict(shared=1))
    before = [parameter.clone() for parameter in accel.models[0].parameters()]
    with pytest.raises(ResumeError, match="3 is too many"):
        accel.load_state(path)
    assert all(map(torch.equal, before, accel.models[0].parameters()))
