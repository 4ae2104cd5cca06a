"""Trackers of an Accelerator: opened late, never in the way, closed with the right status."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint
from loggers import Tracker, read_csv, read_jsonl
from tests.support import warm

pytestmark = pytest.mark.usefixtures("default_sigterm")


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == kind]


def metrics(folder: Path) -> list[tuple[int, dict]]:
    return [(record["step"], record["values"]) for record in records(folder, "metrics")]


def statuses(folder: Path) -> list[str]:
    return [record["status"] for record in records(folder, "finish")]


def jsonl(folder: Path, **options) -> Accelerator:
    return Accelerator(cpu=True, log_with="jsonl", project_dir=folder, **options)


class Kept(Tracker):
    """Keeps what it is given; fails in the methods that it is told to."""

    def __init__(self, name: str = "kept", fails: tuple[str, ...] = ()) -> None:
        self.name = name
        self.fails = fails
        self.rows: list[tuple[int, dict]] = []
        self.status: str | None = None
        self.config: dict = {}

    def _act(self, method: str) -> None:
        if method in self.fails:
            raise ConnectionError(f"{method} has no network")

    def start(self, run):
        self._act("start")

    def log_config(self, config):
        self._act("log_config")
        self.config = dict(config)

    def log(self, scalars, step):
        self._act("log")
        self.rows.append((step, dict(scalars)))

    def flush(self):
        self._act("flush")

    def finish(self, status="success"):
        self._act("finish")
        self.status = status


def test_what_is_logged_is_read_back(tmp_path):
    accel = jsonl(tmp_path)
    with accel.run("digits", config={"lr": 0.1, "sizes": [1, 2]}):
        accel.log({"loss": torch.tensor(0.5, requires_grad=True), "nested": {"a": 1}})
        accel.log({"loss": 0.25, "note": "hi"}, step=7)
    assert metrics(tmp_path) == [
        (0, {"loss": 0.5, "nested/a": 1}),
        (7, {"loss": 0.25, "note": "hi"}),
    ]
    assert records(tmp_path, "config")[0]["config"] == {"lr": 0.1, "sizes": [1, 2]}
    assert records(tmp_path, "run")[0]["name"] == "digits"
    assert records(tmp_path, "run")[0]["run_id"] == accel.current_run.run_id
    assert statuses(tmp_path) == ["success"]


def test_the_default_step_is_that_of_the_optimizer(tmp_path):
    accel = jsonl(tmp_path, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 1))
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    for index, batch in enumerate(loader):
        with accel.accumulate(model):
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        accel.log({"index": index})
    accel.end_training()
    assert [(step, row["index"]) for step, row in metrics(tmp_path)] == [(1, 1), (2, 3)]


# --- gradient accumulation: one row a step ---------------------------------------------------


def accumulate(accel: Accelerator, places: dict, stop_at: int = -1, *, batches: int = 7) -> None:
    """Windows of three; logs where ``places`` says: before the step, after it, after the block."""

    def log(place: str, index: int) -> None:
        for names in places.get(place, ()):
            accel.log({name: float(index) for name in names})

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.ones(batches, 1))
    model, optimizer, data = accel.prepare(model, optimizer, data)
    with accel.run("accumulated") as run:
        for _ in run.epochs(1):
            for batch in data:
                with accel.accumulate(model):
                    accel.backward(model(batch).sum())
                    index = run.batch_idx
                    log("before", index)
                    optimizer.step()
                    optimizer.zero_grad()
                    log("after", index)
                log("outside", index)
                if index == stop_at:
                    accel.save_state(f"{accel.project_dir}/stopped")
                    raise KeyboardInterrupt


# The last window has one micro-batch.
MEANS = [(1, {"loss": 1.0}), (2, {"loss": 4.0}), (3, {"loss": 6.0})]


@pytest.mark.parametrize("place", ["before", "after", "outside"])
def test_with_accumulation_a_step_is_one_row_with_the_mean_of_its_micro_batches(tmp_path, place):
    options = {"log_with": ["jsonl", "csv"], "project_dir": tmp_path}
    accumulate(Accelerator(cpu=True, gradient_accumulation_steps=3, **options), {place: [["loss"]]})
    assert metrics(tmp_path) == MEANS
    assert [(row["step"], row["values"]) for row in read_csv(tmp_path / "metrics.csv")] == MEANS


def test_with_accumulation_several_calls_of_a_micro_batch_are_a_row_each(tmp_path):
    accel = jsonl(tmp_path, gradient_accumulation_steps=3)
    accumulate(accel, {"before": [["first"]], "outside": [["loss"], ["norm", "loss"]]}, batches=3)
    assert metrics(tmp_path) == [
        (1, {"loss": 0.8}),
        (1, {"norm": 1.0, "loss": 2.0}),
        (1, {"first": 1.0}),
    ]


def test_with_accumulation_counts_and_texts_are_the_last_and_callbacks_get_each_call(tmp_path):
    seen = []
    accel = jsonl(tmp_path, gradient_accumulation_steps=3)
    accel.on("log")(lambda metrics, step: seen.append((step, metrics["loss"])))
    for index in range(3):
        with accel.accumulate():
            half = torch.tensor(float(index), dtype=torch.bfloat16)
            accel.log({"loss": half, "tokens": index * 10, "phase": f"at {index}", "lr": 0.1})
    accel.end_training()
    assert metrics(tmp_path) == [(0, {"loss": 1.0, "tokens": 20, "phase": "at 2", "lr": 0.1})]
    assert seen == [(0, 0.0), (0, 1.0), (0, 2.0)]


def test_with_accumulation_a_step_that_is_given_is_written_as_it_is(tmp_path):
    accel = jsonl(tmp_path, gradient_accumulation_steps=2)
    for index in range(2):
        with accel.accumulate():
            accel.log({"loss": float(index)}, step=index)
    accel.end_training()
    assert metrics(tmp_path) == [(0, {"loss": 0.0}), (1, {"loss": 1.0})]


@pytest.mark.parametrize("place", ["before", "after", "outside"])
@pytest.mark.parametrize("stop_at", [3, 5])
def test_with_accumulation_a_resume_logs_no_row_twice_and_loses_none(tmp_path, place, stop_at):
    def options() -> dict:
        return {
            "gradient_accumulation_steps": 3,
            "callbacks": [Checkpoint(tmp_path / "c", every_n_steps=1)],
        }

    with pytest.raises(KeyboardInterrupt):
        accumulate(jsonl(tmp_path, **options()), {place: [["loss"]]}, stop_at)
    accumulate(jsonl(tmp_path, **options()), {place: [["loss"]]})
    assert [row["values"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [
        row for _, row in MEANS
    ]


@pytest.mark.parametrize("place", ["after", "outside"])
def test_with_accumulation_a_save_inside_of_a_window_keeps_its_means(tmp_path, place):
    accel = jsonl(tmp_path, gradient_accumulation_steps=3)
    with pytest.raises(KeyboardInterrupt):
        accumulate(accel, {place: [["loss"]]}, 4)
    accel = jsonl(tmp_path / "resumed", gradient_accumulation_steps=3)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.ones(7, 1))
    model, optimizer, data = accel.prepare(model, optimizer, data)
    accel.load_state(tmp_path / "stopped")
    for batch in data:
        with accel.accumulate(model):
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        accel.log({"loss": float(accel.current_run.batch_idx)})
    accel.end_training()
    assert metrics(tmp_path / "resumed") == MEANS[1:]


def test_with_accumulation_a_save_after_the_step_writes_what_its_window_still_holds(tmp_path):
    accel = jsonl(tmp_path, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for index in range(2):
        with accel.accumulate(model):
            accel.backward(model(torch.ones(1, 1)).sum())
            if index == 0:
                accel.log({"early": 1.0})
            optimizer.step()
            optimizer.zero_grad()
    accel.save_state(tmp_path / "c")
    assert metrics(tmp_path) == [(1, {"early": 1.0})]
    accel.end_training()
    assert metrics(tmp_path) == [(1, {"early": 1.0})]


def test_a_value_changed_in_place_after_it_was_logged_is_logged_as_it_was(tmp_path):
    accel = jsonl(tmp_path)
    total = torch.zeros(())
    for _ in range(3):
        total += 1
        accel.log({"total": total})
    assert accel.current_run.callback_metrics["total"] == 3.0
    total += 1
    assert accel.current_run.callback_metrics["total"] == 3.0
    accel.end_training()
    assert [row["total"] for _, row in metrics(tmp_path)] == [1.0, 2.0, 3.0]


def test_trackers_open_at_the_first_log_and_not_before(tmp_path):
    accel = jsonl(tmp_path)
    assert accel.trackers == []
    assert not (tmp_path / "metrics.jsonl").exists()
    with pytest.raises(RuntimeError, match=r"accel\.run"):
        accel.get_tracker("jsonl")
    accel.log({"a": 1})
    assert [tracker.name for tracker in accel.trackers] == ["jsonl"]
    assert accel.get_tracker("jsonl") is accel.trackers[0]
    accel.end_training()
    assert accel.trackers == []


def test_init_trackers_names_the_run_and_keeps_its_config(tmp_path):
    accel = jsonl(tmp_path)
    accel.init_trackers("digits", {"lr": 0.1})
    accel.log({"a": 1})
    accel.end_training()
    assert records(tmp_path, "run")[0]["name"] == "digits"
    assert records(tmp_path, "config")[0]["config"] == {"lr": 0.1}
    assert statuses(tmp_path) == ["success"]


def test_an_unknown_tracker_is_refused(tmp_path):
    accel = jsonl(tmp_path)
    accel.init_trackers("digits")
    with pytest.raises(ValueError, match="configured: jsonl"):
        accel.get_tracker("tensorboard")
    accel.end_training()
    with pytest.raises(ValueError, match="jsnol"):
        Accelerator(cpu=True, log_with="jsnol", project_dir=tmp_path).init_trackers("x")


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "interrupted")]
)
def test_an_error_in_the_run_is_the_status_of_its_trackers(tmp_path, error, status):
    accel = jsonl(tmp_path)

    def fail() -> None:
        with accel.run("fails"):
            accel.log({"a": 1})
            raise error

    with pytest.raises(error):
        fail()
    assert statuses(tmp_path) == [status]
    assert metrics(tmp_path) == [(0, {"a": 1})]


SCRIPT = """
import sys
from accel_callbacks import Accelerator
accel = Accelerator(cpu=True, log_with="jsonl", project_dir=sys.argv[1])
accel.log({"a": 1})
{end}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("", "success", id="falls off the end", marks=pytest.mark.slow),
        pytest.param("raise ValueError('x')", "failed", id="raises"),
        pytest.param("sys.exit(0)", "success", id="exits"),
    ],
)
def test_a_plain_script_that_ends_closes_its_trackers_with_what_happened(tmp_path, end, status):
    code = SCRIPT.replace("{end}", end)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    warm.run(command, env=environment, check=False, capture_output=True)
    assert statuses(tmp_path) == [status]
    assert metrics(tmp_path) == [(0, {"a": 1})]


