"""A loop that logs faster than its trackers write waits for those that lose nothing."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loggers import (
    CSVTracker,
    JSONLTracker,
    RunInfo,
    Scalar,
    Status,
    Tracker,
    TrackerHub,
    configured_tracker,
    read_csv,
    read_jsonl,
)

RUN = RunInfo("digits", "runs", "a1")


class Gated(Tracker):
    """A lossless tracker that writes nothing until the test opens the gate."""

    name = "gated"
    lossless = True

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.steps: list[int] = []

    def start(self, run: RunInfo) -> None: ...

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        self.entered.set()
        self.gate.wait()
        self.steps.append(step)

    def finish(self, status: Status = "success") -> None: ...


class Batches(Tracker):
    """Keeps what it gets, and the sizes of the batches; steps in ``refused`` are errors."""

    name = "batches"

    def __init__(self, refused: Sequence[int] = ()) -> None:
        self.refused = set(refused)
        self.rows: list[Any] = []
        self.single: list[int] = []

    def start(self, run: RunInfo) -> None: ...

    def log(
        self,
        scalars: Mapping[str, Scalar],
        step: int,
        *,
        time: float | None = None,
        note: str | None = None,
    ) -> None:
        if step in self.refused:
            raise ValueError("not this one")
        self.single.append(step)
        self.rows.append((step, dict(scalars)))

    def log_rows(self, rows: Sequence[tuple[Mapping[str, Scalar], int, float]]) -> None:
        if self.refused & {step for _, step, _ in rows}:
            raise ValueError("not all of these")
        self.rows += [(step, dict(scalars)) for scalars, step, _ in rows]

    def finish(self, status: Status = "success") -> None: ...


@pytest.fixture
def gated() -> Iterator[Gated]:
    tracker = Gated()
    yield tracker
    tracker.gate.set()


class Polls:
    """The clock by which `log` waits: it stands, and calls a function at each look for room."""

    def __init__(self) -> None:
        self.now, self.count = 0.0, 0
        self.many = threading.Event()
        self.each: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.count += 1
        if self.count == 100:
            self.many.set()
        self.each()


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Polls:
    monkeypatch.setattr("loggers.queue.time", polls := Polls())
    return polls


@pytest.mark.parametrize("count", [40_000, pytest.param(300_000, marks=[pytest.mark.slow])])
def test_all_rows_at_full_speed_arrive_in_order(count: int, tmp_path: Path) -> None:
    with TrackerHub(["jsonl", "csv"], run=RunInfo("digits", str(tmp_path), "a1")) as hub:
        for step in range(count):
            hub.log({"loss": step / 7, "norm": 1 / (step + 1), "lr": 0.1}, step)
    expected = [
        (step, {"loss": step / 7, "norm": 1 / (step + 1), "lr": 0.1}) for step in range(count)
    ]
    jsonl = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["values"]) for row in jsonl] == expected
    csv = read_csv(tmp_path / "metrics.csv")
    assert [(row["step"], row["values"]) for row in csv] == expected
    assert [row["time"] for row in csv] == [row["time"] for row in jsonl]
    for report in hub.report().values():
        assert (report.rows, report.dropped, report.lost_rows) == (count, 0, 0)


def test_log_waits_for_room_and_no_longer(gated: Gated, polls: Polls) -> None:
    hub = TrackerHub([gated], run=RUN, max_buffer=10, flush_every_s=0, stall_timeout_s=600)
    hub.start()
    logged: list[int] = []

    def train() -> None:
        for step in range(200):
            hub.log({"loss": 1.0}, step)
            logged.append(step)

    loop = threading.Thread(target=train, daemon=True)
    loop.start()
    assert gated.entered.wait()
    assert polls.many.wait()
    assert loop.is_alive()
    assert len(logged) <= 32  # in its queue, in that of the hub, and on their way
    gated.gate.set()
    loop.join()
    assert not loop.is_alive()
    hub.finish()
    assert gated.steps == list(range(200))
    assert hub.report()["gated"].dropped == 0


def test_media_wait_too(gated: Gated, monkeypatch: pytest.MonkeyPatch, polls: Polls) -> None:
    monkeypatch.setattr("loggers.queue.MEDIA_BYTES", 10_000)
    monkeypatch.setattr("loggers.worker.MEDIA_BYTES", 10_000)

    class Keeps(Gated):
        def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
            self.log({}, step)

    tracker = Keeps()
    hub = TrackerHub([tracker], run=RUN, flush_every_s=0, stall_timeout_s=600)
    hub.start()
    logged: list[int] = []

    def train() -> None:
        for step in range(100):
            hub.log_histogram({"weights": np.zeros(100 if step % 9 else 2000)}, step)
            logged.append(step)

    loop = threading.Thread(target=train, daemon=True)
    loop.start()
    assert tracker.entered.wait()
    assert polls.many.wait()
    assert len(logged) < 100
    tracker.gate.set()
    loop.join()
    hub.finish()
    assert tracker.steps == list(range(100))
    assert hub.report()["gated"].dropped == 0


def test_a_slow_tracker_that_may_lose_rows_is_not_waited_for(gated: Gated, tmp_path: Path) -> None:
    gated.lossless = False
    run = RunInfo("digits", str(tmp_path), "a1")
    hub = TrackerHub([gated, "jsonl"], run=run, max_buffer=100, stall_timeout_s=600)
    hub.start()
    for step in range(5000):  # would not end, were it waited for
        hub.log({"loss": 1.0}, step)
    gated.gate.set()
    hub.finish()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(5000))
    report = hub.report()["gated"]
    assert report.lost_rows > 4000
    assert report.rows + report.lost_rows == 5000


def test_one_that_hangs_does_not_hold_training_for_ever(
    gated: Gated, tmp_path: Path, caplog: pytest.LogCaptureFixture, polls: Polls
) -> None:
    run = RunInfo("digits", str(tmp_path), "a1")
    hub = TrackerHub([gated, "csv"], run=run, max_buffer=10, flush_every_s=0, stall_timeout_s=0.2)
    hub.start()
    step = 0

    def let_time_pass() -> None:
        polls.now += 0.1 * (hub.report()["csv"].rows > step)  # it has all rows that there are

    polls.each = let_time_pass
    for step in range(1000):
        hub.log({"loss": 1.0}, step)
    gated.gate.set()
    hub.finish()
    assert [row["step"] for row in read_csv(tmp_path / "metrics.csv")] == list(range(1000))
    report = hub.report()["gated"]
    assert report.rows + report.lost_rows == 1000
    assert report.lost_rows > 900
    assert gated.steps[-2:] == [999, 999]  # the newest row, and the number of those that are lost
    assert sum("'gated' has written nothing for 0.2 s" in one for one in caplog.messages) == 1
    assert "'csv'" not in caplog.text


def test_a_strict_hub_raises_that_one_hangs(gated: Gated) -> None:
    hub = TrackerHub([gated], run=RUN, max_buffer=5, strict=True, stall_timeout_s=0.1)
    hub.start()

    def train() -> None:
        for step in range(1000):
            hub.log({"loss": 1.0}, step)

    with pytest.raises(TimeoutError, match="has written nothing"):
        train()
    gated.gate.set()
    hub.finish("failed")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_whose_thread_died_is_not_waited_for(tmp_path: Path) -> None:
    """A handler of the script's own that raises ends the thread that reports an error."""

    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the log is gone")

    class Fails(Gated):
        def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
            raise ValueError("never")

    logger, handler = logging.getLogger("accel_callbacks.trackers"), Raises()
    run = RunInfo("digits", str(tmp_path), "a1")
    hub = TrackerHub([Fails(), "jsonl"], run=run, max_buffer=10, stall_timeout_s=600)
    hub.start()
    thread = hub._writers[0]._thread
    assert thread is not None
    logger.addHandler(handler)
    try:
        hub.log({"loss": 1.0}, 0)
        thread.join()
    finally:
        logger.removeHandler(handler)
    assert not thread.is_alive()
    for step in range(1, 1000):
        hub.log({"loss": 1.0}, step)
    while hub.report()["jsonl"].rows < 1000:  # a machine that is busy must not decide this test
        time.sleep(0.005)
    hub.finish(timeout=0.5)
    assert hub._writers[1]._thread is not None
    hub._writers[1]._thread.join()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1000))
    assert hub.report()["gated"].lost_rows >= 999


