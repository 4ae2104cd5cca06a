"""What is particular to one tool: names it refuses, state of the process, runs of the script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loggers import RunInfo, create

Runs = Callable[..., RunInfo]


@pytest.fixture
def mlflow() -> Any:
    return pytest.importorskip("mlflow", reason="mlflow is not installed")


def test_mlflow_makes_a_database_below_the_folder(
    mlflow: Any, run_info: Runs, read: Any, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens where nothing is configured at all; MLflow takes seconds for the first run."""
    pytest.importorskip("alembic", reason="alembic is not installed")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    run = run_info()
    with hub("mlflow", run) as opened:
        opened.log_config({"lr": 0.1})
        opened.log({"loss": float("inf"), "note": "warm"}, step=1)
        opened.get("mlflow").log_text({"text": "hello"}, 1)
    assert (Path(run.logging_dir) / "mlflow" / "mlflow.db").is_file()
    found = read("mlflow", run)
    assert found.history["loss"] == [(1, sys.float_info.max)], "databases have no infinity"
    assert found.status == "FINISHED"
    artifacts = Path(run.logging_dir) / "mlflow" / "artifacts" / found.id / "artifacts"
    assert (artifacts / "text/text/1.txt").read_text() == "hello"


def test_mlflow_says_what_a_database_needs(
    mlflow: Any, run_info: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install sqlalchemy alembic. Or set MLFLOW_TR"):
        create("mlflow").start(run_info())


def test_mlflow_names_and_lengths(mlflow: Any, run_info: Runs, hub: Any, read: Any) -> None:
    run = run_info()
    tracker = hub("mlflow", run).trackers[0]
    tracker.start(run)
    with pytest.warns(UserWarning, match="warned once") as caught:
        _log_odd_names(tracker)
    tracker.finish()
    found = read("mlflow", run)
    assert {key: rows[0][1] for key, rows in found.history.items() if key != "s"} == {
        "acc_1": 1.0,
        "__/up": 2.0,
        "root": 3.0,
        "n": 1.0,
    }
    assert len(found.history["s"][0][1]) == 8000
    assert found.config == {"text": "x" * 6000, "a_b": "1"}
    warned = [str(one.message) for one in caught if "warned once" in str(one.message)]
    assert sum("is recorded as" in text for text in warned) == 1
    assert sum("characters" in text for text in warned) == 1


def _log_odd_names(tracker: Any) -> None:
    tracker.log_config({"text": "x" * 7000, "a@b": 1})
    tracker.log({"acc@1": 1.0, "../up": 2.0, "/root": 3.0, "n": 1, "s": "y" * 9000}, 1)


def test_mlflow_parameters_that_change(mlflow: Any, run_info: Runs, hub: Any, read: Any) -> None:
    """MLflow refuses another value of a parameter; the run must not stop for that."""
    with hub("mlflow", run_info()) as opened:
        opened.log_config({"lr": 0.1, "seed": 1})
        state = opened.state_dict()
    resumed = hub("mlflow", run_info(0))
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"config differs .*\(lr\)"), resumed:
        resumed.log_config({"lr": 0.2, "seed": 1, "new": True})
    found = read("mlflow", run_info())
    assert found.config == {"lr": "0.1", "seed": "1", "new": "True"}
    assert found.history["resumed/lr"] == [(-1, "0.2")]