def test_a_run_that_logs_after_its_end_goes_on_in_the_same_place(tmp_path):
    accel = jsonl(tmp_path)
    with accel.run("digits"):
        accel.log({"a": 1})
    accel.log({"test": 2})
    accel.end_training()
    assert [row for _, row in metrics(tmp_path)] == [{"a": 1}, {"test": 2}]
    assert len({record["run_id"] for record in records(tmp_path, "run")}) == 1
    assert statuses(tmp_path) == ["success", "success"]


def test_a_resumed_run_keeps_its_identity_and_its_history(tmp_path):
    def fit(epochs: int) -> Accelerator:
        saver = Checkpoint(tmp_path / "c")
        accel = jsonl(tmp_path, callbacks=[saver])
        with accel.run("digits") as run:
            for epoch in run.epochs(epochs):
                accel.log({"epoch": epoch}, step=epoch)
        return accel

    fit(2)
    fit(4)
    assert [row["epoch"] for _, row in metrics(tmp_path)] == [0, 1, 2, 3]
    runs = records(tmp_path, "run")
    assert len(runs) == 2
    assert runs[0]["run_id"] == runs[1]["run_id"]
    assert (runs[0]["resumed_step"], runs[1]["resumed_step"]) == (None, 0)


def test_two_runs_of_one_accelerator_are_two_runs_of_the_tracker(tmp_path):
    accel = jsonl(tmp_path)
    for name in ("one", "two"):
        with accel.run(name):
            accel.log({"a": 1})
    runs = records(tmp_path, "run")
    assert [run["name"] for run in runs] == ["one", "two"]
    assert runs[0]["run_id"] != runs[1]["run_id"]
    assert runs[1]["resumed_step"] is None
    assert statuses(tmp_path) == ["success", "success"]