def test_a_disabled_one_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loggers.worker._BACK_OFF", (0.0,))

    class Fails(Gated):
        def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
            raise ValueError("never")

    with TrackerHub([Fails()], run=RUN, max_buffer=10, stall_timeout_s=600) as hub:
        for step in range(1000):
            hub.log({"loss": 1.0}, step)
    report = hub.report()["gated"]
    assert (report.rows, report.lost_rows, report.disabled) == (0, 1000, True)


def test_an_interrupt_ends_the_wait_and_loses_no_row(gated: Gated, polls: Polls) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    polls.each = lambda: signal.raise_signal(signal.SIGALRM) if polls.count == 100 else None

    hub = TrackerHub([gated], run=RUN, max_buffer=10, flush_every_s=0, stall_timeout_s=600)
    hub.start()
    before = signal.signal(signal.SIGALRM, interrupt)
    steps = [0]

    def train() -> None:
        while True:
            hub.log({"loss": 1.0}, steps[0])
            steps[0] += 1

    try:
        with pytest.raises(KeyboardInterrupt):
            train()
    finally:
        signal.signal(signal.SIGALRM, before)
    gated.gate.set()
    hub.finish("interrupted")
    assert gated.steps == list(range(steps[0] + 1))  # the interrupted call has queued its row


