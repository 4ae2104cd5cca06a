from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from loggers import NullTracker, RunInfo, Scalar, Status, Tracker, TrackerHub

RUN = RunInfo("digits", "runs", "a1")


class Recorder(Tracker):
    """Keeps its calls in a list."""

    name = "recorder"

    def __init__(self, name: str = "recorder", main_process_only: bool = True) -> None:
        self.name, self.main_process_only = name, main_process_only
        self.calls: list[Any] = []

    def start(self, run: RunInfo) -> None:
        self.calls.append(("start", run))

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.calls.append(("config", config))

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        self.calls.append((step, dict(scalars)))

    def flush(self) -> None:
        self.calls.append("flush")

    def finish(self, status: Status = "success") -> None:
        self.calls.append(("finish", status))

    @property
    def rows(self) -> list[Any]:
        return [call for call in self.calls if isinstance(call[0], int)]


@pytest.fixture
def started() -> Callable[..., tuple[Recorder, TrackerHub]]:
    def make(**options: Any) -> tuple[Recorder, TrackerHub]:
        recorder = Recorder()
        hub = TrackerHub([recorder], run=RUN, **{"flush_every_s": 1e9, **options})
        hub.start()
        return recorder, hub

    return make


def test_order_of_calls_and_idempotence(started: Any) -> None:
    recorder, hub = started()
    hub.start()
    hub.log_config({"lr": 1})
    hub.log({"a": 1.0}, 1)
    assert recorder.rows == []  # buffered
    hub.finish("failed")
    hub.finish("success")
    assert recorder.calls == [
        ("start", RUN),
        ("config", {"lr": 1}),
        (1, {"a": 1.0}),
        "flush",
        ("finish", "failed"),
    ]


def test_flushes_when_full_or_late(started: Any) -> None:
    recorder, hub = started(max_buffer=3)
    for step in range(7):
        hub.log({"a": step}, step)
    assert [step for step, _ in recorder.rows] == [0, 1, 2, 3, 4, 5]
    recorder, hub = started(flush_every_s=0.0)
    hub.log({"a": 1}, 1)
    assert recorder.rows == [(1, {"a": 1})]


