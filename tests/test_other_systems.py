"""Commands, training and loader workers as Windows and macOS see them, as far as Linux shows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ACCEL = ["-m", "accel_callbacks.cli"]
SYSTEMS = ["win32", "darwin"]

Run = Callable[..., str]


@pytest.fixture(params=SYSTEMS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run Python in an empty folder of another system; return what it printed."""
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(ROOT / "tests" / "support" / "other_system.py", site / "sitecustomize.py")
    (tmp_path / "work").mkdir()
    drop = ("ACCEL_", "TORCH", "PET_", "MASTER_", "RANK", "WORLD_SIZE", "GLOO_", "USE_LIBUV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "ACCEL_OTHER_SYSTEM": request.param,
        **dict.fromkeys(("HOME", "HF_HOME", "XDG_CACHE_HOME"), str(tmp_path / "home")),
        "OMP_NUM_THREADS": "1",
    }

    def start(*words: str, code: int = 0, script: str | None = None) -> str:
        if script is not None:
            (tmp_path / "work" / "script.py").write_text(textwrap.dedent(script), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path / "work", env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=110,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    return start


IMPORTS = """
    import importlib, os, pkgutil, sys
    import accel_callbacks, checkpoint_io, loggers

    assert not hasattr(os, "sched_getaffinity") and sys.platform != "linux"
    outside = ("accel_callbacks.integrations", "accel_callbacks.launch.worker", "__main__")
    for package in (accel_callbacks, checkpoint_io, loggers):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.startswith(outside[:2]) and not found.name.endswith(outside[2]):
                importlib.import_module(found.name)
    from accel_callbacks.cli.main import main
    for words in (["--help"], ["launch", "--help"], ["test", "--help"], ["env"],
                  ["config", "--default"], ["launch", "--dry_run", "script.py"]):
        try:
            assert not main(words), words
        except SystemExit as end:
            assert not end.code, words
"""


def test_every_module_can_be_imported_and_the_commands_start(run: Run) -> None:
    found = run("script.py", script=IMPORTS)
    assert "usage: accel" in found
    assert "RANK=0" in found


TWO = """
    import sys
    import torch
    from accel_callbacks import Accelerator

    accel = Accelerator(cpu=True)
    assert accel.reduce(torch.ones(1)).item() == accel.num_processes
    accel.print("processes:", accel.num_processes, *sys.argv[1:], flush=True)
    if "--fail" in sys.argv and accel.process_index == accel.num_processes - 1:
        sys.exit(7)
"""


@pytest.mark.distributed
def test_launches_run_and_return_the_exit_code(run: Run) -> None:
    launch = [*ACCEL, "launch", "--cpu"]
    assert "processes: 1 a b --fail" in run(
        *launch, "script.py", "a b", "--fail", code=7, script=TWO
    )
    two = [*launch, "--num_processes", "2", "--max_restarts", "1"]
    found = run(*two, "script.py", "--fail", code=7, script=TWO)
    assert found.count("processes: 2") == 2
    assert "rank 1 exited with code 7" in found


@pytest.mark.distributed
def test_accel_test_passes_on_two_processes(run: Run) -> None:
    found = run(*ACCEL, "test", "--cpu", "--num_processes", "2")
    assert "2 processes" in found


def test_digits_train_resume_and_log(run: Run, tmp_path: Path) -> None:
    words = [str(ROOT / "examples" / "digits.py"), "--project_dir", "runs", "--cpu"]
    run(*ACCEL, "launch", *words, "--epochs", "1")
    run(*words, "--epochs", "2")
    rows = (tmp_path / "work" / "runs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(row)["step"] for row in rows if "train/loss" in row]
    assert steps == sorted(set(steps)), "the second run goes on where the first ended"
    assert list((tmp_path / "work" / "runs" / "checkpoints").glob("step-*/manifest.json"))


NOTEBOOK = """
    import sys
    import torch
    from torch.utils.data import DataLoader
    from accel_callbacks import Accelerator, debug_launcher, notebook_launcher

    def sum_of_digits():
        accel = Accelerator(cpu=True)
        return sum(b.sum().item() for b in accel.prepare(DataLoader(range(8), 2, num_workers=1)))

    def world(factor):
        return factor * Accelerator(cpu=True).num_processes

    if __name__ == "__main__":
        assert notebook_launcher(sum_of_digits, num_processes=1) == [28]
        try:
            assert debug_launcher(world, (10,)) == [20, 20]
            print("two")
            debug_launcher(lambda: None)
        except RuntimeError as error:
            print(error)
        if sys.platform == "darwin":
            assert notebook_launcher(world, (1,)) == [1]
"""


@pytest.mark.distributed
def test_functions_are_launched_where_that_is_safe(
    run: Run, request: pytest.FixtureRequest
) -> None:
    found = run("script.py", script=NOTEBOOK)
    if "darwin" in request.node.name:
        assert "two" in found
        assert "save the function to a .py file" in found
    else:
        assert "start it with `accel launch`" in found
