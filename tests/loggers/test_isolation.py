"""A tracker that fails must cost nobody else a row, and the run nothing at all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from loggers import NullTracker, RunInfo, Scalar, Status, Tracker, TrackerHub

RUN = RunInfo("digits", "runs", "a1")
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
    hub.load_state_dict({"bad": {}, "good": {}})
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
        assert bad.called == ["load_state_dict", "start", "state_dict"]
        assert isinstance(hub.get("bad"), NullTracker)
    if method == "log":
        assert bad.steps == [1, 2, 3]
        assert report["bad"].dropped == 1


def test_disabled_after_failures_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Failing("bad", {"log": 100}), Failing("good")
    hub = TrackerHub([bad, good], run=RUN, max_failures=5)
    _train(hub, steps=20)
    assert bad.called.count("log") == 5
    assert bad.called[-1] == "finish"  # it may hold a file or a process
    report = hub.report()["bad"]
    assert (report.failures, report.dropped, report.disabled) == (5, 20, True)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "disabled" in messages[1]
    assert good.steps == list(range(20))


def test_failures_with_successes_between_do_not_disable() -> None:
    class Flaky(Failing):
        calls = 0

        def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
            self.calls += 1
            if self.calls % 5:  # four failures, then a success
                raise OSError("busy")

    hub = TrackerHub([Flaky("bad"), Failing("good")], run=RUN, flush_every_s=1e9)
    _train(hub, steps=40)
    report = hub.report()["bad"]
    assert not report.disabled
    assert (report.failures, report.dropped, report.rows) == (32, 32, 8)


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
    assert caplog.records == []  # what is raised is not also reported


def test_strict_flush_failure_in_finish_still_closes_everything() -> None:
    bad, good = Failing("bad", {"log": 1}), Failing("good")
    hub = TrackerHub([bad, good], run=RUN, strict=True, flush_every_s=1e9)
    hub.start()
    hub.log({"loss": 1.0}, 0)
    with pytest.raises(OSError, match="disk"):
        hub.finish()
    assert (bad.called[-1], good.called[-1], good.steps) == ("finish", "finish", [0])


def test_interrupt_passes_through_and_loses_no_later_row() -> None:
    bad, good = Failing("bad", {"log": 1}, KeyboardInterrupt), Failing("good")
    hub = TrackerHub([bad, good], run=RUN, flush_every_s=1e9)
    hub.start()
    for step in range(3):
        hub.log({"loss": 1.0}, step)
    with pytest.raises(KeyboardInterrupt):
        hub.flush()
    hub.finish("interrupted")
    assert bad.steps == [1, 2]
    assert good.steps == [0, 1, 2]


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
