"""Whatever a tracker does, the training thread goes on, and the run ends in time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import loggers.hub
from loggers import RunInfo, Scalar, Status, Tracker, TrackerHub, read_jsonl

RUN = RunInfo("digits", "runs", "a1")


class Gated(Tracker):
    """Waits in the methods it is told to until the test opens the gate."""

    def __init__(self, name: str = "gated", waits_in: tuple[str, ...] = ("log",)) -> None:
        self.name, self.waits_in = name, waits_in
        self.gate, self.entered = threading.Event(), threading.Event()
        self.steps: list[int] = []
        self.values: list[dict[str, Scalar]] = []
        self.status: str | None = None

    def _wait(self, method: str) -> None:
        if method in self.waits_in:
            self.entered.set()
            self.gate.wait()

    def start(self, run: RunInfo) -> None:
        self._wait("start")

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        self._wait("log")
        self.steps.append(step)
        self.values.append(dict(scalars))

    def flush(self) -> None:
        self._wait("flush")

    def finish(self, status: Status = "success") -> None:
        self._wait("finish")
        self.status = status

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.steps[-1] if self.steps else None}


@pytest.fixture
def gated() -> Iterator[Callable[..., Gated]]:
    made: list[Gated] = []

    def make(*args: Any, **kwargs: Any) -> Gated:
        made.append(Gated(*args, **kwargs))
        return made[-1]

    yield make
    for tracker in made:
        tracker.gate.set()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does; a machine that is busy must not decide a test."""
    while not condition():
        time.sleep(0.005)


@pytest.fixture
def time_is_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Let the time in which `finish` delivers rows be over when something is true, and not then."""

    def when(condition: Callable[[], bool]) -> None:
        wait = loggers.hub._wait

        def waiting(writers: Any, status: Any, reply: Any, begin: float, seconds: float) -> Any:
            until(condition)
            return wait(writers, status, reply, begin, seconds)

        monkeypatch.setattr(loggers.hub, "_DELIVERY_SHARE", 0.0)
        monkeypatch.setattr(loggers.hub, "_wait", waiting)

    return when


@pytest.mark.parametrize("method", ["start", "log", "flush", "finish"])
def test_a_tracker_that_hangs_costs_the_others_nothing(
    method: str, gated: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, time_is_up: Any
) -> None:
    """The whole test would hang, were a call of it waited for without a limit."""
    hung = gated(waits_in=(method,))
    run = RunInfo("digits", str(tmp_path), "a1")
    hub = TrackerHub([hung, "jsonl"], run=run, start_timeout_s=0.2, finish_timeout_s=0.2)
    hub.start()
    for step in range(1000):
        hub.log({"loss": 1.0}, step)
    time_is_up(lambda: hung.entered.is_set() and hub._writers[1].finished)
    hub.finish("failed")
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1000))
    assert '"status":"failed"' in (tmp_path / "metrics.jsonl").read_text()
    report = hub.report()["gated"]
    assert report.failures >= 1
    assert "did not finish within 0.2 s" in caplog.text
    assert f"busy in {method}" in caplog.text
    if method in ("start", "log"):
        assert report.dropped >= 998


def test_a_strict_hub_says_that_a_tracker_did_not_finish(gated: Any) -> None:
    hub = TrackerHub([gated()], run=RUN, strict=True)
    hub.start()
    hub.log({"loss": 1.0}, 1)
    with pytest.raises(TimeoutError, match=r"'gated' did not finish within 0\.2 s"):
        hub.finish(timeout=0.2)


def test_a_slow_tracker_is_closed_with_its_status_and_says_what_it_lost(
    gated: Any, time_is_up: Any
) -> None:
    slow = gated()
    hub = TrackerHub([slow], run=RUN, flush_every_s=1e9)
    hub.start()
    for step in range(50):
        hub.log({"loss": 1.0}, step)
    # In its first row, while all others and the request to finish wait.
    time_is_up(lambda: slow.entered.is_set() and not hub._pump._thread.is_alive())
    ender = threading.Thread(target=hub.finish, args=("success", 600))
    ender.start()
    until(lambda: hub._writers[0]._delivery.abandoned)
    slow.gate.set()
    ender.join()
    assert slow.status == "success"
    assert slow.steps == [0, 49]
    assert slow.values[-1] == {"tracker/lost_rows": 49}
    report = hub.report()["gated"]
    assert (report.rows, report.dropped, report.lost_rows, report.failures) == (1, 49, 49, 0)


def test_the_oldest_rows_give_way_and_it_is_said_once(
    gated: Any, caplog: pytest.LogCaptureFixture
) -> None:
    slow = gated()
    hub = TrackerHub([slow], run=RUN, max_buffer=10, flush_every_s=0.0)
    hub.start()
    hub.log({"loss": 1.0}, 0)
    slow.entered.wait()
    for step in range(1, 101):
        hub.log({"loss": 1.0}, step)
        while hub._pump.waiting():  # the queue of the tracker is meant, not that of the hub
            time.sleep(0.0005)
    slow.gate.set()
    hub.finish()
    assert slow.steps == [0, *range(91, 101), 100]
    assert slow.values[-1] == {"tracker/lost_rows": 90}
    assert hub.report()["gated"].dropped == 90
    assert sum("does not keep up" in text for text in caplog.messages) == 1


def test_the_inbox_of_the_hub_is_bounded_and_its_oldest_rows_give_way(
    gated: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is passed on before the end, as while a device does not answer."""
    tracker = gated(waits_in=())
    hub = TrackerHub([tracker], run=RUN, max_buffer=10, flush_every_s=1e9)
    hub.start()
    for step in range(100):
        hub.log({"loss": 1.0}, step)
        assert hub._pump.waiting() <= 10
    hub.finish()
    assert tracker.steps == [*range(90, 100), 99]
    assert tracker.values[-1] == {"tracker/lost_rows": 90}
    assert hub.report()["gated"].dropped == 90
    assert sum("a larger max_buffer keeps more" in text for text in caplog.messages) == 1