def test_a_tensor_changed_after_log_keeps_its_logged_value(started: Any) -> None:
    recorder, hub = started()
    running = torch.zeros(())
    for step in range(3):
        running += 1
        hub.log({"running": running}, step)
    hub.finish()
    assert [values["running"] for _, values in recorder.rows] == [1.0, 2.0, 3.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_log_neither_waits_for_the_gpu_nor_sees_later_changes(started: Any) -> None:
    recorder, hub = started()
    running = torch.zeros((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(20):
            running += 1
            hub.log({"running": running, "step": step}, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    hub.finish()
    assert [values["running"] for _, values in recorder.rows] == [float(i + 1) for i in range(20)]


def test_get_and_other_processes() -> None:
    everywhere, main = Recorder("everywhere", main_process_only=False), Recorder("main")
    hub = TrackerHub([everywhere, main], run=RUN, main_process=False)
    hub.start()
    hub.log({"a": 1}, 1)
    hub.finish()
    assert main.calls == []
    assert everywhere.rows == [(1, {"a": 1})]
    assert hub.get("everywhere") is everywhere
    assert isinstance(hub.get("main"), NullTracker)
    assert hub.trackers == (everywhere,)
    with pytest.raises(ValueError, match="everywhere, main"):
        hub.get("wandb")


def test_other_processes_still_see_their_callers_bugs() -> None:
    """All ranks raise, or the ones that do not would wait for the one that did."""
    hub = TrackerHub([Recorder()], run=RUN, main_process=False)
    hub.start()
    with pytest.raises(TypeError, match="'a'"):
        hub.log({"a": [1]}, 1)


def test_callers_bugs_are_raised_at_the_call_and_record_nothing(started: Any) -> None:
    recorder, hub = started()
    with pytest.raises(TypeError, match="'grads'"):
        hub.log({"loss": 1.0, "grads": torch.ones(3)}, 1)
    with pytest.raises(TypeError):
        hub.log({"loss": 1.0}, 1.5)
    hub.finish()
    assert recorder.rows == []
    with pytest.raises(ValueError, match="two trackers"):
        TrackerHub([Recorder(), Recorder()], run=RUN)
    with pytest.raises(RuntimeError, match="start"):
        TrackerHub([], run=RUN).log({"a": 1}, 1)
    with pytest.raises(RuntimeError, match="before start"):
        hub.load_state_dict({})


def test_warnings_come_once_and_the_values_go_on(started: Any) -> None:
    recorder, hub = started()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hub.log({"a": None, "b": 1}, 5)
        hub.log({"a": None}, 6)
        hub.log({"b": 2}, 4)
        hub.log({"b": 3}, 3)
        hub.finish()
        hub.log({"b": 4}, 7)
        hub.log({"b": 5}, 8)
    texts = [str(warning.message) for warning in caught]
    assert [warning.filename for warning in caught] == [__file__] * 3
    assert ["None for 'a'" in texts[0], "step 4" in texts[1], "finish" in texts[2]] == [True] * 3
    assert recorder.rows == [(5, {"b": 1}), (4, {"b": 2}), (3, {"b": 3})]


def test_context_manager_tells_how_the_run_ended() -> None:
    for error, status in ((ZeroDivisionError, "failed"), (KeyboardInterrupt, "interrupted")):
        recorder = Recorder()

        def train(recorder: Recorder = recorder, error: type[BaseException] = error) -> None:
            with TrackerHub([recorder], run=RUN) as hub:
                hub.log({"a": 1}, 1)
                raise error

        with pytest.raises(error):
            train()
        assert recorder.calls[-1] == ("finish", status)
        assert recorder.rows == [(1, {"a": 1})]


def test_time_is_that_of_the_call_for_trackers_that_take_it(monkeypatch: Any) -> None:
    times: list[float | None] = []

    class Timed(Recorder):
        def log(
            self, scalars: Mapping[str, Scalar], step: int, *, time: float | None = None
        ) -> None:
            times.append(time)

    hub = TrackerHub([Timed()], run=RUN, flush_every_s=1e9)
    hub.start()
    monkeypatch.setattr("loggers.hub.time.time", lambda: 100.0)
    hub.log({"a": 1}, 1)
    monkeypatch.setattr("loggers.hub.time.time", lambda: 200.0)
    hub.finish()
    assert times == [100.0]


def test_a_flush_inside_a_flush_delivers_each_row_once() -> None:
    """What a signal handler does when it finishes the run while a flush is under way."""

    class Reentrant(Recorder):
        def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
            super().log(scalars, step)
            if step == 2:
                hub.finish("interrupted")

    recorder, other = Reentrant(), Recorder("other")
    hub = TrackerHub([other, recorder], run=RUN, flush_every_s=1e9)
    hub.start()
    for step in range(5):
        hub.log({"a": step}, step)
    hub.flush()
    for tracker in (recorder, other):
        assert [step for step, _ in tracker.rows] == [0, 1, 2, 3, 4]
        assert tracker.calls.count(("finish", "interrupted")) == 1


def test_a_flush_while_values_are_copied_delivers_each_row_once(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the device is where a signal most likely arrives."""
    recorder, hub = started()

    def interrupted_copy(rows: Any) -> list[Exception]:
        monkeypatch.undo()
        hub.flush()
        return []

    monkeypatch.setattr("loggers.hub.to_host", interrupted_copy)
    hub.log({"a": 1}, 1)
    hub.finish()
    assert recorder.rows == [(1, {"a": 1})]


def test_no_warning_in_the_common_case(started: Any) -> None:
    _, hub = started()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 1, 2):
            hub.log({"a": 1}, step)
        hub.finish()
