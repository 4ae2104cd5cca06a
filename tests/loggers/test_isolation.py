"""A tracker that fails must cost nobody else a row, and the run nothing at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import pytest

from loggers import NullTracker, RunInfo, Scalar, Status, Tracker, TrackerHub

RUN = RunInfo("digits", "runs", "a1")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loggers.worker._BACK_OFF", (0.0,))


METHODS = ["start", "log_config", "log", "flush", "state_dict", "load_state_dict", "finish"]


class Failing(Tracker):
    """Raises in the methods it is told to, and records that it was called."""

    def __init__(
        self, name: str, fails: Mapping[str, int] | None = None, error: Any = OSError
    ) -> None:
        self.name, self.fails, self.error = name, dict(fails or {}), error
        self.steps: list[int] = []
        self.called: list[str] = []

    def _call(self, method: str) -> None:
        self.called.append(method)
        if self.fails.get(method, 0) > 0:
            self.fails[method] -= 1
            raise self.error("disk is gone")

    def start(self, run: RunInfo) -> None:
        self._call("start")

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._call("log_config")

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        self._call("log")
        self.steps.append(step)

    def flush(self) -> None:
        self._call("flush")

    def finish(self, status: Status = "success") -> None:
        self._call("finish")

    def state_dict(self) -> dict[str, Any]:
        self._call("state_dict")
        return {"steps": len(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call("load_state_dict")


def _train(hub: TrackerHub, steps: int = 4) -> None:
    hub.load_state_dict({"bad": {"run": 7}, "good": {}})
    hub.start()
    hub.log_config({"lr": 1})
    for step in range(steps):
        hub.log({"loss": 1.0}, step)
        hub.flush()
    assert hub.state_dict()["good"] == {"steps": steps}
    hub.finish("success")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("first", [True, False])
def test_others_go_on(method: str, first: bool, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Failing("bad", {method: 1}), Failing("good")
    hub = TrackerHub([bad, good] if first else [good, bad], run=RUN)
    with caplog.at_level(logging.WARNING, "accel_callbacks.trackers"):
        _train(hub)
    assert good.steps == [0, 1, 2, 3]
    assert good.called[-1] == "finish"
    report = hub.report()
    assert (report["good"].failures, report["good"].rows) == (0, 4)
    assert report["bad"].failures == 1
    assert "OSError: disk is gone" in (report["bad"].last_error or "")
    assert report["bad"].disabled == (method == "start")
    (record,) = caplog.records
    assert "'bad'" in record.getMessage()
    assert "disk is gone" in record.getMessage()
    if method == "start":
        assert bad.called == ["load_state_dict", "start"]
        assert isinstance(hub.get("bad"), NullTracker)
        assert hub.state_dict()["bad"] == {"run": 7}  # for a resume in which it works again
    else:
        assert bad.steps == [0, 1, 2, 3]  # the row that failed was tried again
        assert report["bad"].dropped == 0


def test_disabled_after_failures_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Failing("bad", {"log": 100}), Failing("good")
    hub = TrackerHub([bad, good], run=RUN, max_failures=5)
    _train(hub, steps=20)
    assert bad.called.count("log") == 5
    assert bad.called[-1] == "finish"  # it may hold a file or a process
    report = hub.report()["bad"]
    assert (report.failures, report.dropped, report.disabled) == (5, 20, True)
    assert report.rows == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "disabled" in messages[1]
    assert good.steps == list(range(20))


def test_a_row_that_can_never_be_written_costs_only_itself() -> None:
    class Picky(Failing):
        def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
            self.called.append("log")
            if step % 2:
                raise ValueError("not this one")
            self.steps.append(step)

    picky = Picky("bad")
    hub = TrackerHub([picky, Failing("good")], run=RUN, flush_every_s=1e9)
    _train(hub, steps=12)
    report = hub.report()["bad"]
    assert not report.disabled
    assert picky.steps == [0, 2, 4, 6, 8, 10]
    # Each was tried 3 times, and that 6 rows are lost once, at the last step.
    assert (report.failures, report.dropped, report.rows) == (19, 6, 6)


def test_media_that_fail_each_time_do_not_cost_the_scalars(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class NoSound(Failing):
        def log_text(self, texts: Mapping[str, str], step: int) -> None:
            self._call("log_text")

    bad = NoSound("bad", {"log_text": 100})
    with TrackerHub([bad], run=RUN, max_failures=3) as hub:
        for step in range(10):
            hub.log({"loss": 1.0}, step)
            hub.log_text({"a": "b"}, step)
    assert bad.steps == list(range(10))
    assert bad.called.count("log_text") == 3
    report = hub.report()["bad"]
    assert (report.rows, report.dropped, report.disabled) == (10, 10, False)
    assert "gets no more text after 3 failures" in caplog.messages[1]


@pytest.mark.parametrize("method", METHODS)
def test_strict_raises_after_the_others_had_their_turn(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Failing("bad", {method: 1}), Failing("good")
    hub = TrackerHub([bad, good], run=RUN, strict=True)
    with pytest.raises(OSError, match="disk is gone"):
        _train(hub, steps=1)
    assert method in good.called
    hub.finish("failed")
    if method != "load_state_dict":  # start() was never reached there
        assert good.called.count("finish") == 1
    hub.finish("failed")
    assert hub.flush()
    assert caplog.records == []  # what is raised is not also reported


def test_strict_raises_at_the_next_log_and_after_closing_everything() -> None:
    bad, good = Failing("bad", {"log": 1}), Failing("good")
    hub = TrackerHub([bad, good], run=RUN, strict=True, flush_every_s=1e9)
    hub.start()
    hub.log({"loss": 1.0}, 0)
    with pytest.raises(OSError, match="disk"):
        hub.finish()
    assert (bad.called[-1], good.called[-1], good.steps) == ("finish", "finish", [0])

    hub = TrackerHub([Failing("bad", {"log": 1})], run=RUN, strict=True, flush_every_s=0.0)
    hub.start()
    hub.log({"loss": 1.0}, 0)
    while not hub.report()["bad"].failures:
        time.sleep(0.001)
    with pytest.raises(OSError, match="disk"):
        hub.log({"loss": 1.0}, 1)
    hub.log({"loss": 1.0}, 2)
    hub.finish()


def test_an_error_on_its_way_is_not_hidden_by_a_strict_tracker() -> None:
    with pytest.raises(ZeroDivisionError):
        with TrackerHub([Failing("bad", {"finish": 1})], run=RUN, strict=True):
            1 / 0  # noqa: B018


def test_a_tool_that_exits_or_interrupts_on_its_thread_is_one_that_fails() -> None:
    for error in (SystemExit, KeyboardInterrupt):
        bad, good = Failing("bad", {"log": 1}, error), Failing("good")
        with TrackerHub([bad, good], run=RUN, flush_every_s=1e9) as hub:
            for step in range(3):
                hub.log({"loss": 1.0}, step)
        assert bad.steps == good.steps == [0, 1, 2]
        assert hub.report()["bad"].failures == 1


def test_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    run = RunInfo("digits", str(tmp_path), "a1")
    with TrackerHub(["wandb", "tensorboard", "jsonl"], run=run) as hub:
        hub.log({"a": 1}, 1)
    assert "pip install wandb" in caplog.text
    assert "pip install tensorboard" in caplog.text
    assert hub.report()["jsonl"].rows == 1