def test_two_accelerators_log_to_their_own_places(tmp_path):
    one, two = jsonl(tmp_path / "one"), jsonl(tmp_path / "two")
    one.log({"a": 1})
    two.log({"a": 2})
    one.end_training()
    two.log({"a": 3})
    two.end_training()
    assert [row["a"] for _, row in metrics(tmp_path / "one")] == [1]
    assert [row["a"] for _, row in metrics(tmp_path / "two")] == [2, 3]


@pytest.mark.parametrize("method", ["start", "log_config", "log", "flush", "finish"])
def test_a_tracker_that_fails_ends_neither_the_run_nor_the_other_trackers(tmp_path, method):
    broken, whole = Kept("broken", (method,)), Kept("whole")
    accel = Accelerator(cpu=True, log_with=[broken, whole], project_dir=tmp_path)
    with accel.run("digits", config={"lr": 1}):
        for value in range(8):
            accel.log({"a": value})
    assert [row["a"] for _, row in whole.rows] == list(range(8))
    assert whole.status == "success"
    assert whole.config == {"lr": 1}


@pytest.mark.parametrize(
    "method",
    [
        "start",
        "log_config",
        "log",
        "flush",
        "finish",
    ],
)
def test_a_strict_tracker_that_fails_ends_the_run(tmp_path, method):
    broken, whole = Kept("broken", (method,)), Kept("whole")
    accel = Accelerator(
        cpu=True, log_with=[broken, whole], project_dir=tmp_path, strict_trackers=True
    )

    def train() -> None:
        with accel.run("digits", config={"lr": 1}):
            accel.log({"a": 1})
            accel.tracking.state_dict()

    with pytest.raises(ConnectionError, match=method):
        train()
    assert accel.trackers == []
    assert whole.status is not None


