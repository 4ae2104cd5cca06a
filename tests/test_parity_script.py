"""The tables of ``scripts/parity``: what a cell says, and one engine with all features (slow)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import parity  # noqa: E402

REFUSAL = (
    "mixed_precision='fp16' does not go with a pipeline, which runs backward before the loss can "
    'be scaled: use "bf16".'
)


def test_a_cell_holds_its_difference_or_a_refusal_that_is_known() -> None:
    cases = [
        ("pp x tp", [1.0, 2.0], ("0e+00", True)),
        ("pp", [1.0, 2.5], ("5e-01", False)),
        ("pp", REFUSAL, ("refused", True)),
        ("pp", "a size does not fit", ("refused", False)),
        ("tp", REFUSAL, ("refused", False)),
    ]
    for engine, outcome, cell in cases:
        assert parity.cell(engine, "fp16", outcome, [1.0, 2.0], 1e-5) == cell


def test_a_row_that_does_not_hold_is_marked_and_told() -> None:
    table = parity.Table(["bf16", "fp16"])
    table.add("pp", [("5e-01", False), ("refused", True)], [[1.0], REFUSAL])
    assert not table.holds
    assert table.markdown().splitlines()[-1] == "| pp | **5e-01** | refused |"
    assert table.notes == ["pp, bf16: [1.0]", f"pp, fp16: {REFUSAL}"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("engine", [name for name in parity.ENGINES if name != parity.ALONE])
def test_all_features_hold_under_an_engine(engine: str) -> None:
    pytest.importorskip("transformers")
    if not parity.ENGINES[engine].is_installed:
        pytest.skip(f"what {engine} needs is not installed")
    words = [sys.executable, str(ROOT / "scripts" / "parity.py"), "--features", "--engine", engine]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
