"""Accelerate's own tests on this library, of which those on the page of differences may fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = Path("scripts", "own_tests")
PAGE = Path("docs", "reference", "accelerate-differences.md")
ROWS = """
| test | here |
|---|---|
| `test_known.py::*batch*`, `test_known.py::Kept::test_two` | another order |
| `test_whole.py` | a file that is not here |
"""
KNOWN = """
import unittest
from accelerate import Accelerator
from accelerate.test_utils import one


def test_batches():
    assert False


def test_other():
    assert False


class Kept(unittest.TestCase):
    def test_one(self):
        assert one == 1 and Accelerator.__module__ == "accelerate.accelerator"

    def test_two(self):
        assert False
"""


def test_tests_on_the_page_may_fail_and_others_are_counted(tmp_path):
    here, sources = tmp_path / "here", tmp_path / "sources"
    shutil.copytree(ROOT / PLACE, here / PLACE)
    (here / PAGE).parent.mkdir(parents=True)
    (here / PAGE).write_text(ROWS)
    utils = sources / "src" / "accelerate" / "test_utils"
    utils.mkdir(parents=True)
    (utils / "__init__.py").write_text("one = 1\n")
    (sources / "tests").mkdir()
    (sources / "tests" / "test_known.py").write_text(KNOWN)
    (sources / "tests" / "test_whole.py").write_text("raise SystemExit\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "own_tests", "-p", "no:cacheprovider"],
        cwd=sources,
        env={
            **os.environ,
            "ACCEL_OWN_TESTS": str(sources),
            "PYTHONPATH": os.pathsep.join([str(here / PLACE), str(ROOT)]),
        },
        capture_output=True,
        text=True,
    )
    said = "Accelerate's own tests: 1 passed, 1 failed, 2 on the page of differences, 0 skipped"
    assert said in done.stdout, done.stdout + done.stderr
    assert "FAILED tests/test_known.py::test_other" in done.stdout
