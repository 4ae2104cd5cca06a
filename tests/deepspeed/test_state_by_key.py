"""What an optimizer keeps under a name, not by parameter, is in the checkpoints of each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="deepspeed is not installed: scripts/test_deepspeed")

from accel_callbacks import Accelerator
from tests.deepspeed.jobs import PATIENCE, engine, finish, net

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


class Counting(torch.optim.AdamW):
    """AdamW that counts its steps under a name, and learns more slowly after each."""

    def step(self, closure: Any = None) -> Any:
        taken = self.state.setdefault("taken", {"steps": 0})
        taken["steps"] += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / taken["steps"]
        return super().step(closure)


def steps(layout: str, path: str, loads: bool, count: int) -> tuple[int, list[float]]:
    accel = Accelerator(cpu=True, timeout=PATIENCE, **engine(layout))
    model = net()
    model, optimizer = accel.prepare(model, Counting(model.parameters()))
    if loads:
        accel.load_state(path)
    for _ in range(count):
        accel.backward(model(torch.ones(2, 7)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    inner = optimizer
    while hasattr(inner, "inner") or hasattr(inner, "optimizer"):
        inner = getattr(inner, "inner", None) or inner.optimizer
    taken = inner.state["taken"]["steps"]
    if not loads:
        accel.save_state(path)
    state = accel.get_state_dict(model)
    weights = [x for value in state.values() for x in value.float().flatten().tolist()]
    finish(accel)
    return taken, weights


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero2", "zero3"])
def test_it_goes_on_from_where_it_was(pool: Any, tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "c")
    whole, wanted = pool.run(steps, layout, str(tmp_path / "whole"), False, 4)[0]
    half, _ = pool.run(steps, layout, path, False, 2)[0]
    resumed, found = pool.run(steps, layout, path, True, 2)[0]
    assert (whole, half, resumed) == (4, 2, 4)
    assert found == wanted


def test_another_layout_has_it_too(pool: Any, tmp_path: Path) -> None:
    pool.run(steps, "zero2", str(tmp_path / "c"), False, 2)
    assert pool.run(steps, "ddp", str(tmp_path / "c"), True, 1)[0][0] == 3
