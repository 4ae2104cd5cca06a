"""Commands and functions as Windows and macOS see them, as far as Linux shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ACCEL = ["-m", "accel_callbacks.cli"]
EXAMPLE = Path(__file__).parent.parent / "examples" / "digits.py"

Run = Callable[..., str]


IMPORTS = """
    import importlib, json, os, pathlib, pkgutil, runpy, sys
    import accel_callbacks, checkpoint_io, loggers
    from accel_callbacks.cli.main import main

    def check():
        assert not hasattr(os, "sched_getaffinity") and sys.platform != "linux"
        outside = ("accel_callbacks.addons.hosts", "accel_callbacks.launch.worker")
        for package in (accel_callbacks, checkpoint_io, loggers):
            for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                if not found.name.startswith(outside) and not found.name.endswith("__main__"):
                    importlib.import_module(found.name)
        for words in (["--help"], ["launch", "--help"], ["test", "--help"], ["env"],
                      ["config", "--default"], ["launch", "--dry_run", "script.py"]):
            try:
                assert not main(words), words
            except SystemExit as end:
                assert not end.code, words

    if __name__ == "__main__":
        check()
"""
SELF_TEST = """
        assert main(["test", "--cpu", "--num_processes", "2"]) == 0
"""
DIGITS = f"""
        for epochs in "12":
            sys.argv[1:] = ["--project_dir", "runs", "--cpu", "--epochs", epochs]
            runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
        rows = pathlib.Path("runs/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [json.loads(row)["step"] for row in rows if "train/loss" in row]
        assert steps == sorted({{*steps}}), "the second run goes on where the first ended"
        assert list(pathlib.Path("runs/checkpoints").glob("step-*/manifest.json"))
"""


# The other system of each is slow: between them both are tried.
@pytest.mark.parametrize(
    ("on_other_system", "then"),
    [
        ("win32", DIGITS),
        ("darwin", SELF_TEST),
        pytest.param("win32", SELF_TEST, marks=pytest.mark.slow),
        pytest.param("darwin", DIGITS, marks=pytest.mark.slow),
    ],
    ids=["win32 digits", "darwin self-test", "win32 self-test", "darwin digits"],
    indirect=["on_other_system"],
)
@pytest.mark.distributed
def test_modules_can_be_imported_commands_start_and_models_are_trained(
    on_other_system: Run, then: str
) -> None:
    found = on_other_system("script.py", script=IMPORTS + then)
    assert "usage: accel" in found
    assert "RANK=0" in found
    if then == SELF_TEST:
        assert "2 processes" in found


TWO = """
    import os, sys

    if os.environ["WORLD_SIZE"] == "2" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        import torch
        from accel_callbacks import Accelerator

        accel = Accelerator(cpu=True)
        accel.print("processes:", accel.num_processes, flush=True)
        assert accel.reduce(torch.ones(1)).item() == 2  # no rank ends before the first has printed
    print("rank", os.environ["RANK"], *sys.argv[1:], flush=True)
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        sys.exit(7)
"""


@pytest.mark.parametrize(
    "on_other_system", ["win32", pytest.param("darwin", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.distributed
def test_launches_run_and_return_the_exit_code(on_other_system: Run) -> None:
    launch = [*ACCEL, "launch", "--cpu"]
    found = on_other_system(*launch, "script.py", "a b", code=7, script=TWO)
    assert "rank 0 a b" in found
    two = [*launch, "--num_processes", "2", "--max_restarts", "1"]
    found = on_other_system(*two, "script.py", code=7, script=TWO)
    assert (found.count("processes: 2"), found.count("rank 1\n")) == (1, 2)
    assert "rank 1 exited with code 7" in found


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


@pytest.mark.slow
@pytest.mark.distributed
def test_functions_are_launched_where_that_is_safe(
    on_other_system: Run, request: pytest.FixtureRequest
) -> None:
    found = on_other_system("script.py", script=NOTEBOOK)
    if "darwin" in request.node.name:
        assert "two" in found
        assert "save the function to a .py file" in found
    else:
        assert "start it with `accel launch`" in found