def test_a_signal_handler_may_log_and_end_the_run_while_log_waits(
    gated: Gated, polls: Polls
) -> None:
    polls.each = lambda: signal.raise_signal(signal.SIGALRM) if polls.count == 100 else None
    hub = TrackerHub([gated], run=RUN, max_buffer=10, flush_every_s=0, stall_timeout_s=600)
    hub.start()
    ended: list[int] = []

    def end(*args: object) -> None:
        gated.gate.set()
        hub.log({"last": 1.0}, 10**6)
        hub.finish("interrupted")
        ended.append(1)

    before = signal.signal(signal.SIGALRM, end)

    def train() -> None:
        step = 0
        while not ended or step < 1000:
            hub.log({"loss": 1.0}, step)
            step += 1

    try:
        with pytest.warns(UserWarning, match="log after finish"):
            train()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert gated.steps[-1] == 10**6
    assert gated.steps[:-1] == list(range(len(gated.steps) - 1))


# --- rows in batches ------------------------------------------------------------------------------


def test_rows_come_in_batches_and_a_bad_one_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loggers.worker._BACK_OFF", (0.0,))
    tracker = Batches(refused=[700])
    with TrackerHub([tracker], run=RUN, flush_every_s=1e9) as hub:
        for step in range(1000):
            hub.log({"loss": 1.0}, step)
    report = hub.report()["batches"]
    assert (report.rows, report.lost_rows, report.failures) == (999, 1, 3)
    expected = [(step, {"loss": 1.0}) for step in range(1000) if step != 700]
    assert tracker.rows == [*expected, (999, {"tracker/lost_rows": 1})]
    assert len(tracker.single) <= 256  # those of one batch


def test_batches_are_filtered_and_keywords_have_rows_of_their_own() -> None:
    tracker = Batches()
    chosen = configured_tracker(tracker, include=["val/*"])
    with TrackerHub([chosen], run=RUN, flush_every_s=1e9) as hub:
        hub.log({"val/loss": 1.0, "loss": 2.0}, 1)
        hub.log({"loss": 2.0}, 2)
        hub.flush()
        hub.log({"val/loss": 3.0}, 3, {"batches": {"note": "x"}})
    assert tracker.rows == [(1, {"val/loss": 1.0}), (3, {"val/loss": 3.0})]
    assert tracker.single == [3]


def test_a_subclass_that_overrides_log_gets_each_row(tmp_path: Path) -> None:
    class Doubles(JSONLTracker):
        def log(
            self, scalars: Mapping[str, Scalar], step: int, *, time: float | None = None
        ) -> None:
            super().log({name: 2 * value for name, value in scalars.items()}, step, time=time)

    with TrackerHub([Doubles()], run=RunInfo("digits", str(tmp_path), "a1")) as hub:
        for step in range(300):
            hub.log({"loss": 1.0}, step)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["values"]["loss"] for row in rows] == [2.0] * 300


