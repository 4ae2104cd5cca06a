"""What each of these trackers does, read back with its tool's own reader; nothing is online."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loggers import RunInfo, Tracker, available_trackers, create

NAMES = ["clearml", "comet", "dvclive", "mlflow", "swanlab", "trackio"]
STATUS = {
    "mlflow": ("FINISHED", "FAILED", "KILLED"),
    "trackio": ("no alert", "run failed", "run interrupted"),
    "comet": ("success", "failed", "interrupted"),
    "swanlab": ("RUN_STATE_FINISHED", "RUN_STATE_CRASHED", "RUN_STATE_ABORTED"),
    "clearml": ("success", "failed", "interrupted"),
    "dvclive": ("success", "failed", "interrupted"),
}
Hub = Callable[..., Any]
Runs = Callable[..., RunInfo]
Read = Callable[[str, RunInfo], Any]


def numbers(history: list[tuple[int, Any]]) -> list[tuple[int, float]]:
    return [(step, float(value)) for step, value in history]


def test_values_config_and_success_arrive(name: str, hub: Hub, run_info: Runs, read: Read) -> None:
    run = run_info()
    with hub(name, run) as opened:
        assert opened.get(name).raw is not None
        opened.log_config({"lr": 0.1, "model": {"layers": [1, 2], "act": math.sin}, "none": None})
        opened.log({"train": {"loss": 0.5}, "note": "warm"}, step=1)
        opened.log({"train/loss": 0.25, "epoch": 1, "big": 10**30}, step=2)
    found = read(name, run)
    assert numbers(found.history["train/loss"]) == [(1, 0.5), (2, 0.25)]
    assert numbers(found.history["epoch"]) == [(2, 1.0)]
    assert numbers(found.history["big"]) == [(2, 1e30)]
    if name == "clearml":
        assert "[1] note: warm" in found.console
    else:
        assert [value for _, value in found.history["note"]] == ["warm"]
    assert float(found.config["lr"]) == 0.1
    layers = found.config.get("model/layers") or found.config["model"]["layers"]
    assert str(layers) == "[1, 2]"
    assert found.status == STATUS[name][0]


def test_only_the_logging_folder_is_written(
    name: str, hub: Hub, run_info: Runs, empty_place: Path
) -> None:
    home = Path.home()
    before = set(home.rglob("*"))
    with hub(name, run_info()) as opened:
        opened.log({"loss": 0.5}, step=1)
    assert list(empty_place.iterdir()) == []
    new = {p.relative_to(home).as_posix() for p in set(home.rglob("*")) - before if p.is_file()}
    assert new <= {".clearml/.session.json"}, "ClearML cannot be told where to keep this one"


def test_random_generators_are_left_alone(name: str, hub: Hub, run_info: Runs) -> None:
    """A run with a tracker draws the numbers that it would draw without."""
    numpy = pytest.importorskip("numpy")
    drawn = []
    for attempt in range(3):  # threads that other tools have left behind may draw in one of them
        before = random.getstate(), repr(numpy.random.get_state())
        with hub(name, run_info(run_id=f"a{attempt}")) as opened:
            opened.log_config({"lr": 0.1})
            opened.log({"loss": 0.5}, step=1)
        drawn.append((random.getstate(), repr(numpy.random.get_state())) != before)
        if not drawn[-1]:
            return
    raise AssertionError(f"random numbers were drawn: {drawn}")


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_status(name: str, status: str, hub: Hub, run_info: Runs, read: Read) -> None:
    opened = hub(name, run_info())
    opened.start()
    opened.log({"loss": 0.5}, step=1)
    opened.finish(status)
    found = read(name, run_info())
    assert found.status == STATUS[name][["success", "failed", "interrupted"].index(status)]
    assert numbers(found.history["loss"]) == [(1, 0.5)]


def test_resume_goes_on_with_the_same_run(name: str, hub: Hub, run_info: Runs, read: Read) -> None:
    """Stopped at step 5, resumed from the checkpoint of step 3."""
    opened = hub(name, run_info())
    opened.start()
    opened.log_config({"lr": 0.1})
    for step in range(1, 6):
        opened.log({"loss": float(step)}, step)
        if step == 3:
            state = json.loads(json.dumps(opened.state_dict()))
    opened.finish("interrupted")
    assert state[name]["last_step"] == 3

    resumed = hub(name, run_info(3, run_id="b2"))
    resumed.load_state_dict(state)
    resumed.start()
    assert resumed.state_dict()[name]["run_id"] == state[name]["run_id"]
    for step in range(4, 7):
        resumed.log({"loss": 10.0 * step}, step)
    resumed.finish()

    found = read(name, run_info())  # the first id: nothing of the second process's own
    rows = numbers(found.history["loss"])
    again = [(4, 40.0), (5, 50.0), (6, 60.0)]
    if name == "dvclive":  # cut back
        assert rows == [(1, 1.0), (2, 2.0), (3, 3.0), *again]
    else:  # tools that cannot take back what they have
        assert sorted(rows) == sorted([(s, float(s)) for s in range(1, 6)] + again)
    assert found.status == {**STATUS, "trackio": ("run interrupted",)}[name][0]


def test_values_that_are_not_finite(name: str, hub: Hub, run_info: Runs, read: Read) -> None:
    with hub(name, run_info()) as opened:
        opened.log({"nan": math.nan, "up": math.inf, "down": -math.inf, "loss": 1.0}, step=1)
        opened.log({"nan": 2.0, "up": 2.0, "down": 2.0, "loss": 2.0}, step=2)
    found = read(name, run_info())
    assert numbers(found.history["loss"]) == [(1, 1.0), (2, 2.0)]
    kept = {key: numbers(found.history[key]) for key in ("nan", "up", "down")}
    assert all(rows[-1] == (2, 2.0) for rows in kept.values())
    if name == "clearml":
        assert all(len(rows) == 1 for rows in kept.values()), "a false 0 would be worse than none"
        assert "[1] nan: nan" in found.console
        assert "[1] down: -inf" in found.console
    else:
        assert math.isnan(kept["nan"][0][1])
        assert (kept["up"][0][1], kept["down"][0][1]) == (math.inf, -math.inf)


def test_one_tracker_after_the_other(name: str, run_info: Runs, read: Read, hub: Hub) -> None:
    """An instance that is used for a second run starts anew."""
    tracker = hub(name, run_info()).trackers[0]
    for run_id in ("a1", "b2"):
        tracker.start(run_info(run_id=run_id))
        tracker.log({"loss": 0.5 if run_id == "a1" else 0.25}, step=1)
        tracker.flush()
        tracker.finish("success")
        tracker.finish("success")
        assert tracker.raw is None
    if name in ("comet", "clearml"):  # read as one folder
        return
    assert numbers(read(name, run_info()).history["loss"]) == [(1, 0.5)]
    assert numbers(read(name, run_info(run_id="b2")).history["loss"]) == [(1, 0.25)]


@pytest.mark.parametrize("unopened", NAMES)
def test_unopened(unopened: str) -> None:
    tracker = create(unopened)
    tracker.finish()
    for call in (
        lambda: tracker.log({"loss": 1.0}, step=1),
        lambda: tracker.log_config({"lr": 1.0}),
        lambda: tracker.log_text({"note": "warm"}, step=1),
    ):
        with pytest.raises(RuntimeError, match=r"not open: call start"):
            call()
    with pytest.raises(ValueError, match="interrupted"):
        tracker.finish("done")  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", NAMES)
def test_a_missing_package_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = create(missing)
    assert missing in available_trackers()
    monkeypatch.setitem(sys.modules, tracker.requires[0], None)
    with pytest.raises(ImportError, match=r"pip install \w+"):
        tracker.start(RunInfo("digits", str(tmp_path), "a1"))


@pytest.mark.parametrize("local_only", ["clearml", "comet", "dvclive", "mlflow"])
def test_a_remote_folder_is_refused(local_only: str) -> None:
    tracker: Tracker = create(local_only)
    pytest.importorskip(tracker.requires[0], reason=f"{local_only} is not installed")
    with pytest.raises(ValueError, match=r"s3://bucket/run.*local logging_dir, or \w+"):
        tracker.start(RunInfo("digits", "s3://bucket/run", "a1"))


def test_a_run_that_is_gone_does_not_end_the_logging(
    name: str, hub: Hub, run_info: Runs, read: Read, tmp_path: Path
) -> None:
    """Resumed where the tool has no such run: on another machine, or after somebody tidied up."""
    with hub(name, run_info(logging_dir=str(tmp_path / "gone"))) as opened:
        opened.log({"loss": 1.0}, step=1)
        state = json.loads(json.dumps(opened.state_dict()))
    resumed = hub(name, run_info(1))
    resumed.load_state_dict(state)
    resumed.start()
    resumed.log({"loss": 2.0}, step=2)
    resumed.finish()
    rows = numbers(read(name, run_info()).history["loss"])
    assert rows == ([(1, 1.0), (2, 2.0)] if name == "trackio" else [(2, 2.0)])
