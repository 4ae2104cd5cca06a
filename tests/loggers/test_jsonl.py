from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loggers import JSONLTracker, RunInfo, TrackerHub, read_jsonl
from loggers.trackers.line_file import LocalLines


def _steps(path: Any) -> list[int]:
    return [row["step"] for row in read_jsonl(path)]


def test_schema_is_strict_json(run_info: Callable[..., RunInfo]) -> None:
    run, began = run_info(), time.time()
    with TrackerHub(["jsonl"], run=run, strict=True) as hub:
        hub.log_config({"lr": math.inf, "path": Path("a")})
        hub.log({"a": math.nan, "b": -math.inf, "c": math.inf, "d": 1, "e": "é\n"}, 3)
    path = Path(run.logging_dir, "metrics.jsonl")

    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = path.read_text().splitlines()
    records = [json.loads(line, parse_constant=reject) for line in lines]
    assert all(began <= record.pop("time", began) <= time.time() for record in records)
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
    in_file = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["step"] for one in in_file if one["type"] == "metrics"] == list(range(1, 10))
    assert [one["resumed_step"] for one in in_file if one["type"] == "run"] == [None, 5, 6]
    run(None, range(1, 3))
    assert _steps(path) == [1, 2]
    run(0, range(1, 2))
    assert _steps(path) == [1]
    in_file = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [one["step"] for one in in_file if one["type"] == "metrics"]
    assert steps == [*range(1, 10), 1]  # the first run of this id is as it was


def _used(tracker: JSONLTracker, run: RunInfo, steps: range, state: Any = None) -> Any:
    """One process: what its tracker's state is after the last step, as a checkpoint has it."""
    if state is not None:
        tracker.load_state_dict(state)
    tracker.start(run)
    for step in steps:
        tracker.log({"a": step}, step)
    saved = tracker.state_dict()
    tracker.finish()
    return saved


def test_a_resume_cuts_its_own_rows_and_nothing_else(run_info: Callable[..., RunInfo]) -> None:
    path = Path(run_info().logging_dir, "metrics.jsonl")
    _used(JSONLTracker(), run_info(run_id="other"), range(1, 6))
    with path.open("a") as file:
        file.write("# a note of somebody\n\n[1, 2]\n")
    foreign = path.read_text()
    _used(JSONLTracker(), run_info(run_id="a1"), range(1, 6))
    _used(JSONLTracker(), run_info(2, run_id="a1"), range(3, 4))
    text = path.read_text()
    assert text.startswith(foreign)
    assert re.findall(r'"step":(\d)', text.removeprefix(foreign)) == ["1", "2", "3"]
    assert [path.name] == [one.name for one in path.parent.iterdir()]  # no file is left over
    _used(JSONLTracker(), run_info(4, run_id="other"), range(9, 10))
    assert _steps(path) == [1, 2, 3, 4, 9]


def test_steps_of_another_unit_survive_a_resume(run_info: Callable[..., RunInfo]) -> None:
    """Somebody counts samples: the checkpoint of optimizer step 3 has seen 96 of them."""
    state = _used(JSONLTracker(), run_info(), range(32, 97, 32))
    _used(JSONLTracker(), run_info(3), range(128, 161, 32), state)
    assert _steps(Path(run_info().logging_dir, "metrics.jsonl")) == [32, 64, 96, 128, 160]


def test_a_tracker_that_is_used_twice_has_two_runs(run_info: Callable[..., RunInfo]) -> None:
    tracker = JSONLTracker()
    _used(tracker, run_info(run_id="a1"), range(1, 4))
    state = _used(tracker, run_info(run_id="b2"), range(1, 3))
    assert state == {"run_id": "b2", "last_step": 2}


CUT_SHORT = """
import os, sys
from loggers import JSONLTracker, RunInfo
from loggers.trackers import line_file

def killed(*args):
    os._exit(9)

setattr(line_file.os, sys.argv[2], killed)
JSONLTracker().start(RunInfo("digits", sys.argv[1], "a1", resumed_step=3))
"""


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_kill_while_cutting_loses_nothing(
    at: str, run_info: Callable[..., RunInfo], tmp_path: Path
) -> None:
    run = run_info()
    _used(JSONLTracker(), run, range(1, 6))
    path = Path(run.logging_dir, "metrics.jsonl")
    before = path.read_bytes()
    command = [sys.executable, "-c", CUT_SHORT, run.logging_dir, at]
    assert subprocess.run(command, check=False).returncode == 9
    assert path.read_bytes() == before
    _used(JSONLTracker(), run_info(3), range(4, 5))
    assert _steps(path) == [1, 2, 3, 4]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_loses_no_line_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = JSONLTracker()
    tracker.start(RunInfo("digits", str(tmp_path), "a1"))
    tracker.log({"a": 1}, 1)
    file = tracker.raw
    full, room = os.open("/dev/full", os.O_WRONLY), file._fd
    file._fd = full  # what the kernel says when the disk is full
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        tracker.flush()
    tracker.log({"a": 2}, 2)
    file._fd = room
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
    done = subprocess.run(command, capture_output=True, text=True, check=True)
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
    monkeypatch.setattr("loggers.trackers.line_file.os.write", counted)
    hub.flush()
    assert len(writes) == 1
    assert writes[0].endswith(b"\n")
    monkeypatch.undo()
    hub.finish()