def test_a_bad_value_is_an_error_where_it_is_logged(tmp_path):
    accel = jsonl(tmp_path)
    with pytest.raises(TypeError, match="image"):
        accel.log({"image": torch.ones(2, 2)})
    assert accel.current_run.callback_metrics == {}
    accel.log({"a": 1})
    accel.end_training()
    assert metrics(tmp_path) == [(0, {"a": 1})]


def test_nothing_is_opened_where_no_tracker_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accel = Accelerator(cpu=True)
    with accel.run("quiet", config={"lr": 1}):
        accel.log({"a": 1})
    accel.end_training()
    assert list(tmp_path.iterdir()) == []


def test_logs_go_to_the_logging_dir(tmp_path):
    from accel_callbacks import ProjectConfiguration

    config = ProjectConfiguration(tmp_path / "project", logging_dir=tmp_path / "logs")
    accel = Accelerator(cpu=True, log_with="jsonl", project_config=config)
    accel.log({"a": 1})
    accel.end_training()
    assert metrics(tmp_path / "logs") == [(0, {"a": 1})]


TERMINATED = """
import os, signal, sys
from accel_callbacks import Accelerator
accel = Accelerator(cpu=True, log_with="jsonl", project_dir=sys.argv[1])
accel.init_trackers("digits")
accel.log({"a": 1})
print("logged", flush=True)
signal.pause()
"""


def test_sigterm_ends_a_plain_script_as_interrupted(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TERMINATED, str(tmp_path)]
    with warm.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "logged\n"
        child.terminate()
        assert child.wait() == 143
    assert statuses(tmp_path) == ["interrupted"]
    assert metrics(tmp_path) == [(0, {"a": 1})]


def test_sigterm_unwinds_a_run_and_only_while_trackers_are_open(tmp_path, training):
    before = signal.getsignal(signal.SIGTERM)
    t = training(log_with="jsonl", project_dir=tmp_path)

    def train() -> None:
        with t.accel.run("digits"):
            t.accel.log({"a": 1})
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as end:
        train()
    assert end.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert "exception SystemExit" in t.recorder.trace
    assert statuses(tmp_path) == ["interrupted"]
    assert metrics(tmp_path) == [(0, {"a": 1})]


