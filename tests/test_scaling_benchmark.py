"""What benchmarks/scaling.py says of its rounds, and that it runs; and its neighbors."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling_benchmark", FOLDER / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_verdict_of_rounds_that_agree(benchmark: ModuleType) -> None:
    cases = [
        ([1.9, 1.92, 1.88], 2, "1.90 times one device [1.88..1.92]: near twice the speed"),
        ([1.5, 1.52, 1.51], 2, ": NOT near twice the speed (1.80 or more)"),
        ([1.9, 1.5, 1.95], 2, ": no verdict"),
        ([3.7], 4, ": near 4 times the speed"),
    ]
    for ratios, devices, words in cases:
        assert words in benchmark.verdict(ratios, devices)


def test_the_first_steps_do_not_count(benchmark: ModuleType, tmp_path: Path) -> None:
    times = [0.0, 10.0, 10.5, 11.0, 11.5]  # the second step takes long
    rows = [{"type": "run", "time": 0.0}]
    rows += [{"type": "metrics", "step": n + 1, "time": t} for n, t in enumerate(times)]
    log = tmp_path / "metrics.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))
    assert benchmark.tokens_a_second(log, tokens=100, warmup=2) == pytest.approx(200)


def run(script: str, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_it_runs_on_two_processes_of_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {n} is no. {n * 7919 % 1000}.\n" for n in range(4000)))
    words = ["--cpu", "--small", "--steps", "4", "--warmup", "2", "--rounds", "1", "--batch", "2"]
    words += ["--layouts", "fsdp", "--text", str(text)]
    printed = run("scaling.py", *words).splitlines()
    assert printed[-2].startswith("1 device ")
    assert printed[-1].startswith("2 devices, fsdp ")
    assert "near twice the speed" in printed[-1]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("script", ["ddp_overhead.py", "sharding.py"])
def test_the_loops_of_several_processes_run_in_rounds(script: str) -> None:
    printed = run(script, "--rounds", "2", "--width", "16").splitlines()
    lines = {line.split()[0]: line for line in printed if " ms a step " in line}
    assert {"ours", "plain"} <= lines.keys()
    assert " 1.000 of " in lines["plain"]
