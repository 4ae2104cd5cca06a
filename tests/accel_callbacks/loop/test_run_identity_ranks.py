"""Another name or config is the finding of rank 0, and a ResumeError on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, ResumeError
from accel_callbacks.callbacks import Checkpoint
from tests.support.bound import BOUND
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed


def start(folder: str, name: str, own: bool, lr: float, resume: Any = True) -> tuple[str, int]:
    """A start of a script whose config has the rank in it, if it is ``own`` to each."""
    accel = Accelerator(cpu=True, project_dir=folder, callbacks=[Checkpoint()], timeout=BOUND)
    data = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1)
    model = torch.nn.Linear(1, 1)
    model, data = accel.prepare(model, data)
    optimizer = accel.prepare(torch.optim.SGD(model.parameters(), lr=lr))
    config = {"lr": lr, "device": f"cuda:{accel.process_index + lr if own else 0}"}
    try:
        with accel.run(name, config, resume=resume, may_change=["device"] * (not own)) as run:
            for _ in run.epochs(1):
                for batch in data:
                    accel.backward(model(batch).mean())
                    optimizer.step()
                    optimizer.zero_grad()
    except ResumeError as error:
        return str(error), accel.current_run.global_step
    return run.resumed_from or "", run.global_step


def test_another_run_is_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(start, str(tmp_path), "a", False, 0.1) == [("", 2)] * 2
    texts, steps = zip(*pool.run(start, str(tmp_path), "b", False, 0.2), strict=True)
    assert texts[0] == texts[1]
    assert "name: 'a' -> 'b'" in texts[0]
    assert "config lr: 0.1 -> 0.2" in texts[0]
    assert steps == (0, 0)
    anyway = pool.run(start, str(tmp_path), "b", False, 0.2, "anyway")
    assert anyway == [(str(tmp_path / "checkpoints" / "step-00000002"), 2)] * 2


def test_what_differs_on_another_rank_alone_is_no_difference(pool: Pool, tmp_path: Path) -> None:
    first = pool.run(start, str(tmp_path), "a", True, 0.1)
    assert first == [("", 2)] * 2
    again = pool.run(start, str(tmp_path), "a", True, 0.1)
    assert again == [(str(tmp_path / "checkpoints" / "step-00000002"), 2)] * 2
