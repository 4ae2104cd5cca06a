"""Run the tests with the marker `gpu`, a process for each file, and print a table of them.

    scripts/test_gpu [--minutes N] [words for pytest]

Each file has a process of its own, because an error of a kernel spoils CUDA for the whole process.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(r"\bmark\.gpu\b")
MINUTES = 14.0  # of the fifteen, the rest is for the start
FILE_SECONDS = 300.0
FAILED, OVERDUE = 1, 3


@dataclass(frozen=True)
class Row:
    """A line of the table; ``result`` is ``passed``, ``skipped``, ``FAILED`` or ``not run``."""

    check: str
    result: str
    seconds: float = 0.0
    why: str = ""


def marked_files(folder: Path) -> list[Path]:
    """Return the test files that name the marker; those in a folder named gpu first."""
    files = [
        path
        for path in sorted(folder.rglob("test_*.py"))
        if MARKER.search(path.read_text(encoding="utf-8"))
    ]
    return sorted(files, key=lambda path: path.parent.name != "gpu")


def run_file(path: Path, words: Sequence[str], seconds: float) -> list[Row]:
    """Run the marked tests of a file; a process that dies or hangs is a row too."""
    name = str(path.relative_to(ROOT) if ROOT in path.parents else path.name)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += ["-c", str(ROOT / "setup.cfg"), f"--rootdir={ROOT}", f"--junitxml={report}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        started = time.monotonic()
        process = subprocess.Popen(
            [*command, str(path), *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its processes too
            output, _ = process.communicate()
            took = time.monotonic() - started
            return [Row(name, "FAILED", took, f"hung: ended after {seconds:.0f} s")]
        took = time.monotonic() - started
        rows = list(read_report(report, name)) if report.exists() else []
    if process.returncode not in (0, 5) and not any(row.result == "FAILED" for row in rows):
        code = process.returncode
        ended = f"died by signal {-code}" if code < 0 else f"ended with exit code {code}"
        rows.append(Row(name, "FAILED", took, f"{ended}: {last_line(output)}"))
    if any(row.result == "FAILED" for row in rows):
        print(output, flush=True)
    return rows


def read_report(report: Path, name: str) -> Iterable[Row]:
    """Yield a row for each test of pytest's XML report."""
    for case in ET.parse(report).getroot().iter("testcase"):
        check = f"{name}::{case.get('name', '')}"
        seconds = float(case.get("time", "0"))
        problem = next((one for one in case if one.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if problem is not None:
            yield Row(check, "FAILED", seconds, last_line(problem.get("message", "")))
        elif skipped is not None:
            yield Row(check, "skipped", seconds, skipped.get("message", ""))
        else:
            yield Row(check, "passed", seconds)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def run_all(files: Sequence[Path], words: Sequence[str], minutes: float) -> list[Row]:
    """Run the files one after the other, until the time is over."""
    deadline = time.monotonic() + minutes * 60
    rows: list[Row] = []
    for path in files:
        left = deadline - time.monotonic()
        if left < 1:
            rows.append(Row(str(path.relative_to(ROOT)), "not run", 0.0, "the time is over"))
            continue
        print(f"== {path.relative_to(ROOT)}", flush=True)
        rows += run_file(path, words, min(left, FILE_SECONDS))
    return rows


def print_table(rows: Sequence[Row]) -> None:
    """Print a line for each check, and how many had which result."""
    width = max((len(row.check) for row in rows), default=5)
    print(f"{'check':{width}}  {'result':7}  {'seconds':>7}  why")
    for row in rows:
        print(f"{row.check:{width}}  {row.result:7}  {row.seconds:7.1f}  {row.why}".rstrip())
    counts = {result: sum(row.result == result for row in rows) for result in RESULTS}
    print(", ".join(f"{count} {result}" for result, count in counts.items() if count) or "no test")


RESULTS = ("passed", "FAILED", "skipped", "not run")


def exit_code(rows: Sequence[Row]) -> int:
    results = {row.result for row in rows}
    return FAILED if "FAILED" in results else OVERDUE if "not run" in results else 0


def print_machine() -> bool:
    """Print what this machine can run; return whether torch has a GPU."""
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device: there is nothing to test")
        return False
    count = torch.cuda.device_count()
    names = ", ".join(dict.fromkeys(torch.cuda.get_device_name(n) for n in range(count)))
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {count} GPU: {names}")
    two = "two GPUs" if count > 1 else "not what needs two GPUs"
    print(f"runs what one GPU can, two processes on one GPU over gloo, {two}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test_gpu", allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="at most (default: 14)")
    options, words = parser.parse_known_args()
    if not print_machine():
        return 0
    rows = run_all(marked_files(ROOT / "tests"), words, options.minutes)
    print_table(rows)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
