"""``scripts/loss_proof.py``: runs that lose a rank end as those that lose none."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from loss_proof import Loss, prove  # noqa: E402

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm"),
]


@pytest.fixture(autouse=True)
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start launchers and their ranks in milliseconds."""

    def start(words: list[str], **options: Any) -> Any:
        return warm.run(words, warm_children=True, **options)

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("layout", "survive"),
    [
        ("DDP", False),
        pytest.param("FSDP2", False, marks=pytest.mark.slow),
        pytest.param("DDP", True, marks=pytest.mark.slow),
        pytest.param("HSDP, 2 x 2", False, marks=pytest.mark.slow),
    ],
)
def test_lost_ranks_cost_a_few_steps_and_no_bit(layout: str, survive: bool, tmp_path: Path) -> None:
    options = {"memory_every": 2, "save_every": 100, "epochs": 1, "machines": 1}
    args = argparse.Namespace(**options, survive=survive)
    result = prove(layout, tmp_path, [Loss((1,), 7, 0.0), Loss((0,), 15, 0.003)], args)
    assert result.differences == []
    assert result.samples == 0
    assert result.from_memory == 2
    assert len(result.repeated) == 2
    # A snapshot that was being written does not count; a step may be done before the timer fires.
    assert all(steps <= 4 for steps in result.repeated)


@pytest.mark.parametrize(
    ("layout", "machines"),
    [("DDP", 1), ("DDP", 2), pytest.param("HSDP, 2 x 2", 2, marks=pytest.mark.slow)],
)
def test_the_state_of_a_rank_that_is_left_costs_one_step_at_most(
    layout: str, machines: int, tmp_path: Path
) -> None:
    options = {"memory_every": 10, "save_every": 100, "epochs": 1, "machines": machines}
    losses = [Loss((1,), 7, -1), Loss((0,), 12, 0.0), Loss((0,), 18, -1)]
    result = prove(layout, tmp_path, losses, argparse.Namespace(**options, survive=True))
    assert result.differences == []
    assert result.samples == 0
    assert result.living == 3
    assert result.repeated[::2] == [0, 0]
    assert result.repeated[1] <= 1
