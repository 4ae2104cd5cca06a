"""The trackers as scripts for Accelerate use them: what they log, call and read."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import warnings

import numpy as np
import pytest
import torch

import accel_callbacks
import loggers
from accel_callbacks.compat.names import resolve
from tests.loggers.conftest import read_wandb, wandb_records  # noqa: F401 (fixtures)
from tests.support.bound import BOUND

pytestmark = pytest.mark.filterwarnings("error")


def tracking(key: str):
    return resolve("accelerate.tracking", key)


def started(log_with, folder, **options):
    """An Accelerator by the alias, whose trackers are open."""
    accelerator = resolve("accelerate", "Accelerator")(
        cpu=True, log_with=log_with, project_dir=str(folder)
    )
    accelerator.init_trackers("digits", options.pop("config", {"lr": 0.1}), **options)
    return accelerator


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    # Without an account a run is offline; a mode of the environment, wandb would keep for others.
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


class Everything(tracking("GeneralTracker")):
    """A tracker of the user that keeps what it is given."""

    name = "everything"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list = []

    def log(self, values, step=None, **kwargs):
        self.calls.append((values, step, kwargs))


# --- accelerator.log --------------------------------------------------------------------------


def test_what_wandb_takes_goes_to_wandb_as_it_is(tmp_path, read_wandb):  # noqa: F811
    wandb = pytest.importorskip("wandb")
    accelerator = started("wandb", tmp_path)
    picture = wandb.Image(np.zeros((4, 4, 3), np.uint8))
    accelerator.log({"loss": 0.5, "image": picture}, step=1)
    accelerator.log({"images": [picture, picture]}, step=2)
    accelerator.log({"histogram": wandb.Histogram(np.arange(9))}, step=3)
    accelerator.log({"table": wandb.Table(columns=["a"], data=[[1]])}, step=4)
    accelerator.log({"page": wandb.Html("<p>")}, step=5)
    accelerator.log({"nested": {"list": [1, 2], "one": torch.ones(1)}}, step=6.0)
    accelerator.log({"array": np.arange(3.0), "one": np.array([7])}, step=7)
    accelerator.end_training()
    rows = read_wandb(str(tmp_path))
    found = {name: value for _, row in rows for name, value in row.items()}
    assert found["image._type"] == "image-file"
    assert (found["images._type"], found["images.count"]) == ("images/separated", 2)
    assert found["histogram._type"] == "histogram"
    assert found["table._type"] == "table-file"
    assert found["page._type"] == "html-file"
    assert (found["nested/list"], found["nested/one"]) == ([1, 2], 1.0)
    assert (found["array"], found["one"]) == ([0, 1, 2], 7)
    (together,) = [(step, row) for step, row in rows if "image._type" in row]
    assert (together[0], together[1]["loss"]) == (1, 0.5)


def test_trackers_that_cannot_record_an_object_say_so_once_a_name(tmp_path):
    wandb = pytest.importorskip("wandb")
    own = Everything()
    accelerator = started(["jsonl", "tensorboard", own], tmp_path)
    table = wandb.Table(columns=["a"], data=[[1]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2):
            accelerator.log({"loss": 0.5, "table": table, "list": [1, 2]}, step=step)
    assert [str(warning.message) for warning in caught] == [
        "'table' is of type Table, which 'jsonl', 'tensorboard' cannot record: it is skipped there "
        "(warned once)",
        "'list' is of type list, which 'jsonl', 'tensorboard' cannot record: it is skipped there "
        "(warned once)",
    ]
    assert caught[0].filename == __file__
    accelerator.end_training()
    assert own.calls[1] == ({"table": table, "list": [1, 2]}, 1, {})
    written = loggers.read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["values"] for row in written] == [{"loss": 0.5}] * 2


def test_an_object_may_be_changed_after_the_log(tmp_path):
    own = Everything()
    accelerator = started(own, tmp_path)
    values = [1, 2]
    seen = []
    own.log = lambda values, step=None: seen.append(list(values["list"]))
    accelerator.log({"list": values}, step=1)
    values.clear()
    accelerator.end_training()
    assert seen == [[1, 2]]


def test_an_object_of_another_tool_is_not_for_wandb_and_an_error_of_the_tool_ends_nothing():
    class Image:
        __module__ = "swanlab.data"

    class Clip:
        __module__ = "trackio.media"

    assert not loggers.WandBTracker().takes_object([Image()])
    assert loggers.WandBTracker().takes_object([[1, 2], np.arange(3)])
    assert loggers.SwanLabTracker().takes_object([Image()])
    assert not loggers.SwanLabTracker().takes_object([1, 2])
    assert loggers.TrackioTracker().takes_object(Clip())
    assert not loggers.TrackioTracker().takes_object(Image())


def test_a_tool_that_fails_with_objects_still_gets_scalars(tmp_path, caplog):
    own = Everything()
    plain = own.log

    def log(values, step=None):
        if "list" in values:
            raise RuntimeError("no lists")
        plain(values, step)

    own.log = log
    accelerator = started(own, tmp_path)
    for step in range(20):
        accelerator.log({"loss": step, "list": [1]}, step=step)
    accelerator.end_training()
    assert [call[0] for call in own.calls] == [{"loss": step} for step in range(20)]
    assert "gets no more objects" in caplog.text


def test_a_step_is_left_out_or_a_float(tmp_path):
    accelerator = started("jsonl", tmp_path)
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 2.0}, step=3 / 2)
    accelerator.log({"loss": 3.0}, step=torch.tensor(2))
    accelerator.log({"loss": {"train": 4.0}}, step=np.float64(3))
    accelerator.end_training()
    written = loggers.read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["values"]) for row in written] == [
        *((0, {"loss": 1.0}), (1, {"loss": 2.0}), (2, {"loss": 3.0}), (3, {"loss/train": 4.0})),
    ]


@dataclasses.dataclass
class Options:
    lr: float = 0.1


@pytest.mark.parametrize("config", [argparse.Namespace(lr=0.1), Options(), {"lr": 0.1}])
@pytest.mark.parametrize("kind", ["here", "alias"])
def test_a_config_is_a_dict_a_namespace_or_a_dataclass(tmp_path, config, kind):
    make = accel_callbacks.Accelerator if kind == "here" else resolve("accelerate", "Accelerator")
    accelerator = make(cpu=True, log_with="jsonl", project_dir=str(tmp_path))
    accelerator.init_trackers("digits", config=config)
    accelerator.end_training()
    files = [path.read_text() for path in tmp_path.glob("*.json*")]
    assert any('"lr": 0.1' in text or '"lr":0.1' in text for text in files)


# --- the trackers themselves ------------------------------------------------------------------


def test_the_tracker_of_wandb_is_called_as_that_of_accelerate(tmp_path, read_wandb):  # noqa: F811
    wandb = pytest.importorskip("wandb")
    accelerator = started("wandb", tmp_path, init_kwargs={"wandb": {"tags": ["first"]}})
    tracker = accelerator.get_tracker("wandb")
    assert isinstance(tracker, tracking("WandBTracker"))
    assert tracker is accelerator.trackers[0]
    assert (tracker.name, tracker.run_name, tracker.logging_dir) == (
        "wandb",
        "digits",
        str(tmp_path),
    )
    assert tracker.init_kwargs == {"tags": ["first"]}
    assert tracker.run is tracker.tracker is accelerator.get_tracker("wandb", unwrap=True)
    assert tracker.run.project == "digits"
    tracker.start()
    tracker.store_init_configuration({"epochs": 3})
    picture = np.zeros((4, 4, 3), np.uint8)
    tracker.log({"validation": [wandb.Image(picture, caption="a dog")]})
    tracker.log({"loss": 0.5}, step=5, commit=True)
    tracker.log_images({"drawn": [picture, picture]}, step=6)
    tracker.log_table("cells", columns=["image", "n"], data=[[wandb.Image(picture), 1]], step=7)
    with pytest.raises(TypeError, match="log of tracker 'wandb' takes no keyword 'no_such'"):
        tracker.log({"loss": 0.5}, no_such=1)
    assert tracker.run.config["epochs"] == 3
    tracker.finish()
    accelerator.log({"loss": 0.25}, step=8)
    accelerator.end_training()
    found = {
        name: (step, value)
        for step, row in read_wandb(str(tmp_path))
        for name, value in row.items()
    }
    assert found["validation.captions"] == (0, ["a dog"])
    assert found["drawn.count"] == (6, 2)
    assert found["cells._type"] == (7, "table-file")
    assert found["loss"] == (8, 0.25)


def test_the_tracker_of_tensorboard_is_called_as_that_of_accelerate(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = started("tensorboard", tmp_path)
    tracker = accelerator.get_tracker("tensorboard")
    assert isinstance(tracker, tracking("TensorBoardTracker"))
    assert tracker.writer is tracker.tracker
    assert tracker.logging_dir_param == str(tmp_path)
    pictures = np.zeros((2, 5, 6, 3), np.uint8)
    tracker.writer.add_images("own", pictures, 1, dataformats="NHWC")
    tracker.log_images({"last": pictures}, step=1, dataformats="NHWC")
    tracker.log_images({"first": torch.zeros(2, 3, 5, 6)}, step=1)
    tracker.log_images({"list": [pictures[0]]}, step=1)
    tracker.log({"loss": 0.5, "groups": {"a": 1, "b": 2}, "note": "text"}, walltime=7.0)
    accelerator.log({"speed": 2.0}, step=3, log_kwargs={"tensorboard": {"walltime": 9.0}})
    assert tracker.logging_dir == str(tmp_path / "digits")
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "digits")).Reload()
    assert {"own", "last", "first", "list"} <= {
        tag.partition("/")[0] for tag in events.Tags()["images"]
    }
    (loss,) = events.Scalars("loss")
    assert (loss.value, loss.step, loss.wall_time) == (0.5, 0, 7.0)
    assert (events.Scalars("groups/b")[0].value, events.Scalars("speed")[0].wall_time) == (2, 9.0)


def test_a_tracker_that_accelerate_has_not_has_the_same_methods(tmp_path):
    accelerator = started("jsonl", tmp_path)
    tracker = accelerator.get_tracker("jsonl")
    tracker.store_init_configuration({"epochs": 3})
    tracker.log({"loss": 0.5})
    tracker.log_table("cells", data=[["n"], [1]])
    tracker.log_images({"x": np.zeros((1, 4, 4, 3))}, 1, dataformats="NHWC")
    with pytest.raises(ValueError, match="the axes of images are CHW or HWC"):
        tracker.log_images({"x": np.zeros((4, 3, 4))}, 1, dataformats="WCH")
    assert (tracker.name, tracker.run_name) == ("jsonl", "digits")
    accelerator.end_training()
    assert loggers.read_jsonl(tmp_path / "metrics.jsonl")[0]["values"] == {"loss": 0.5}


def test_a_class_is_made_with_keywords(tmp_path):
    assert tracking("WandBTracker")(run_name="digits").run_name == "digits"
    kind = tracking("TensorBoardTracker")(run_name="digits", logging_dir=tmp_path)
    assert kind.logging_dir == str(tmp_path / "digits")


def test_a_call_of_one_tracker_reaches_no_other(tmp_path):
    own = Everything()
    accelerator = started(["jsonl", "csv", own], tmp_path)
    accelerator.get_tracker("csv").log({"only": 1.0}, step=1)
    accelerator.end_training()
    assert own.calls == []
    assert loggers.read_jsonl(tmp_path / "metrics.jsonl") == []
    assert "only" in (tmp_path / "metrics.csv").read_text()


def test_trackers_of_an_accelerator_without_any_do_nothing(tmp_path):
    accelerator = resolve("accelerate", "Accelerator")(cpu=True)
    tracker = accelerator.get_tracker("wandb")
    tracker.log({"loss": 1.0})
    tracker.log_images({}, dataformats="NHWC")
    assert accelerator.trackers == []
    later = resolve("accelerate", "Accelerator")(
        cpu=True, log_with="jsonl", project_dir=str(tmp_path)
    )
    assert later.get_tracker("jsonl").name == "jsonl"
    with pytest.raises(ValueError, match="no tracker 'wandb'"):
        later.get_tracker("wandb")
    later.end_training()


# --- tools that are not installed here: what they are called with ------------------------------


class Called:
    """An object of a tool that keeps its calls."""

    def __init__(self, **attributes) -> None:
        self.calls: list = []
        self.__dict__.update(attributes)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def test_a_live_of_the_script_is_that_of_the_tracker(monkeypatch, tmp_path):
    live = Called(summary={}, dir=str(tmp_path))
    monkeypatch.setitem(sys.modules, "dvclive", types.ModuleType("dvclive"))
    tracker = tracking("DVCLiveTracker")("digits", live=live)
    tracker.start()
    assert tracker.live is live
    tracker.log({"loss": 0.5}, step=3, plot=False)
    tracker.finish()
    assert ("log_metric", ("loss", 0.5), {"timestamp": False, "plot": False}) in live.calls
    assert live.calls[-1][0] == "end"


class _Client(Called):
    tracking_uri = "http://nowhere"

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name)

    def create_run(self, experiment, run_name, tags):
        self.calls.append(("create_run", (experiment, run_name), tags))
        return self.get_run("r1")

    def get_run(self, run_id):
        return types.SimpleNamespace(
            info=types.SimpleNamespace(run_id=run_id), data=types.SimpleNamespace(params={})
        )


@pytest.fixture
def mlflow(monkeypatch):
    """A package with what the tracker calls; it has a run that is active."""
    client, package = _Client(), types.ModuleType("mlflow")
    package.MlflowClient = lambda tracking_uri: client
    package.is_tracking_uri_set = lambda: True
    package.active_run = lambda: client.get_run("parent")
    package.client = client
    entities = types.ModuleType("mlflow.entities")
    entities.Metric = entities.Param = entities.RunTag = lambda *values: values
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return package


def test_the_tracker_of_mlflow_is_called_as_that_of_accelerate(monkeypatch, mlflow, tmp_path):
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "vision"}')
    options = {"run_name": "first", "logging_dir": str(tmp_path), "nested_run": True}
    accelerator = started("mlflow", tmp_path, init_kwargs={"mlflow": options})
    tracker = accelerator.get_tracker("mlflow")
    assert isinstance(tracker, tracking("MLflowTracker"))
    assert tracker.active_run.info.run_id == tracker.run_id == "r1"
    assert accelerator.get_tracker("mlflow", unwrap=True).info.run_id == "r1"
    assert (tracker.experiment_name, tracker.description) == ("digits", None)
    assert tracker.tags == {"team": "vision", "mlflow.parentRunId": "parent"}
    tracker.log({"loss": 0.5}, step=3, synchronous=True)
    tracker.log_figure("figure", "plots/figure.png")
    tracker.log_artifact("a.txt")
    tracker.log_artifacts("folder", artifact_path="files")
    accelerator.end_training()
    calls = mlflow.client.calls
    assert calls[0] == ("create_run", ("digits", "first"), tracker.tags)
    assert ("log_figure", ("r1", "figure", "plots/figure.png"), {}) in calls
    assert ("log_artifact", ("r1", "a.txt", None), {}) in calls
    assert ("log_artifacts", ("r1", "folder", "files"), {}) in calls
    (metric,) = next(kwargs["metrics"] for name, _, kwargs in calls if kwargs.get("metrics"))
    assert (metric[0], metric[1], metric[3]) == ("loss", 0.5, 3)


def test_a_tracker_of_mlflow_by_class_takes_the_arguments_of_accelerate(mlflow):
    tracker = tracking("MLflowTracker")("digits", run_name="first", tags='{"a": "b"}')
    assert (tracker.experiment_name, tracker.run_name) == ("digits", "first")
    assert tracker.tags == {"a": "b"}
    tracker.start()
    assert tracker.active_run.info.run_id == "r1"
    tracker.finish()
    assert mlflow.client.calls[0] == ("create_run", ("digits", "first"), {"a": "b"})


class Text(str):
    pass


def test_an_object_of_swanlab_goes_to_swanlab_with_the_keywords_of_its_log(monkeypatch, tmp_path):
    class Picture:
        __module__ = "swanlab.data"

        def __init__(self, pixels) -> None:
            self.pixels = pixels

    run = Called(id="r1", alive=True, config={})
    package = types.ModuleType("swanlab")
    package.Text, package.Image = Text, Picture
    package.has_run, package.get_run = (lambda: True), (lambda: run)
    monkeypatch.setitem(sys.modules, "swanlab", package)
    accelerator = started("swanlab", tmp_path, config={"lr": 0.1})
    accelerator.log({"picture": Picture(1), "loss": 0.5}, step=2)
    tracker = accelerator.get_tracker("swanlab")
    tracker.log({"loss": 0.25}, step=3, print_to_console=True)
    tracker.log_images({"drawn": [1, 2]}, step=4)
    accelerator.end_training()
    assert isinstance(tracker, tracking("SwanLabTracker"))
    assert tracker.run_name == "digits"
    logged = [(args[0], kwargs) for name, args, kwargs in run.calls if name == "log"]
    assert logged[0] == ({"loss": 0.5}, {"step": 2})
    assert list(logged[1][0]) == ["picture"]
    assert logged[2] == ({"loss": 0.25}, {"step": 3, "print_to_console": True})
    assert [picture.pixels for picture in logged[3][0]["drawn"]] == [1, 2]


# --- two processes ----------------------------------------------------------------------------


def use_trackers(folder: str) -> tuple[list[str], str]:
    accelerator = resolve("accelerate", "Accelerator")(
        cpu=True,
        log_with="tensorboard",
        project_dir=folder,
        kwargs_handlers=[accel_callbacks.InitProcessGroupKwargs(timeout=BOUND)],
    )
    accelerator.init_trackers("digits", config=argparse.Namespace(lr=0.1))
    tracker = accelerator.get_tracker("tensorboard")
    tracker.log_images({"x": np.zeros((1, 4, 4, 3))}, 1, dataformats="NHWC")
    tracker.writer.add_scalar("loss", 0.5, 1)
    accelerator.log({"list": torch.ones(1)}, step=1)
    names = [each.name for each in accelerator.trackers]
    accelerator.end_training()
    return names, tracker.run_name


@pytest.mark.distributed
def test_trackers_on_the_process_that_does_not_log_do_nothing(pool, tmp_path):
    (first, name), (second, _) = pool.run(use_trackers, str(tmp_path))
    assert (first, name, second) == (["tensorboard"], "digits", [])
    assert len(list(tmp_path.rglob("events*"))) == 1
