"""What benchmarks/loop_overhead.py says of its rounds, and its counts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "loop_overhead.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loop_overhead", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # where it finds counts.py
        spec.loader.exec_module(module)
    return module


PLAIN = [1000.0, 1001.0, 1002.0, 1003.0, 1004.0]
CLOSE = [1100.0, 1102.0, 1101.0, 1104.0, 1103.0]


def test_rounds_that_agree_give_a_ratio(benchmark: ModuleType) -> None:
    added = benchmark.Added(CLOSE, PLAIN)
    twice = benchmark.Added([2 * one - base for one, base in zip(CLOSE, PLAIN, strict=True)], PLAIN)
    assert added.is_sure
    assert benchmark.ratio(twice, added) == "2.00"


def test_rounds_that_differ_too_much_give_no_verdict(benchmark: ModuleType) -> None:
    cases = {
        "half of the rounds spread too far": [1085.0, 1131.0, 1102.0, 1083.0, 1144.0],
        "the fastest round says something else": [1100.0, 1101.0, 1102.0, 1103.0, 1040.0],
        "less than nothing": [one - 200.0 for one in CLOSE],
    }
    for why, values in cases.items():
        found, close = benchmark.Added(values, PLAIN), benchmark.Added(CLOSE, PLAIN)
        assert not found.is_sure, why
        assert benchmark.ratio(found, close).startswith("no verdict"), why
        assert benchmark.ratio(close, found).startswith("no verdict"), why
        assert "half of the rounds" in str(found)


def test_counts_of_a_step_are_the_same_each_time_and_see_a_callback(benchmark: ModuleType) -> None:
    first, second = (benchmark.counted(benchmark.ours)[:2] for _ in range(2))
    assert first == second
    assert min(first) > 0
    with_callbacks = benchmark.counted(benchmark.ours_with_callbacks)
    assert with_callbacks[0] > first[0]
    assert with_callbacks[1] > first[1]


def test_counts_leave_out_what_is_not_in_the_folder(benchmark: ModuleType, tmp_path: Path) -> None:
    steps = benchmark.OpcodeCounter(tmp_path).of(benchmark.ours(5))
    assert steps == [(0, 0)] * 4
