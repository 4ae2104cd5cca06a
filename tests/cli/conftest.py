"""Run the real command in its own process group, so that no test leaves a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support import ports, warm

collect_ignore = ["accelerate_scripts"]  # they need accelerate, and are run by test_migrate_runs.py

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def clean_environment(home: Path) -> dict[str, str]:
    """Ours without what steers a launch, and without the config of who runs this."""
    drop = ("ACCEL_", "OMP_NUM_THREADS", "TORCH", "PET_", "MASTER_", "RANK", "WORLD_SIZE")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return {"ACCEL_HOME": str(home), **env}


def starting(folder: Path, popen: Callable[..., subprocess.Popen[str]]) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, **extra: str) -> subprocess.Popen[str]:
        process = popen(
            [sys.executable, "-m", "accel_callbacks.cli", *words],
            cwd=folder,
            env={**clean_environment(folder), **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``accel`` with the given words in tmp_path; killed at the end if still there."""
    yield from starting(tmp_path, subprocess.Popen)


@pytest.fixture
def warm_start(tmp_path: Path) -> Iterator[Start]:
    """Start ``accel`` in a fork that has torch; killed at the end if still there."""
    yield from starting(tmp_path, partial(warm.Popen, warm_children=True))


@pytest.fixture
def accel(start: Start) -> Run:
    """Run ``accel`` to its end."""

    def run(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        process = start(*words, **extra)
        out, err = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    return run


@pytest.fixture
def warm_accel(tmp_path: Path) -> Run:
    """Run ``accel`` to its end, in a fork that has torch: for what the launched script does."""

    def run(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return warm.run(
            [sys.executable, "-m", "accel_callbacks.cli", *words],
            cwd=tmp_path,
            env={**clean_environment(tmp_path), **extra},
            capture_output=True,
            text=True,
            warm_children=True,
        )

    return run


@pytest.fixture
def free_port() -> int:
    """Return a port that was free a moment ago."""
    return ports.free_port()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """Write a script into the test's folder; returns its name."""

    def write_script(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return name

    return write_script
