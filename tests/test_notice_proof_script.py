"""``scripts/notice_proof.py``: a few of its signals and notices."""

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

import notice_proof  # noqa: E402


@pytest.fixture(autouse=True)
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start runs, launchers and their ranks in milliseconds."""

    def start(words: list[str], **options: Any) -> Any:
        return warm.Popen(words, warm_children=True, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("processes", "notices"),
    [
        (1, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_disturbed_ends_with_the_weights_of_one_that_is_not(processes, notices):
    proof = notice_proof.prove(processes, 2, random.Random(0), notices=notices)
    assert proof.outcomes
    assert proof.same
    assert proof.steps == 0