ROWS: list[dict[str, Scalar]] = [
    {"a": 0.1, "b": -0.0},
    {"a": 1e-300, "b": 1e300},
    {"b": 0.5, "a": 0.25},
    {"a": math.inf, "b": -math.inf},
    {"a": math.nan, "b": 1.0},
    {"a": 1e308, "b": 1e308},  # the sum of which is not finite
    {"a": 1, "b": 2**70},
    {"a": "text", "b": 1.5},
    {'50 % "q", %s\n': 1.0, "naïve 🙂": 2.0, "": 3.0},
    {"\0": 1.0, "%r": 2.5},
    {"surrogate": "\ud800"},
]


@pytest.mark.parametrize("kind", [JSONLTracker, CSVTracker])
def test_batches_write_what_single_rows_do(kind: Any, tmp_path: Path) -> None:
    files = []
    for together in (False, True):
        tracker = kind()
        tracker.start(RunInfo("digits", str(tmp_path / str(together)), '50 % "run"'))
        rows = [(values, step, 1e9 + step / 3) for step, values in enumerate(ROWS)]
        if together:
            tracker.log_rows(rows)
        else:
            for values, step, at in rows:
                tracker.log(values, step, time=at)
        tracker.finish()
        lines = Path(tracker.path).read_bytes().splitlines()
        files.append([line for line in lines if kind is CSVTracker or b'"metrics"' in line])
    assert files[0] == files[1]
    if kind is JSONLTracker:
        read = [row["values"] for row in read_jsonl(tracker.path)]
        assert repr(read) == repr(ROWS)
        assert all(json.loads(line, parse_constant=pytest.fail) for line in files[1])


def test_the_first_batch_of_a_resume_repeats_nothing(tmp_path: Path) -> None:
    def rows(steps: Sequence[int]) -> list[tuple[dict[str, Scalar], int, float]]:
        return [({"loss": float(step)}, step, 0.0) for step in steps]

    first = JSONLTracker()
    first.start(RunInfo("digits", str(tmp_path), "a1"))
    first.log_rows(rows([1, 2, 3]))
    state = first.state_dict()
    first.finish("success")
    again = JSONLTracker()
    again.load_state_dict(state)
    again.start(RunInfo("digits", str(tmp_path), "a1", resumed_step=3))
    again.log_rows(rows([3, 4, 5]))
    again.log_rows(rows([6]))
    again.finish("success")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kinds = [(line["type"], line.get("step")) for line in lines]
    ended = [("finish", None), ("run", None)]
    metrics = [("metrics", step) for step in range(1, 7)]
    assert kinds == [("run", None), *metrics[:3], *ended, *metrics[3:], ("finish", None)]


# --- a kill ---------------------------------------------------------------------------------------

KILLED = """
import os, sys
from loggers import RunInfo, TrackerHub

hub = TrackerHub(["jsonl", "csv"], run=RunInfo("digits", sys.argv[1], "a1"))
hub.start()
step = 0
while True:
    hub.log({"loss": step / 7, "norm": 0.1}, step)
    step += 1
    if step % 100 == 0:
        os.write(1, b"%d\\n" % step)
"""


def test_a_kill_at_full_speed_keeps_what_is_older_than_the_flush(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        while (logged := int(child.stdout.readline())) < 20_000:
            pass
        newest = [logged]

        def drain() -> None:
            for line in child.stdout or ():
                newest.append(int(line))

        reader = threading.Thread(target=drain)
        reader.start()
        seen = newest[-1]
        files = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
        while min(file.read_bytes().count(b"\n") for file in files) <= seen:
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
        reader.join()
    for rows in (read_jsonl(tmp_path / "metrics.jsonl"), read_csv(tmp_path / "metrics.csv")):
        steps = [row["step"] for row in rows]
        assert len(steps) >= seen
        assert steps == list(range(len(steps)))


def test_rows_are_written_though_nothing_more_is_logged(tmp_path: Path) -> None:
    hub = TrackerHub(["jsonl"], run=RunInfo("digits", str(tmp_path), "a1"))
    hub.start()
    hub.log({"loss": 1.0}, 1)
    while not read_jsonl(tmp_path / "metrics.jsonl"):
        time.sleep(0.01)
    assert hub.config.flush_every_s < 1
    hub.finish()
