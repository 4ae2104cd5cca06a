"""Scripts and trackers written for Hugging Face Accelerate, with only the import line changed."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.tracking.trackers import GeneralTracker, on_main_process
from accel_callbacks.utils import LoggerType
from loggers import read_jsonl


class FileTracker(GeneralTracker):
    """As the documentation of Accelerate shows how to write one."""

    name = "file"
    requires_logging_directory = True

    @on_main_process
    def __init__(self, run_name: str, logging_dir, suffix: str = "log"):
        super().__init__()
        self.run_name = run_name
        self.path = os.path.join(logging_dir, f"{run_name}.{suffix}")
        self.lines: list[str] = []

    @on_main_process
    def start(self):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.file = open(self.path, "w")  # noqa: SIM115

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def store_init_configuration(self, values: dict):
        self.file.write(f"config {values}\n")

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs):
        self.file.write(f"{step} {values} {kwargs}\n")

    @on_main_process
    def log_images(self, values: dict, step: int | None = None, **kwargs):
        shapes = {name: np.shape(value) for name, value in values.items()}
        self.file.write(f"{step} {shapes} {kwargs}\n")

    @on_main_process
    def log_table(self, table_name, columns=None, data=None, dataframe=None, step=None, **kwargs):
        self.file.write(f"{step} {table_name} {columns} {data}\n")

    @on_main_process
    def finish(self):
        self.file.write("finished\n")
        self.file.close()


EXPECTED = [
    "config {'lr': 0.1}",
    "0 {'loss': 0.5} {}",
    "1 {'loss': 0.25} {'note': 'x'}",
    "1 {'digit': (2, 4, 4, 1)} {'dataformats': 'NHWC'}",
    "2 wrong ['image', 'label'] [[7, 'nine']]",
    "finished",
]


def script(accel: Accelerator) -> None:
    """The calls of a script that was written for Accelerate."""
    accel.log({"loss": torch.tensor(0.5)}, step=0)
    accel.log({"loss": 0.25}, step=1, log_kwargs={"file": {"note": "x"}})
    images = {"digit": np.zeros((2, 4, 4, 1))}
    accel.log_images(images, step=1, log_kwargs={"file": {"dataformats": "NHWC"}})
    accel.log_table("wrong", columns=["image", "label"], data=[[7, "nine"]], step=2)
    accel.end_training()


def test_an_instance_runs_unchanged(tmp_path):
    tracker = FileTracker("digits", tmp_path)
    accel = Accelerator(cpu=True, log_with=tracker)
    accel.init_trackers("digits", config={"lr": 0.1})
    assert accel.get_tracker("file") is tracker
    assert accel.trackers == [tracker]
    assert accel.get_tracker("file", unwrap=True) is tracker.file
    script(accel)
    assert (tmp_path / "digits.log").read_text().splitlines() == EXPECTED


def test_a_class_is_made_with_the_name_the_folder_and_its_options(tmp_path):
    accel = Accelerator(cpu=True, log_with=["jsonl", FileTracker], project_dir=tmp_path)
    kwargs = {"file": {"suffix": "txt"}, "jsonl": {"filename": "all.jsonl"}}
    accel.init_trackers("digits", config={"lr": 0.1}, init_kwargs=kwargs)
    assert isinstance(accel.get_tracker("file"), FileTracker)
    script(accel)
    assert (tmp_path / "digits.txt").read_text().splitlines() == EXPECTED
    assert [row["step"] for row in read_jsonl(tmp_path / "all.jsonl")] == [0, 1]


def test_without_a_folder_and_with_every_value_on_the_host():
    seen = []

    class Kept(GeneralTracker):
        name, requires_logging_directory = "kept", False

        def __init__(self, run_name: str, **kwargs):
            super().__init__()
            seen.append((run_name, kwargs))

        @property
        def tracker(self):
            return seen

        def log(self, values, step=None, **kwargs):
            seen.append((step, {name: type(value) for name, value in values.items()}))

    accel = Accelerator(cpu=True, log_with=Kept)
    accel.init_trackers("digits", init_kwargs={"kept": {"entity": "me"}})
    accel.log({"a": torch.tensor(1), "b": {"c": np.float32(1)}, "d": "text"})
    accel.end_training()
    assert seen == [("digits", {"entity": "me"}), (0, {"a": int, "b/c": float, "d": str})]


def test_a_tracker_that_fails_costs_the_run_nothing(tmp_path):
    class Broken(FileTracker):
        name = "broken"

        def log(self, values, step=None, **kwargs):
            raise ConnectionError("no network")

    accel = Accelerator(cpu=True, log_with=[Broken, "jsonl"], project_dir=tmp_path)
    accel.log({"a": 1})
    accel.end_training()
    assert [row["values"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [{"a": 1}]


def test_names_that_are_wrong_are_errors_with_the_nearest(tmp_path):
    accel = Accelerator(cpu=True, log_with=["jsonl"], project_dir=tmp_path)
    with pytest.raises(ValueError, match=r"'json', which log_with has not.*Did you mean 'jsonl'"):
        accel.init_trackers("digits", init_kwargs={"json": {}})
    accel.init_trackers("digits")
    with pytest.raises(ValueError, match="'wandb'"):
        accel.log({"a": 1}, log_kwargs={"wandb": {}})
    with pytest.warns(UserWarning, match="only the config is recorded"):
        accel.init_trackers("again", {"lr": 0.1})
    accel.end_training()
    with pytest.raises(TypeError, match="is an instance already"):
        Accelerator(cpu=True, log_with=FileTracker("a", tmp_path)).init_trackers(
            "digits", init_kwargs={"file": {"suffix": "txt"}}
        )


def test_what_a_general_tracker_must_have():
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(TypeError, match="Half lacks requires_logging_directory, tracker"):
        Half()
    assert GeneralTracker(_blank=True).finish() is None


def test_types_of_trackers_are_names(tmp_path):
    accel = Accelerator(
        cpu=True, log_with=[LoggerType.JSONL, "jsonl", LoggerType.CSV], project_dir=tmp_path
    )
    assert accel.log_with == ["jsonl", "jsonl", "csv"]
    accel.log({"a": 1})
    assert [tracker.name for tracker in accel.trackers] == ["jsonl", "csv"]
    accel.end_training()


def test_all_are_those_whose_tool_is_installed(tmp_path, monkeypatch):
    import loggers.registry
    from accel_callbacks.tracking.trackers import chosen_trackers

    monkeypatch.setattr(
        loggers.registry.importlib.util,
        "find_spec",
        lambda name: None if name == "wandb" else object(),
    )
    own = FileTracker("a", tmp_path)
    names = [one.tracker if isinstance(one.tracker, str) else one.tracker.name
             for one in chosen_trackers([LoggerType.ALL, own], {})]  # fmt: skip
    assert names[0] == "file"
    assert {"jsonl", "csv", "tensorboard"} < set(names)
    assert "wandb" not in names


def test_names_that_accelerate_gives_are_kept():
    from accel_callbacks.tracking.trackers import chosen_trackers

    (choice,) = chosen_trackers([LoggerType.COMETML], {"comet_ml": {"project_name": "digits"}})
    assert (choice.tracker, choice.label) == ("comet", "comet_ml")
    assert choice.create().name == "comet_ml"