def test_an_object_in_a_store_is_written_whole_and_not_often(
    run_info: Callable[..., RunInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    memory, written = fsspec.filesystem("memory"), []
    real = type(memory).pipe_file

    def counted(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        written.append(path)
        real(self, path, value, **kwargs)

    monkeypatch.setattr(type(memory), "pipe_file", counted)
    folder = "memory://tracker-jsonl/deep"
    tracker = JSONLTracker()
    tracker.start(run_info(logging_dir=folder))
    for step in range(1, 6):
        tracker.log({"a": math.nan}, step)
        tracker.flush()
    tracker.log_images({"digit": np.zeros((1, 2, 2, 1), np.uint8)}, 5)
    tracker.flush()
    jsonl = [path for path in written if path.endswith(".jsonl")]
    assert len(jsonl) == 1  # the rest is due in 30 s
    assert _steps(f"{folder}/metrics.jsonl") == [1]
    state = tracker.state_dict()  # a checkpoint does not wait
    assert _steps(f"{folder}/metrics.jsonl") == [1, 2, 3, 4, 5]
    tracker.log({"a": 1}, 6)
    tracker.finish()
    assert _steps(f"{folder}/metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    _used(JSONLTracker(), run_info(5, logging_dir=folder), range(6, 8), state)
    assert _steps(f"{folder}/metrics.jsonl") == [1, 2, 3, 4, 5, 6, 7]
    (record,) = read_jsonl(f"{folder}/metrics.jsonl", kind="images")
    (picture,) = record["values"]["digit"]
    assert memory.cat_file(f"/tracker-jsonl/deep/{picture}").startswith(b"\x89PNG")


def test_a_store_that_fails_is_asked_again(
    run_info: Callable[..., RunInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    memory = type(fsspec.filesystem("memory"))
    tracker, folder = JSONLTracker(), "memory://tracker-jsonl-fails"
    tracker.start(run_info(logging_dir=folder))
    tracker.log({"a": 1}, 1)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "pipe_file", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tracker.flush()
        tracker.flush()  # not due yet
    tracker.finish()
    assert _steps(f"{folder}/metrics.jsonl") == [1]


@pytest.mark.s3
def test_s3_is_a_folder_like_another(
    run_info: Callable[..., RunInfo], s3_environment: dict[str, object]
) -> None:
    folder = "s3://bucket/tracker/jsonl"
    state = _used(JSONLTracker(), run_info(logging_dir=folder), range(1, 6))
    state["last_step"] = 3
    _used(JSONLTracker(), run_info(3, logging_dir=folder), range(4, 7), state)
    assert _steps(f"{folder}/metrics.jsonl") == [1, 2, 3, 4, 5, 6]


def test_media_are_records_and_files(run_info: Callable[..., RunInfo]) -> None:
    from PIL import Image

    run = run_info()
    red = np.zeros((2, 3, 4, 3), np.uint8)
    red[..., 0] = 200
    sound = np.stack([np.linspace(-2, 1, 100), np.zeros(100)], axis=1)
    tracker = JSONLTracker()
    tracker.start(run)
    tracker.log_images({"../val/red": red}, 3, captions={"../val/red": ["a", "b"]})
    tracker.log_audio({"beep": sound}, 3, sample_rate=8000)
    tracker.log_video({"film": np.stack([red[0], red[0] // 2])}, 3, fps=5)
    tracker.log_table("hits", ["name", "share"], [["x", math.nan], [None, 1]], 3)
    tracker.log_text({"said": "é\n"}, 3)
    tracker.log_histogram({"w": np.array([0.0, 1.0, math.inf]), "none": np.zeros(0)}, 3)
    tracker.log_artifact("/data/model.bin", kind="model")
    tracker.finish()

    def one(kind: str) -> dict[str, Any]:
        (record,) = read_jsonl(tracker.path or "", kind=kind)
        assert record["step"] == 3
        return record

    for path in (images := one("images"))["values"]["../val/red"]:
        assert ".." not in Path(path).parts
        with Image.open(Path(run.logging_dir, path)) as picture:
            assert np.array_equal(np.asarray(picture), red[0])
    assert images["captions"] == {"../val/red": ["a", "b"]}
    with wave.open(str(Path(run.logging_dir, one("audio")["values"]["beep"]))) as beep:
        assert (beep.getnchannels(), beep.getframerate(), beep.getnframes()) == (2, 8000, 100)
    with Image.open(Path(run.logging_dir, one("video")["values"]["film"])) as film:
        assert (film.n_frames, film.info["duration"], film.size) == (2, 200, (4, 3))
    assert one("table")["rows"] == [["x", "NaN"], [None, 1]]
    assert one("text")["values"] == {"said": "é\n"}
    weights = one("histogram")["values"]
    assert (weights["w"]["non_finite"], sum(weights["w"]["counts"])) == (1, 2)
    assert weights["none"]["counts"] == []
    lines = Path(tracker.path or "").read_text(encoding="utf-8").splitlines()
    (artifact,) = [one for one in map(json.loads, lines) if one["type"] == "artifact"]
    found = {key: artifact[key] for key in ("name", "kind", "path")}
    assert found == {"name": "model.bin", "kind": "model", "path": "/data/model.bin"}


def test_file_url_and_ranks(run_info: Callable[..., RunInfo], tmp_path: Path) -> None:
    for rank in (0, 1):
        run = run_info(logging_dir=f"file://{tmp_path}/all", rank=rank)
        tracker = JSONLTracker(all_ranks=True)
        with TrackerHub([tracker], run=run, main_process=rank == 0, strict=True) as hub:
            hub.log({"rank": rank}, 1)
    names = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert names == ["metrics-rank1.jsonl", "metrics.jsonl"]


def test_a_file_whose_end_cannot_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = LocalLines(str(tmp_path / "log"))
    assert not lines.is_truncated()
    lines.add(b"1\n")
    lines.flush()
    assert not lines.is_truncated()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("builtins.open", fails)
    with pytest.raises(OSError, match="Input/output error"):
        lines.is_truncated()
    monkeypatch.undo()
    lines.close()
