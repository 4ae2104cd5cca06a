"""The counts of benchmarks/counts.py do not grow unnoticed, and each benchmark runs."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import warm

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"

# A small form of each script.
SMALL = {
    "checkpoint_scale.py": "--ranks 4 --layers 2 --rounds 1",
    "hooks.py": "--rounds 1 --calls 2",
    "journal.py": "--rounds 2",
    "log_overhead.py": "--rounds 1 --calls 10 --rows 10",
    "plan.py": "--units 100 --layers 10 --rounds 1",
}
# What starts fresh interpreters or a server, or takes many steps.
SLOW = {
    "checkpoint.py": "--gigabytes 0.01 --rounds 2 --only save,background,view --contenders ours",
    "checkpoint_s3.py": "--mib 8 --rounds 1 --servers sink",
    "cli.py": "--rounds 1",
    "import_time.py": "--rounds 1",
    "load_model.py": "--gigabytes 0.01 --rounds 1",
    "loop_overhead.py": "--rounds 2",
    "offload.py": "--width 64 --depth 2 --words 100 --rounds 1",
    "trainer.py": "--steps 4 --rounds 1 --only plain",
}
# In test_scaling_benchmark.py, in test_gpu_benchmark.py, and below.
ELSEWHERE = {
    *("ddp_overhead.py", "scaling.py", "sharding.py", "gpu.py", "counts.py"),
    "restart.py",  # kills workers of a launch, as tests/cli/test_elastic.py does
}
# Their children are fresh: one counts what is imported, in the other Accelerate is replaced before
# anything has imported it.
FRESH_CHILDREN = ("counts.py", "trainer.py")


def run(script: str, words: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    done = warm.run(
        [sys.executable, str(FOLDER / script), *words.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        warm_children=script not in FRESH_CHILDREN,
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_no_count_has_grown(tmp_path: Path) -> None:
    printed = run("counts.py", "--check", tmp_path)
    assert printed.startswith("Python 3.")


def load(script: str) -> ModuleType:
    """Import a file of benchmarks under a name of its own."""
    name = f"{Path(script).stem}_benchmark"
    spec = importlib.util.spec_from_file_location(name, FOLDER / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def counts() -> ModuleType:
    return load("counts.py")


def check(
    counts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: int, now: int
) -> None:
    """Run the script where one count was recorded, and is something else now."""
    record = tmp_path / "counts.json"
    record.write_text(json.dumps({counts.VERSIONS: {"opcodes of a step": recorded}}))
    monkeypatch.setattr(counts, "RECORD", record)
    monkeypatch.setattr(counts, "measure", lambda: {"opcodes of a step": now})
    monkeypatch.setattr(sys, "argv", ["counts.py", "--check"])
    counts.main()


def test_a_count_that_has_grown_fails_with_the_command_that_records_it(
    counts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"opcodes of a step: 601, recorded 600\n.*--write"):
        check(counts, monkeypatch, tmp_path, recorded=600, now=601)


def test_a_smaller_count_and_other_versions_pass(
    counts: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check(counts, monkeypatch, tmp_path, recorded=600, now=599)
    assert "(recorded: 600)" in capsys.readouterr().out
    monkeypatch.setattr(counts, "recorded", lambda: None)
    check(counts, monkeypatch, tmp_path, recorded=600, now=601)
    assert "no counts" in capsys.readouterr().out


def test_each_script_has_a_small_form() -> None:
    scripts = {
        path.name
        for path in FOLDER.glob("*.py")
        if any(
            isinstance(node, ast.Compare) and ast.unparse(node) == "__name__ == '__main__'"
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    # It serves checkpoint.py, and starts no measurement by itself.
    assert scripts - {"checkpoint_small.py"} == {*SMALL, *SLOW, *ELSEWHERE}


@pytest.mark.parametrize("script", SMALL)
def test_a_benchmark_runs(script: str, tmp_path: Path) -> None:
    assert run(script, SMALL[script], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", SLOW)
def test_a_long_benchmark_runs(script: str, tmp_path: Path) -> None:
    assert run(script, SLOW[script], tmp_path)


def test_results_have_quartiles_and_no_path_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = load("results.py")
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "hooks.py"), "--peer", str(tmp_path / "bin")])
    results.write("hooks", {"microseconds": {"ours": [4.0, 1.0, 3.0, 2.0, 5.0]}})
    text = (tmp_path / "results" / "hooks.json").read_text()
    assert str(tmp_path) not in text
    record = json.loads(text)
    assert record["command"] == "python benchmarks/hooks.py --peer PATH"
    assert record["figures"] == {
        "microseconds": {"ours": {"low": 2, "median": 3, "high": 4, "least": 1, "rounds": 5}}
    }
    assert {"machine", "date", "versions"} < record.keys()
