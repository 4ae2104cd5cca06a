from __future__ import annotations

import math
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loggers import (
    NullTracker,
    RunInfo,
    Scalar,
    Status,
    Tracker,
    TrackerConfig,
    TrackerHub,
    configured_tracker,
    read_jsonl,
)

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
        "flush",
        (1, {"a": 1.0}),
        "flush",
        ("finish", "failed"),
    ]


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    while not condition():
        time.sleep(0.005)


def test_rows_are_delivered_in_time_and_when_there_are_many(started: Any) -> None:
    recorder, hub = started()  # its time never comes
    for step in range(300):
        hub.log({"a": step}, step)
    until(lambda: len(recorder.rows) >= 256)
    assert hub.flush()
    assert [step for step, _ in recorder.rows] == list(range(300))
    for interval in (0.0, 0.05):
        recorder, hub = started(flush_every_s=interval)
        hub.log({"a": 1}, 1)
        until(lambda recorder=recorder: "flush" in recorder.calls)
        assert recorder.rows == [(1, {"a": 1})]
        hub.finish()


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
    running, side = torch.zeros((), device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(20):
            with torch.cuda.stream(side if step >= 10 else torch.cuda.default_stream()):
                running += 1
                hub.log({"running": running, "half": running / 2, "step": step}, step)
            if step == 9:
                assert hub.flush()  # nor does its thread stop the device
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


def test_a_tool_that_drops_lower_steps_gets_the_values_at_the_last_step() -> None:
    free, rising = Recorder("free"), Recorder("rising")
    rising.needs_rising_steps = True
    with TrackerHub([free, rising], run=RUN) as hub:
        hub.log({"a": 4}, 4)
        hub.log({"a": 5}, 5)
        with pytest.warns(UserWarning, match="step 1 was logged after step 5"):
            hub.log({"a": 1}, 1)
        hub.log({"a": 6}, 6)
    assert [(step, row["a"]) for step, row in free.rows] == [(4, 4), (5, 5), (1, 1), (6, 6)]
    assert [(step, row["a"]) for step, row in rising.rows] == [(4, 4), (5, 5), (5, 1), (6, 6)]


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


def test_log_gets_the_keywords_that_it_takes() -> None:
    seen: list[Any] = []

    class Timed(Recorder):
        def log(
            self,
            scalars: Mapping[str, Scalar],
            step: int,
            *,
            time: float | None = None,
            commit: bool = True,
        ) -> None:
            seen.append((time, commit))

    plain = Recorder("plain")
    before = time.time()
    with TrackerHub([Timed(), plain], run=RUN, flush_every_s=1e9) as hub:
        hub.log({"a": 1}, 1, {"recorder": {"commit": False}})
        after = time.time()
        with pytest.raises(TypeError, match="'plain' takes no keyword 'commit'"):
            hub.log({"a": 1}, 1, {"plain": {"commit": False}})
        with pytest.raises(ValueError, match="'wandb', which is no tracker here"):
            hub.log({"a": 1}, 1, {"wandb": {"commit": False}})
        time.sleep(0.01)
    ((when, commit),) = seen
    assert before <= when <= after  # not when it was delivered
    assert not commit
    assert plain.rows == [(1, {"a": 1})]


def test_a_step_of_numpy_is_a_plain_integer_and_a_fraction_an_error(tmp_path: Path) -> None:
    with TrackerHub(["jsonl"], run=RunInfo("digits", str(tmp_path), "a1"), strict=True) as hub:
        hub.put(hub.flat({"a": 1}), np.int64(3))
        with pytest.raises(TypeError):
            hub.log({"a": 1}, 1.5)  # type: ignore[arg-type]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [3]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("keep", [(1, ["bad", "good"]), (2, ["bad"])]),
        ("warn", [(1, ["bad", "good"]), (2, ["bad"])]),
        ("skip", [(1, ["good"])]),
    ],
)
def test_policies_for_nan(
    policy: Any, expected: Any, started: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, hub = started(nan_policy=policy)
    hub.log({"bad": torch.tensor(math.nan), "good": 1.0}, 1)
    hub.log({"bad": -math.inf}, 2)
    hub.finish()
    assert [(step, sorted(row)) for step, row in recorder.rows] == expected
    assert [("'bad' is nan at step 1" in text) for text in caplog.messages] == (
        [] if policy == "keep" else [True]
    )


def test_nan_can_end_the_run(started: Any) -> None:
    recorder, hub = started(nan_policy="raise")
    hub.log({"loss": math.nan}, 7)
    with pytest.raises(FloatingPointError, match="'loss' is nan at step 7"):
        hub.flush()
    hub.finish("failed")
    assert recorder.calls[-1] == ("finish", "failed")
    with pytest.raises(ValueError, match="nan_policy='drop'"):
        TrackerConfig(nan_policy="drop")  # type: ignore[arg-type]


def test_filters_options_and_labels(tmp_path: Path) -> None:
    recorder, run = Recorder(), RunInfo("digits", str(tmp_path), "a1")
    choices = [
        configured_tracker("jsonl", include=["val/*"], filename="val.jsonl", label="val"),
        configured_tracker("jsonl", exclude=["val/*", "*/lr"], filename="rest.jsonl"),
        configured_tracker(recorder, include=["train/loss"]),
    ]
    with TrackerHub(choices, run=run) as hub:
        hub.log({"val": {"loss": 1.0}, "train": {"loss": 2.0, "lr": 0.1}}, 1)
        hub.log({"val/loss": 3.0}, 2)
        assert hub.get("val") is hub.trackers[0]
    rows = {
        name: [(row["step"], row["values"]) for row in read_jsonl(tmp_path / f"{name}.jsonl")]
        for name in ("val", "rest")
    }
    assert rows["val"] == [(1, {"val/loss": 1.0}), (2, {"val/loss": 3.0})]
    assert rows["rest"] == [(1, {"train/loss": 2.0})]
    assert recorder.rows == [(1, {"train/loss": 2.0})]
    assert recorder.calls.count(("finish", "success")) == 1
    with pytest.raises(TypeError, match=r"include=\['val/\*'\]"):
        configured_tracker("jsonl", include="val/*")


@pytest.mark.filterwarnings("ignore:log after finish")
def test_a_signal_handler_may_finish_the_run() -> None:
    recorder = Recorder()
    hub = TrackerHub([recorder], run=RUN, flush_every_s=1e9)
    hub.start()

    def end(number: int, frame: Any) -> None:
        hub.finish("interrupted")

    before = signal.signal(signal.SIGALRM, end)
    try:
        for step in range(200):
            hub.log({"a": step}, step)
            if step == 100:
                signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [step for step, _ in recorder.rows] == list(range(101))
    assert recorder.calls[-1] == ("finish", "interrupted")


def test_no_warning_in_the_common_case(started: Any) -> None:
    _, hub = started()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 1, 2):
            hub.log({"a": 1}, step)
        hub.finish()


