from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loggers import JSONLTracker, RunInfo, TrackerHub, read_jsonl


def _steps(path: Any) -> list[int]:
    return [row["step"] for row in read_jsonl(path)]


def test_schema_is_strict_json(run_info: Callable[..., RunInfo]) -> None:
    run = run_info()
    with TrackerHub(["jsonl"], run=run, strict=True) as hub:
        hub.log_config({"lr": math.inf, "path": Path("a")})
        hub.log({"a": math.nan, "b": -math.inf, "c": math.inf, "d": 1, "e": "é\n"}, 3)
    path = Path(run.logging_dir, "metrics.jsonl")

    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = path.read_text().splitlines()
    records = [json.loads(line, parse_constant=reject) for line in lines]
    now = time.time()
    assert all(abs(record.pop("time", now) - now) < 60 for record in records)
    values = {"a": "NaN", "b": "-Infinity", "c": "Infinity", "d": 1, "e": "é\n"}
    assert records == [
        {"type": "run", "run_id": "a1", "name": "digits", "resumed_step": None},
        {"type": "config", "config": {"lr": "Infinity", "path": "a"}},
        {"type": "metrics", "step": 3, "values": values},
        {"type": "finish", "status": "success"},
    ]
    (row,) = read_jsonl(path)
    assert math.isnan(row["values"]["a"])
    assert (row["values"]["b"], row["values"]["d"]) == (-math.inf, 1)


CHILD = """
import sys
from loggers import RunInfo, TrackerHub

hub = TrackerHub(["jsonl"], run=RunInfo("digits", sys.argv[1], "a1"), flush_every_s=0.01)
hub.start()
step = 0
while True:
    step += 1
    hub.log({"loss": 1.0 / step, "pad": "x" * 200}, step)
    if step % 500 == 0:
        hub.flush()
        print(step, flush=True)
"""


def test_sigkill_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        flushed = [int(child.stdout.readline()) for _ in range(6)][-1]
        child.send_signal(signal.SIGKILL)
        flushed = max([flushed, *(int(line) for line in child.stdout)])
    steps = _steps(path)
    assert len(steps) >= flushed >= 3000
    assert steps == list(range(1, len(steps) + 1))
    torn = [line for line in path.read_bytes().split(b"\n")[:-1] if not line.endswith(b"}")]
    assert torn == []


def test_a_torn_tail_is_closed_and_skipped(run_info: Callable[..., RunInfo]) -> None:
    run = run_info()
    path = Path(run.logging_dir, "metrics.jsonl")
    for resumed in (None, 1):
        with TrackerHub(["jsonl"], run=run_info(resumed), strict=True) as hub:
            hub.log({"a": 1}, 1 if resumed is None else 2)
        with path.open("ab") as file:
            file.write(b'{"type":"metrics","step":9,"values":{"a"' + b"\0" * 9)
    assert _steps(path) == [1, 2]
    assert path.read_bytes().count(b"\0\n") == 1


def test_resumes_and_fresh_runs_in_one_file(run_info: Callable[..., RunInfo]) -> None:
    path = Path(run_info().logging_dir, "metrics.jsonl")

    def run(resumed: int | None, steps: range) -> None:
        with TrackerHub(["jsonl"], run=run_info(resumed), strict=True) as hub:
            for step in steps:
                hub.log({"a": 1}, step)

    run(None, range(1, 9))
    run(5, range(6, 8))
    run(6, range(7, 10))
    assert _steps(path) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert json.loads(path.read_text().splitlines()[10])["resumed_step"] == 5
    run(None, range(1, 3))
    assert _steps(path) == [1, 2]
    run(0, range(1, 2))
    assert _steps(path) == [1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_loses_no_line_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = JSONLTracker()
    tracker.start(RunInfo("digits", str(tmp_path), "a1"))
    tracker.log({"a": 1}, 1)
    full, room = os.open("/dev/full", os.O_WRONLY), tracker._fd
    tracker._fd = full  # what the kernel says when the disk is full
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        tracker.flush()
    tracker.log({"a": 2}, 2)
    tracker._fd = room
    os.close(full)
    tracker.finish()
    assert _steps(tmp_path / "metrics.jsonl") == [1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_write_cut_short_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The kernel writes what fits below a size limit, then fails: a line is cut in the middle."""
    code = """
import resource, signal, sys
from loggers import JSONLTracker, RunInfo

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tracker = JSONLTracker()
tracker.start(RunInfo("digits", sys.argv[1], "a1"))
for step in range(20):
    tracker.log({"pad": "x" * 50}, step)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
try:
    tracker.flush()
except OSError as error:
    print("failed", error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
tracker.finish()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["failed", str(errno.EFBIG)]
    assert _steps(tmp_path / "metrics.jsonl") == list(range(20))


def test_one_write_a_flush(
    run_info: Callable[..., RunInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, writes = os.write, []

    def counted(fd: int, data: bytes) -> int:
        writes.append(bytes(data))
        return real(fd, data)

    hub = TrackerHub(["jsonl"], run=run_info(), strict=True, flush_every_s=1e9)
    hub.start()
    for step in range(100):
        hub.log({"a": step}, step)
    monkeypatch.setattr("loggers.jsonl.os.write", counted)
    hub.flush()
    assert len(writes) == 1
    assert writes[0].endswith(b"\n")
    monkeypatch.undo()
    hub.finish()


def test_remote_urls_are_refused_with_a_way_out(run_info: Callable[..., RunInfo]) -> None:
    with pytest.raises(ValueError, match=r"s3://.*local path"):
        JSONLTracker().start(run_info(logging_dir="s3://bucket/runs"))


def test_file_url_and_ranks(run_info: Callable[..., RunInfo], tmp_path: Path) -> None:
    for rank in (0, 1):
        run = run_info(logging_dir=f"file://{tmp_path}/all", rank=rank)
        tracker = JSONLTracker(all_ranks=True)
        with TrackerHub([tracker], run=run, main_process=rank == 0, strict=True) as hub:
            hub.log({"rank": rank}, 1)
    names = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert names == ["metrics-rank1.jsonl", "metrics.jsonl"]
