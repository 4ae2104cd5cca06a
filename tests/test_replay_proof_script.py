"""``scripts/replay_proof.py``: a few of its runs, and some of their random steps."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import replay_proof  # noqa: E402

QUICK = "digits, DDP, healed from memory, killed"


@pytest.fixture(autouse=True)
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start runs, launchers and their ranks in milliseconds."""

    def start(words: list[str], **options: Any) -> Any:
        return warm.run(words, warm_children=True, **options)

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_random_steps_are_replayed_with_equal_bits(tmp_path: Path) -> None:
    result = replay_proof.prove(replay_proof.CASES[QUICK], tmp_path, 3, random.Random(0))
    assert result.steps == 3
    assert result.compared >= 3
    assert result.differences == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(replay_proof.CASES.keys() - {QUICK}))
def test_random_steps_of_the_other_runs_too(name: str, tmp_path: Path) -> None:
    if "GPT-2" in name:
        pytest.importorskip("transformers")
    result = replay_proof.prove(replay_proof.CASES[name], tmp_path, 3, random.Random(0))
    assert result.differences == []