class Owner(Recorder):
    """Has files of its own, which are written when it is finished."""

    owns_files = True


def test_nothing_is_written_once_the_permission_is_withdrawn() -> None:
    withdrawn: list[str] = []

    def ask() -> None:
        if withdrawn:
            raise PermissionError(withdrawn[0])

    owner, other = Owner("owner"), Recorder("other")
    hub = TrackerHub([owner, other], run=RUN, before_write=ask, flush_every_s=0.05)
    hub.start()
    hub.log({"loss": 1.0}, 1)
    hub.flush()
    withdrawn.append("another run has the folder")
    hub.put({"loss": 2.0}, 2)
    error = None
    while error is None:
        try:
            hub.log({"loss": 3.0}, 3)
            time.sleep(0.01)
        except PermissionError as problem:
            error = problem
    assert str(error) == "another run has the folder"
    hub.state_dict()
    hub.finish("failed")
    assert owner.rows == other.rows == [(1, {"loss": 1.0})]
    assert ("finish", "failed") not in owner.calls  # it would write what it holds
    assert ("finish", "failed") in other.calls
    assert hub.report()["owner"].lost_rows > 0


def test_a_permission_that_is_withdrawn_is_noticed_while_nothing_is_logged() -> None:
    asked: list[None] = []

    def ask() -> None:
        asked.append(None)
        if len(asked) > 5:
            raise PermissionError("gone")

    hub = TrackerHub([Recorder()], run=RUN, before_write=ask, flush_every_s=0.01)
    hub.start()
    until(lambda: bool(hub._errors))
    with pytest.raises(PermissionError, match="gone"):
        hub.log({"loss": 1.0}, 1)
    hub.flush()  # in a round that would ask again
    hub.finish("failed")
    assert len(asked) == 6  # once is enough


class Waiting(Recorder):
    """Has rows that come from elsewhere than its hub."""

    unflushed = True


def test_a_tracker_whose_rows_come_from_elsewhere_is_flushed_though_nothing_is_logged() -> None:
    tracker = Waiting()
    with TrackerHub([tracker], run=RUN, flush_every_s=0.02):
        until(lambda: "flush" in tracker.calls)
