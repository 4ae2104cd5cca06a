"""A part that somebody else registers, on two processes: each gets its own, or none anything."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.checkpoint.part import CheckpointPart, Load, Sections

pytestmark = pytest.mark.distributed


class Counts(CheckpointPart):
    """Saves one number for all ranks and one of each rank; may refuse a load on one of them."""

    name = "counts"

    def __init__(self, shared: int, own: int, refuses: bool = False) -> None:
        self.shared, self.own, self.refuses = shared, own, refuses

    def capture(self) -> Sections:
        return {"counts": {"n": self.shared}}, {"counts": {"n": self.own}}

    def check(self, load: Load) -> None:
        if self.refuses:
            raise ValueError(f"{load.state['counts']['n']} is too many")

    def restore(self, load: Load) -> None:
        assert load.local is not None
        self.shared, self.own = load.selected["counts"]["n"], load.local["counts"]["n"]


def save_and_load(path: str, refusing: int | None) -> tuple[str, int, int, bool]:
    rank = int(os.environ["RANK"])
    accel = Accelerator(cpu=True)
    model = accel.prepare(torch.nn.Linear(2, 1))
    weight = next(model.parameters())
    counts = Counts(shared=3, own=10 + rank, refuses=rank == refusing)
    accel.training_state.register(counts)
    accel.save_state(path)
    with torch.no_grad():
        weight.zero_()
    counts.shared = counts.own = 0
    told = ""
    try:
        accel.load_state(path)
    except Exception as error:
        told = type(error).__name__
    return told, counts.shared, counts.own, bool(weight.any())


def test_each_process_gets_what_it_captured(pool: Any, tmp_path: Any) -> None:
    outcomes = pool.run(save_and_load, str(tmp_path / "c"), None)
    assert outcomes == [("", 3, 10, True), ("", 3, 11, True)]


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refusal_of_one_leaves_both_as_they_were(pool: Any, tmp_path: Any, refusing: int) -> None:
    outcomes = pool.run(save_and_load, str(tmp_path / "c"), refusing)
    assert outcomes[refusing] == ("ValueError", 0, 0, False)
    assert outcomes[1 - refusing] == ("RemoteError", 0, 0, False)