def test_another_handler_of_sigterm_wins(tmp_path):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        accel = jsonl(tmp_path)
        with accel.run("digits"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert came == [1]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with accel.run("later"):
            mine = lambda *_: came.append(2)  # noqa: E731
            signal.signal(signal.SIGTERM, mine)
            os.kill(os.getpid(), signal.SIGTERM)
        assert (came, signal.getsignal(signal.SIGTERM)) == ([1, 2], mine)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert statuses(tmp_path) == ["success", "success"]


def test_two_accelerators_share_sigterm(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    one, two = jsonl(tmp_path / "one"), jsonl(tmp_path / "two")
    one.log({"a": 1})
    two.log({"a": 2})
    one.end_training()
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    two.end_training()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_dies_of_sigterm_as_ever(tmp_path):
    accel = jsonl(tmp_path)
    accel.log({"a": 1})
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=lambda: (there.send("up"), signal.pause())
    )
    process.start()
    assert here.recv() == "up"
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM
    accel.end_training()
    assert statuses(tmp_path) == ["success"]


def test_what_was_logged_is_in_the_files_when_a_checkpoint_is_made(tmp_path):
    from loggers import TrackerConfig

    accel = jsonl(tmp_path, tracker_config=TrackerConfig(flush_every_s=1e9))
    accel.log({"a": torch.tensor(1.0)}, step=7)
    assert accel.tracking.state_dict()["jsonl"]["last_step"] == 7
    assert metrics(tmp_path) == [(7, {"a": 1.0})]
    accel.end_training()


def test_the_end_says_what_each_tracker_has_lost(tmp_path, capsys):
    from loggers import TrackerConfig

    class Slow(Kept):
        gate = threading.Event()

        def log(self, scalars, step):
            self.gate.wait()
            super().log(scalars, step)

    slow = Slow("slow")
    accel = Accelerator(
        cpu=True,
        log_with=[slow, "jsonl"],
        project_dir=tmp_path,
        tracker_config=TrackerConfig(max_buffer=1000),
    )
    for step in range(5000):
        accel.log({"loss": 1.0}, step=step)
    slow.gate.set()
    accel.end_training()
    lines = [line for line in capsys.readouterr().err.splitlines() if " lost " in line]
    lost = 5000 - (len(slow.rows) - 1)
    assert lost >= 3000
    assert slow.rows[-1] == (4999, {"tracker/lost_rows": lost})
    assert lines == [f"[accel] tracker 'slow' lost {lost} of 5000 rows"]
    assert len(metrics(tmp_path)) == 5000


def test_the_end_says_which_media_are_lost(tmp_path, capsys):
    class Soundless(Kept):
        def log_audio(self, audio, step, *, sample_rate):
            self._act("log_audio")

    tracker = Soundless("soundless", fails=("log_audio",))
    accel = Accelerator(cpu=True, log_with=tracker, project_dir=tmp_path)
    accel.log({"loss": 1.0}, step=1)
    accel.tracking.hub.log_audio({"beep": np.zeros(8)}, 1, sample_rate=8000)
    accel.end_training()
    assert "[accel] tracker 'soundless' lost 1 other record\n" in capsys.readouterr().err
    assert tracker.rows == [(1, {"loss": 1.0})]


def test_the_state_of_a_tracker_that_is_not_used_now_is_kept(tmp_path):
    accel = jsonl(tmp_path)
    accel.tracking.load_state_dict({"wandb": {"run_id": "w1"}})
    accel.log({"a": 1})
    assert accel.tracking.state_dict()["wandb"] == {"run_id": "w1"}
    assert accel.tracking.state_dict()["jsonl"]["run_id"] == accel.current_run.run_id
    accel.end_training()
    assert accel.tracking.state_dict()["wandb"] == {"run_id": "w1"}


def test_a_config_of_the_trackers_reaches_the_hub(tmp_path):
    from loggers import TrackerConfig

    accel = jsonl(tmp_path, tracker_config=TrackerConfig(nan_policy="raise", flush_every_s=1e9))
    accel.log({"loss": torch.tensor(float("nan"))})
    with pytest.raises(FloatingPointError, match="'loss' is nan at step 0"):
        accel.end_training()
    assert statuses(tmp_path) == ["success"]


def test_media_go_to_the_trackers_that_have_them(tmp_path, training):
    class Pictures(Kept):
        def log_images(self, images, step, *, captions=None):
            self.pictures = (images["digits"].shape, step, captions)

        def log_graph(self, model, inputs=None):
            self.graph = (type(model), model.training, inputs)

    kept = Pictures()
    t = training(log_with=kept, project_dir=tmp_path)
    t.model.train()
    with t.accel.run("digits"):
        t.accel.log_images({"digits": torch.zeros(2, 1, 4, 4)}, captions={"digits": "12"})
        t.accel.log_graph(t.model)
        with pytest.warns(UserWarning, match="'kept' does not record text"):
            t.accel.log_text({"a": "b"})
        t.accel.log_text({"a": "b"})
        with pytest.raises(ValueError, match="columns and data"):
            t.accel.log_table("empty")
    assert kept.pictures == ((2, 4, 4, 1), 0, {"digits": ["12"]})
    assert kept.graph == (torch.nn.Linear, False, None)
    assert t.model.training
    assert kept.status == "success"


def test_a_data_frame_is_a_table(tmp_path):
    class Frame:  # what is used of pandas
        columns = ("n", "name")
        values = np.array([[1, "one"], [2, "two"]], dtype=object)

    class Tables(Kept):
        def log_table(self, name, columns, rows, step):
            self.table = (name, columns, rows, step)

    kept = Tables()
    accel = Accelerator(cpu=True, log_with=kept)
    accel.log_table("numbers", dataframe=Frame(), step=4)
    accel.end_training()
    assert kept.table == ("numbers", ["n", "name"], [[1, "one"], [2, "two"]], 4)


def test_data_loader_workers_log_nothing_and_hang_nowhere(tmp_path):
    accel = jsonl(tmp_path)
    accel.log({"a": 0})

    class Logs(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            accel.log({"a": 100 + index})
            return index

    loader = torch.utils.data.DataLoader(Logs(), num_workers=2, multiprocessing_context="fork")
    assert sorted(int(item) for item in loader) == [0, 1, 2, 3]
    accel.log({"a": 1})
    accel.end_training()
    assert [row["a"] for _, row in metrics(tmp_path)] == [0, 1]


def by_hand(training, tmp_path):
    """A loop without ``run``: three steps, a checkpoint after the second."""
    t = training(log_with="jsonl", project_dir=tmp_path, batches=3)
    t.accel.init_trackers("digits", {"lr": 0.1})
    for batch in t.train:
        t.step(batch)
        t.accel.log({"step": t.accel.current_run.global_step})
        if t.accel.current_run.global_step == 2:
            t.accel.save_state(tmp_path / "two")
    t.accel.end_training()


def test_trackers_that_were_started_before_load_state_go_on_with_its_run(training, tmp_path):
    by_hand(training, tmp_path)
    (first,) = records(tmp_path, "run")
    t = training(log_with="jsonl", project_dir=tmp_path, batches=3)
    t.accel.init_trackers("digits", {"lr": 0.1})  # the order of Accelerate's examples
    t.accel.load_state(tmp_path / "two")
    t.accel.log({"step": "three again"}, step=3)
    t.accel.end_training()
    last = records(tmp_path, "run")[-1]
    assert (last["run_id"], last["resumed_step"]) == (first["run_id"], 2)
    rows = [(row["step"], row["values"]["step"]) for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert rows == [(1, 1), (2, 2), (3, "three again")]


@pytest.mark.parametrize("used", ["log", "get_tracker"])
def test_trackers_that_were_used_before_load_state_stay_with_their_run(training, tmp_path, used):
    by_hand(training, tmp_path)
    t = training(log_with="jsonl", project_dir=tmp_path, batches=3)
    t.accel.init_trackers("digits")
    t.accel.log({"a": 1.0}) if used == "log" else t.accel.get_tracker("jsonl")
    with pytest.warns(UserWarning, match="Load before the first log"):
        t.accel.load_state(tmp_path / "two")
    t.accel.end_training()
    assert len(records(tmp_path, "run")) == 2