def test_mlflow_sends_in_parts(
    mlflow: Any, run_info: Runs, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server takes so many values in one request, and fewer tags and parameters."""
    monkeypatch.setattr("loggers.trackers.mlflow._PER_BATCH", 8)
    monkeypatch.setattr("loggers.trackers.mlflow._TAGS_PER_BATCH", 3)
    tracker = create("mlflow")
    tracker.start(run_info())
    send, sizes = tracker.raw.log_batch, []

    def counted(run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        sizes.append((len(metrics), len(params), len(tags)))
        send(run_id, metrics=metrics, params=params, tags=tags)

    monkeypatch.setattr(tracker.raw, "log_batch", counted)
    tracker.log_config({f"p{i}": i for i in range(4)})
    tracker.log({f"m{i}": i for i in range(12)} | {f"t{i}": "x" for i in range(4)}, step=1)
    tracker.finish()
    assert sizes == [(0, 3, 0), (0, 1, 0), (5, 0, 3), (7, 0, 1)]
    found = read("mlflow", run_info())
    assert (len(found.config), len(found.history)) == (4, 16)


def test_mlflow_goes_where_it_is_told(
    mlflow: Any, run_info: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "elsewhere"))
    tracker = create("mlflow", experiment_name="mine", run_name="first", tags={"team": "vision"})
    tracker.start(run_info(logging_dir="s3://bucket/run"))
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()
    client = mlflow.MlflowClient(tracking_uri=str(tmp_path / "elsewhere"))
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.data.tags["team"]) == ("first", "vision")
    assert run.data.metrics == {"loss": 1.0}


def test_mlflow_keeps_what_it_could_not_send(
    mlflow: Any, run_info: Runs, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = create("mlflow")
    tracker.start(run_info())
    tracker.log({"loss": 1.0}, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(tracker.raw, "log_batch", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tracker.flush()
    tracker.log({"loss": 2.0}, step=2)
    tracker.finish()
    assert read("mlflow", run_info()).history["loss"] == [(1, 1.0), (2, 2.0)]


def test_trackio_keys_of_its_own(run_info: Runs, hub: Any, read: Any) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    tracker = hub("trackio", run_info()).trackers[0]
    tracker.start(run_info())
    tracker.log_config({"_hidden": 1, "plain": 2})
    with pytest.warns(UserWarning, match="Reserved keys"):
        tracker.log({"step": 7, "loss": 1.0}, step=1)
    tracker.finish()
    found = read("trackio", run_info())
    assert (found.config["hidden"], found.config["plain"]) == (1, 2)
    assert found.history["__step"] == [(1, 7)]


@pytest.mark.parametrize("tool", ["comet", "swanlab", "clearml"])
def test_a_run_of_the_script_is_used_and_left_open(
    tool: str, run_info: Runs, tmp_path: Path, hub: Any
) -> None:
    mine, is_open, close = _open_one(tool, tmp_path, hub, run_info)
    tracker = create(tool)
    tracker.start(run_info())
    assert tracker.raw is mine
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish("failed")
    assert is_open()
    close()


def _open_one(tool: str, folder: Path, hub: Any, run_info: Runs) -> Any:
    """Open a run as a script would; return it, whether it is open, and how to close it."""
    if tool == "comet":
        comet = pytest.importorskip("comet_ml", reason="comet is not installed")
        run = comet.OfflineExperiment(
            project_name="mine", offline_directory=str(folder), log_env_details=False
        )
        return run, lambda: not run.ended, run.end
    if tool == "swanlab":
        swanlab = pytest.importorskip("swanlab", reason="swanlab is not installed")
        run = swanlab.init(mode="offline", log_dir=str(folder), settings=_quiet(swanlab))
        return run, lambda: run.alive, run.finish
    clearml = pytest.importorskip("clearml", reason="clearml is not installed")
    other = hub("clearml", run_info(run_id="mine"), offline=True).trackers[0]
    other.start(run_info(run_id="mine"))
    task = other.raw
    return task, lambda: clearml.Task.current_task() is task, other.finish


def _quiet(swanlab: Any) -> Any:
    probe = {"monitor": False, "hardware": False, "requirements": False, "git": False}
    return swanlab.Settings(probe=probe, terminal={"proxy_type": "none"})


def test_clearml_does_not_go_on_online_with_an_offline_task(
    run_info: Runs, read: Any, hub: Any
) -> None:
    """And the other way round: an id of a server means nothing offline."""
    pytest.importorskip("clearml", reason="clearml is not installed")
    tracker = hub("clearml", run_info()).trackers[0]
    tracker.load_state_dict({"run_id": "0123456789abcdef", "last_step": 3})
    with pytest.warns(UserWarning, match="task of its own"):
        tracker.start(run_info(3))
    tracker.log({"loss": 1.0}, step=4)
    tracker.finish()
    assert tracker.state_dict()["run_id"].startswith("offline-")
    assert read("clearml", run_info()).history["loss"] == [(4, 1.0)]


def test_dvclive_cuts_torn_rows_and_keeps_names_below(
    run_info: Runs, hub: Any, read: Any, tmp_path: Path
) -> None:
    pytest.importorskip("dvclive", reason="dvclive is not installed")
    with hub("dvclive", run_info()) as opened:
        for step in (1, 2, 3):
            opened.log({"../../loss": float(step)}, step)
        state = opened.state_dict()
    file = Path(run_info().logging_dir, "dvclive", "a1", "plots", "metrics", "loss.tsv")
    file.write_text(file.read_text() + "4")  # no newline, no value
    with hub("dvclive", run_info(2)) as fresh:  # without a state it is a run like any other
        fresh.log({"loss": 9.0}, step=1)
    assert read("dvclive", run_info()).history["loss"] == [(1, "9.0")]
    file.write_text("step\tloss\n1\t1.0\n2\t2.0\n3\t3.0\n4")
    resumed = hub("dvclive", run_info(2))
    resumed.load_state_dict({"dvclive": {**state["dvclive"], "last_step": 2}})
    with resumed:
        resumed.log({"loss": 30.0}, step=3)
    assert read("dvclive", run_info()).history["loss"] == [(1, "1.0"), (2, "2.0"), (3, "30.0")]


@pytest.mark.parametrize("tool", ["dvclive", "mlflow"])
def test_each_rank_goes_on_with_a_run_of_its_own(tool: str, run_info: Runs) -> None:
    """A checkpoint has the state of rank 0, and every rank is given it."""
    pytest.importorskip(tool, reason=f"{tool} is not installed")
    states = []
    for resumed in (None, 1):
        for rank in (0, 1):
            tracker = create(tool, all_ranks=True)
            if resumed is not None:
                tracker.load_state_dict(states[0])
            tracker.start(run_info(resumed, rank=rank, run_id="b2" if resumed else "a1"))
            tracker.log({"loss": float(rank)}, step=1 if resumed is None else 2)
            tracker.finish()
            states.append(tracker.state_dict())
    ids = [state["run_id"] for state in states]
    assert ids[0] == ids[2]
    assert ids[1] not in (ids[0], ids[2])
    assert ids[3] != ids[2]
    if tool == "dvclive":
        assert ids == ["a1", "a1-rank1", "a1", "a1-rank1"]
        file = "dvclive/rank1/a1-rank1/plots/metrics/loss.tsv"
        rows = Path(run_info().logging_dir, file).read_text().split()
        assert rows == ["step", "loss", "1", "1.0", "2", "1.0"]


@pytest.fixture
def killed(run_info: Runs) -> Callable[[str, int], None]:
    """Log in a process, wait until its tracker has been flushed, and kill it."""

    def run(name: str, steps: int) -> None:
        script = textwrap.dedent(
            """
            import signal, sys
            from loggers import RunInfo, create
            name, folder, project = sys.argv[1:4]
            tracker = create(name)
            tracker.start(RunInfo(project, folder, "a1"))
            for step in range(1, int(sys.argv[4]) + 1):
                tracker.log({"loss": float(step)}, step)
            tracker.flush()
            print("ready", flush=True)
            signal.pause()
            """
        )
        info = run_info()
        arguments = [name, info.logging_dir, info.name, str(steps)]
        process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert process.stdout is not None
        assert any(line.startswith("ready") for line in process.stdout)
        process.send_signal(signal.SIGKILL)
        process.wait()

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlflow", "dvclive"])
def test_what_was_flushed_survives_a_kill(
    name: str, killed: Callable[[str, int], None], run_info: Runs, hub: Any
) -> None:
    """The tools that write when they are told to; the others do so some time later."""
    pytest.importorskip(name, reason=f"{name} is not installed")
    killed(name, 3)
    if name == "dvclive":
        file = Path(run_info().logging_dir, "dvclive", "a1", "plots", "metrics", "loss.tsv")
        assert file.read_text().split()[2:] == ["1", "1.0", "2", "2.0", "3", "3.0"]
    else:
        (file,) = Path(run_info().logging_dir, "mlflow").glob("*/*/metrics/loss")
        assert [line.split()[1:] for line in file.read_text().splitlines()] == [
            ["1.0", "1"],
            ["2.0", "2"],
            ["3.0", "3"],
        ]
