"""Commands and functions as Windows and macOS see them, as far as Linux shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

ACCEL = ["-m", "accel_callbacks.cli"]

Run = Callable[..., str]


IMPORTS = """
    import importlib, os, pkgutil, sys
    import accel_callbacks, checkpoint_io, loggers

    assert not hasattr(os, "sched_getaffinity") and sys.platform != "linux"
    outside = ("accel_callbacks.integrations", "accel_callbacks.launch.worker")
    for package in (accel_callbacks, checkpoint_io, loggers):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.startswith(outside) and not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    from accel_callbacks.cli.main import main
    for words in (["--help"], ["launch", "--help"], ["test", "--help"], ["env"],
                  ["config", "--default"], ["launch", "--dry_run", "script.py"]):
        try:
            assert not main(words), words
        except SystemExit as end:
            assert not end.code, words
"""


def test_every_module_can_be_imported_and_the_commands_start(on_other_system: Run) -> None:
    found = on_other_system("script.py", script=IMPORTS)
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


@pytest.mark.parametrize(
    "on_other_system", ["win32", pytest.param("darwin", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.distributed
def test_launches_run_and_return_the_exit_code(on_other_system: Run) -> None:
    launch = [*ACCEL, "launch", "--cpu"]
    assert "processes: 1 a b --fail" in on_other_system(
        *launch, "script.py", "a b", "--fail", code=7, script=TWO
    )
    two = [*launch, "--num_processes", "2", "--max_restarts", "1"]
    found = on_other_system(*two, "script.py", "--fail", code=7, script=TWO)
    assert found.count("processes: 2") == 2
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
