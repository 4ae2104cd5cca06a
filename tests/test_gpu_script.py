"""scripts/test_gpu: what it finds, and that no test can hide from its table or outlast it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_table", ROOT / "scripts" / "gpu_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    return module


MIXED = """
import pytest
pytestmark = pytest.mark.gpu
def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="needs two GPUs")
def test_left(): pass
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "test_written.py"
    path.write_text(text)
    return path


def test_each_test_is_a_row(
    table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unmarked = "\n@pytest.mark.filterwarnings('ignore')\ndef test_another(): pass\n"
    rows = table.run_file(written(tmp_path, MIXED), [], 1e6)
    assert [(row.check.rpartition("::")[2], row.result) for row in rows] == [
        ("test_good", "passed"),
        ("test_bad", "FAILED"),
        ("test_left", "skipped"),
    ]
    assert rows[1].why == "assert 1 == 2"
    assert rows[2].why == "needs two GPUs"
    assert table.exit_code(rows) == 1
    assert table.exit_code(rows[::2]) == 0
    table.print_table(rows)
    assert capsys.readouterr().out.endswith("1 passed, 1 FAILED, 1 skipped\n")
    only = MIXED.replace("pytestmark = pytest.mark.gpu", "") + unmarked
    assert table.run_file(written(tmp_path, only), [], 1e6) == []


def test_a_process_that_dies_is_a_failure(table: ModuleType, tmp_path: Path) -> None:
    text = "import os, pytest\n@pytest.mark.gpu\ndef test_dies():\n    os.kill(os.getpid(), 9)\n"
    (row,) = table.run_file(written(tmp_path, text), [], 1e6)
    assert row.result == "FAILED"
    assert "died by signal 9" in row.why


def test_a_file_that_cannot_be_imported_is_a_failure(table: ModuleType, tmp_path: Path) -> None:
    text = "import pytest\npytestmark = pytest.mark.gpu\nraise OSError('no libcudart')\n"
    rows = table.run_file(written(tmp_path, text), [], 1e6)
    assert table.exit_code(rows) == 1


HANGS = """
import pathlib, subprocess, sys
import pytest
@pytest.mark.gpu
def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    child.wait()
"""


def test_a_file_that_hangs_is_ended_with_its_processes(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "child"

    class Overdue(subprocess.Popen):
        """One whose time is over when it hangs."""

        def communicate(self, timeout: float | None = None) -> tuple[str, str]:
            while timeout is not None:
                assert self.poll() is None
                if note.exists() and note.read_text():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.02)
            return super().communicate()

    monkeypatch.setattr(table.subprocess, "Popen", Overdue)
    (row,) = table.run_file(written(tmp_path, HANGS), [], 8)
    assert (row.result, row.why) == ("FAILED", "hung: ended after 8 s")
    stat = Path("/proc", note.read_text(), "stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":
        time.sleep(0.02)  # a signal takes effect when the process runs next


def test_files_are_found_by_the_marker_and_named_where_there_is_no_time(
    table: ModuleType,
) -> None:
    files = table.marked_files(ROOT / "tests")
    found = [str(path.relative_to(ROOT)) for path in files]
    assert found[0].split("/")[-2] == "gpu"
    for name in ("tests/accel_callbacks/test_gpu.py", "tests/checkpoint_io/test_snapshot.py"):
        assert name in found
    assert "tests/test_docs.py" not in found
    rows = table.run_all(files, [], 0)
    assert {row.result for row in rows} == {"not run"}
    assert len(rows) == len(files)
    assert table.exit_code(rows) == 3


def test_without_a_driver_it_says_so_and_succeeds(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts" / "test_gpu")],
        env={**os.environ, "GPU_PYTHON": sys.executable, "PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "has no NVIDIA GPU" in done.stdout
    assert "nothing to test" in done.stdout


def test_without_a_device_of_torchs_it_says_so_and_succeeds(
    table: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_table.py"])
    assert table.main() == 0
    assert "finds no CUDA device: there is nothing to test" in capsys.readouterr().out
