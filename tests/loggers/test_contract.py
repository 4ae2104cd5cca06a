"""What every tracker must do, run over the built-in ones and one from another package."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loggers import RunInfo, Tracker, TrackerHub, available_trackers, create, read_csv, read_jsonl

THIRD_PARTY = '''
"""A tracker of someone else's package: a list that is written as one JSON file at the end."""
import json, os
from loggers import Tracker


class ListTracker(Tracker):
    def __init__(self, indent=None):
        self.indent, self.rows, self.last, self.path = indent, [], None, None

    def start(self, run):
        os.makedirs(run.logging_dir, exist_ok=True)
        self.path = os.path.join(run.logging_dir, "list.json")
        if run.resumed_step is not None:
            with open(self.path) as file:
                self.rows = [row for row in json.load(file) if row[0] <= run.resumed_step]

    def log(self, scalars, step):
        self.rows.append((step, dict(scalars)))
        self.last = step

    def finish(self, status="success"):
        if self.path is not None:
            with open(self.path, "w") as file:
                json.dump(self.rows, file, indent=self.indent)
            self.path = None

    def state_dict(self):
        return {"run_id": "list", "last_step": self.last}

    @property
    def raw(self):
        return self.rows
'''


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution that declares a tracker, the way pip would lay it out."""
    site = tmp_path / "site"
    info = site / "list_tracker-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "list_tracker.py").write_text(THIRD_PARTY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: list-tracker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[accel_callbacks.trackers]\n"
        "list = list_tracker:ListTracker\nbroken = no_such_module:Gone\nodd = json:dumps\n"
    )
    monkeypatch.syspath_prepend(site)
    yield
    from loggers import registry

    registry._classes.pop("list", None)
    sys.modules.pop("list_tracker", None)


@pytest.fixture
def readers(
    read_tensorboard: Callable[[str], Any], read_wandb: Callable[[str], Any]
) -> dict[str, Callable[[str], Any]]:
    def jsonl(folder: str) -> Any:
        rows = read_jsonl(f"{folder}/metrics.jsonl")
        return [(row["step"], row["values"]) for row in rows]

    def csv(folder: str) -> Any:
        return [(row["step"], row["values"]) for row in read_csv(f"{folder}/metrics.csv")]

    def third_party(folder: str) -> Any:
        rows = json.loads(Path(folder, "list.json").read_text())
        return [(step, values) for step, values in rows]

    return {
        "csv": csv,
        "jsonl": jsonl,
        "tensorboard": read_tensorboard,
        "wandb": read_wandb,
        "list": third_party,
    }


pytestmark = pytest.mark.usefixtures("third_party")
each_tracker = pytest.mark.parametrize("name", ["csv", "jsonl", "tensorboard", "wandb", "list"])


@each_tracker
def test_values_arrive(name: str, run_info: Callable[..., RunInfo], readers: Any) -> None:
    run = run_info()
    with TrackerHub([name], run=run, strict=True) as hub:
        hub.log_config({"lr": 0.1, "model": {"layers": [1, 2]}, "odd": object, "none": None})
        hub.log({"train": {"loss": 0.5}, "note": "warm"}, step=1)
        hub.log({"train/loss": 0.25, "epoch": 1}, step=2)
        assert hub.get(name).raw is not None
    assert readers[name](run.logging_dir) == [
        (1, {"train/loss": 0.5, "note": "warm"}),
        (2, {"train/loss": 0.25, "epoch": 1}),
    ]


@each_tracker
def test_resume_leaves_one_history(
    name: str, run_info: Callable[..., RunInfo], readers: Any
) -> None:
    """Stopped at step 5, resumed from the checkpoint of step 3: each step is there once."""
    hub = TrackerHub([name], run=run_info(), strict=True)
    hub.start()
    for step in range(1, 6):
        hub.log({"loss": float(step)}, step)
        if step == 3:
            state = json.loads(json.dumps(hub.state_dict()))
    hub.finish("interrupted")

    assert state[name]["last_step"] == 3
    resumed = TrackerHub([name], run=run_info(3, run_id="b2"), strict=True)
    resumed.load_state_dict(state)
    resumed.start()
    assert resumed.state_dict()[name]["run_id"] == state[name]["run_id"]
    for step in range(4, 8):
        resumed.log({"loss": 10.0 * step}, step)
    resumed.finish()

    rows = readers[name](run_info().logging_dir)
    expected = [(s, {"loss": float(s)}) for s in (1, 2, 3)]
    if name == "wandb":  # one fragment a process: sync joins them, here the later one wins
        rows = [row for row in rows if row[0] <= 3] + [r for r in rows if r[1]["loss"] >= 40]
    assert rows == expected + [(s, {"loss": 10.0 * s}) for s in range(4, 8)]


@each_tracker
def test_finish_twice_and_log_unopened(name: str, run_info: Callable[..., RunInfo]) -> None:
    tracker = create(name)
    tracker.finish()  # never started: nothing to do
    if name != "list":
        with pytest.raises(RuntimeError, match="start"):
            tracker.log({"loss": 1.0}, step=1)
        with pytest.raises(ValueError, match="interrupted"):
            tracker.finish("done")  # type: ignore[arg-type]
    tracker.start(run_info())
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish("failed")
    tracker.finish("failed")


def test_entry_points_are_found_listed_and_checked() -> None:
    assert {"jsonl", "list", "tensorboard", "wandb"} <= set(available_trackers())
    tracker = create("list", indent=2)
    assert isinstance(tracker, Tracker)
    assert (tracker.name, tracker.indent) == ("list", 2)  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"list-tracker as no_such_module:Gone"):
        create("broken")
    with pytest.raises(TypeError, match="odd = json:dumps"):
        create("odd")
