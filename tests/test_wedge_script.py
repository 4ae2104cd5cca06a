"""``scripts/wedge``: a loop for Accelerate that is killed, and what the table says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import wedge  # noqa: E402


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_loop_that_is_killed_ends_with_the_weights_of_one_that_is_not(tmp_path: Path) -> None:
    job = "loop, default order"
    wanted, steps = wedge.unbroken(wedge.OWN, 1, job, tmp_path / "unbroken")
    assert steps == 72
    outcome = wedge.survived(wedge.OWN, 1, job, tmp_path / "killed", steps, kills=2, seed=1)
    assert outcome == (wanted, 2, [])


def test_the_error_of_a_start_is_what_is_shown() -> None:
    said = "x\n[rank1]: Traceback:\n[rank1]: FileNotFoundError: trainer_state.json\nValueError: y"
    assert wedge.last_line(said) == "FileNotFoundError: trainer_state.json"
    assert wedge.last_line("ended by a signal") == "ended by a signal"


def test_the_newest_is_removed_by_hand(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "logs"):
        (tmp_path / name).mkdir()
    wedge.remove_newest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-9", "logs"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_kill_ends_what_a_process_has_started() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    words = [sys.executable, "-c", child]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True) as process:
        while len(tree := wedge.descendants(process.pid)) < 2:
            assert process.poll() is None
        wedge.kill(process)
    assert not any(Path(f"/proc/{pid}").exists() for pid in tree)