def test_a_checkpoint_does_not_wait_for_a_tracker_that_hangs(gated: Any) -> None:
    hung, whole = gated(), Gated("whole", waits_in=())
    hub = TrackerHub([hung, whole], run=RUN, flush_every_s=1e9)
    hub.start()
    hub.log({"loss": 1.0}, 5)
    expected = {"gated": {"last_step": None}, "whole": {"last_step": 5}}
    until(lambda: hub.state_dict(timeout=0.2) == expected)
    assert not hub.flush(timeout=0.1)
    hung.gate.set()
    assert hub.state_dict(timeout=600)["gated"] == {"last_step": 5}
    hub.finish()
    assert hub.state_dict()["gated"] == {"last_step": 5}  # and after the end, as it was


def test_rows_wait_for_a_tracker_that_takes_long_to_start(
    gated: Any, caplog: pytest.LogCaptureFixture
) -> None:
    slow = gated(waits_in=("start",))
    hub = TrackerHub([slow], run=RUN, start_timeout_s=0.05)
    hub.start()
    assert "has not started within 0.05 s" in caplog.text
    hub.log({"loss": 1.0}, 1)
    slow.gate.set()
    hub.finish()
    assert (slow.steps, slow.status) == ([1], "success")


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Interrupt the main thread as Ctrl-C does, once; to be called by another thread."""
    arrived, senders = threading.Event(), []

    def handle(*args: object) -> None:
        if not arrived.is_set():
            arrived.set()
            raise KeyboardInterrupt

    def send() -> None:
        senders.append(threading.current_thread())
        main = threading.main_thread().ident
        while not arrived.wait(0.01):  # one that comes just before a wait does not end the wait
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    yield send
    for sender in senders:
        sender.join()
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_closing_does_not_cost_the_others(
    gated: Any, interrupt: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tracker closes just after the interrupt, and the other has all its rows to write yet."""
    first, last = gated("first", ("finish",)), gated("last", ("log",))
    hub = TrackerHub([first, last], run=RUN, flush_every_s=1e9)
    hub.start()
    for step in range(3):
        hub.log({"loss": 1.0}, step)
    wait, calls = loggers.hub._wait, []

    def waiting(writers: Any, status: Any, reply: Any, *limits: float) -> Any:
        calls.append(limits)
        if len(calls) == 2:  # the interrupt has arrived, and those that are left get their time
            first.gate.set()
            writers[0].join(600)

            def open_last() -> None:
                while not reply.empty():  # the answer of the first is looked at
                    time.sleep(0.001)
                last.gate.set()

            threading.Thread(target=open_last, daemon=True).start()
        return wait(writers, status, reply, *limits)

    def interrupt_when_closing() -> None:
        first.entered.wait()
        last.entered.wait()
        while not calls:
            time.sleep(0.001)
        interrupt()

    monkeypatch.setattr(loggers.hub, "_wait", waiting)
    monkeypatch.setattr(loggers.hub, "_GRACE", 600.0)  # a machine that is busy must not decide
    threading.Thread(target=interrupt_when_closing, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        hub.finish("success", timeout=600)
    assert (first.steps, first.status) == ([0, 1, 2], "success")
    assert (last.steps, last.status) == ([0, 1, 2], "success")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_no_trackers_and_does_not_hang(tmp_path: Path) -> None:
    hub = TrackerHub(["jsonl"], run=RunInfo("digits", str(tmp_path), "a1"))
    hub.start()
    hub.log({"loss": 1.0}, 1)

    def child() -> None:
        for step in range(300):
            hub.log({"loss": 2.0}, step)
        hub.log_text({"a": "b"}, 1)
        hub.flush()
        hub.state_dict()
        hub.finish()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    hub.log({"loss": 3.0}, 2)
    hub.finish()
    rows = [(row["step"], row["values"]["loss"]) for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert rows == [(1, 1.0), (2, 3.0)]


def test_no_thread_is_left_and_none_is_started_for_nothing() -> None:
    before = set(threading.enumerate())
    with TrackerHub([], run=RUN) as hub:
        hub.log({"a": 1}, 1)
        assert set(threading.enumerate()) <= before
    with TrackerHub([Gated(waits_in=())], run=RUN) as hub:
        hub.log({"a": 1}, 1)
        new = set(threading.enumerate()) - before
        assert [thread.daemon for thread in new] == [True, True]
    for thread in new:
        thread.join()
    assert set(threading.enumerate()) <= before


HANGS = """
import sys, threading
from loggers import RunInfo, Tracker, TrackerHub

class Hangs(Tracker):
    name = "hangs"
    def start(self, run): pass
    def log(self, scalars, step):
        hangs.set()
        threading.Event().wait()
    def finish(self, status): pass

hangs = threading.Event()

hub = TrackerHub([Hangs(), "jsonl"], run=RunInfo("d", sys.argv[1], "a1"), finish_timeout_s=0.5)
hub.start()
for step in range(1000):
    hub.log({"loss": 1.0}, step)
hangs.wait()
hub.finish()
print("ended")
"""


def test_the_process_ends_though_a_thread_still_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ended\n")
    assert "did not finish within 0.5 s (busy in log)" in done.stderr


def test_one_that_hangs_with_much_asked_of_it_does_not_stop_the_others(tmp_path: Path) -> None:
    run, stuck = RunInfo("digits", str(tmp_path), "a1"), Gated()
    hub = TrackerHub([stuck, "jsonl"], run=run, max_buffer=2, flush_every_s=0)
    hub.start()
    hub.log({"a": 0}, 0)
    assert stuck.entered.wait()
    for number in range(4):  # more than max_buffer
        hub.log_config({"number": number})
    hub.flush(timeout=0.2)
    for step in (1, 2, 3):
        hub.log({"a": step}, step)
        hub.flush(timeout=0.2)
    until(lambda: len(read_jsonl(tmp_path / "metrics.jsonl")) == 4)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    stuck.gate.set()
    hub.finish()


def test_one_that_hangs_is_not_waited_for_at_each_checkpoint(tmp_path: Path) -> None:
    run, stuck = RunInfo("digits", str(tmp_path), "a1"), Gated()
    hub = TrackerHub([stuck, "jsonl"], run=run, flush_every_s=0)
    hub.start()
    hub.log({"a": 0}, 0)
    assert stuck.entered.wait()
    until(lambda: hub.state_dict(timeout=0.1).get("jsonl", {}).get("last_step") == 0)
    until(lambda: hub._writers[0].guard.is_busy_for(0.1))
    asked = len(hub._writers[0]._queue)
    for _ in range(3):
        assert hub.state_dict(timeout=0.1)["jsonl"]["last_step"] == 0
    assert len(hub._writers[0]._queue) == asked
    stuck.gate.set()
    hub.finish()


NO_THREADS = """
import logging, os, resource, sys
from loggers import RunInfo, TrackerHub

logging.basicConfig(format="%(message)s")
if os.geteuid() == 0:
    os.setuid(65534)  # root may start as many as it likes
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
for_ever = 1e9  # which whatever waits for a thread takes
limits = {f"{what}_timeout_s": for_ever for what in ("start", "finish", "stall")}
hub = TrackerHub(["jsonl", "tensorboard"], run=RunInfo("digits", sys.argv[1], "a1"), **limits)
try:
    hub.start()
except RuntimeError as error:
    print(error)
hub.log({"loss": 0.5}, 1)
assert hub.flush(for_ever)
hub.finish()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_NPROC")
def test_where_no_thread_can_start_the_hub_says_so_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_THREADS, str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (error,) = done.stdout.splitlines()
    assert "no thread can start" in error
    assert "ulimit -u" in error
