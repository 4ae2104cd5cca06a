from __future__ import annotations

import io
import itertools
import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loggers import RunInfo, TensorBoardTracker, TrackerHub


def test_config_is_text_and_hyperparameters(
    run_info: Callable[..., RunInfo], accumulator: Callable[[str], Any]
) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run = run_info()
    with TrackerHub(["tensorboard"], run=run, strict=True) as hub:
        hub.log_config({"optim": {"lr": 0.5, "betas": (0.9, 0.99)}, "on": True, "none": None})
        hub.log({"loss": 0.5}, 1)
    events = accumulator(run.logging_dir)
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"lr": 0.5' in text
    metadata = events.SummaryMetadata("_hparams_/session_start_info")
    session = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info
    assert session.hparams["optim/lr"].number_value == 0.5
    assert session.hparams["optim/betas"].string_value == "[0.9, 0.99]"
    assert session.hparams["on"].number_value == 1  # how torch writes a bool
    assert session.hparams["none"].string_value == "None"


def test_event_time_is_that_of_log(
    run_info: Callable[..., RunInfo], accumulator: Callable[[str], Any]
) -> None:
    run = run_info()
    tracker = TensorBoardTracker()
    tracker.start(run)
    tracker.log({"loss": 1.0}, 1, time=1e9)
    tracker.finish()
    assert accumulator(run.logging_dir).Scalars("loss")[0].wall_time == 1e9


def test_remote_folder_and_ranks(run_info: Callable[..., RunInfo]) -> None:
    import fsspec

    run = run_info(logging_dir="memory://tracker-test", rank=2)
    tracker = TensorBoardTracker(subdir="tb", all_ranks=True)
    with TrackerHub([tracker], run=run, main_process=False, strict=True) as hub:
        hub.log({"loss": 1.0}, 1)
        hub.flush()
        assert tracker.raw.log_dir == "memory://tracker-test/tb/rank2"
    (file,) = fsspec.filesystem("memory").glob("/tracker-test/tb/rank2/*")
    assert fsspec.filesystem("memory").size(file) > 0


class Odd:
    """An object that cannot even be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_odd_configs_and_values_do_not_stop_it(
    run_info: Callable[..., RunInfo], accumulator: Callable[[str], Any]
) -> None:
    import torch

    run, loop = run_info(), {}
    loop["self"] = loop
    config = {
        "odd": Odd(), "loop": loop, "keys": {1: {None: [Odd, {"x"}]}}, "path": Path("a"),
        "tensor": torch.ones(3), "dtype": torch.float16, "nan": math.nan, "bytes": b"x",
    }  # fmt: skip
    with TrackerHub(["tensorboard"], run=run, strict=True) as hub:
        hub.log_config(config)
        hub.log({"a b/(c)": 2**70, "inf": math.inf, "half": torch.tensor(0.5).bfloat16()}, 1)
    events = accumulator(run.logging_dir)
    assert len(events.Tags()["scalars"]) == 3
    assert "config/text_summary" in events.Tags()["tensors"]


def test_media_are_read_back(
    run_info: Callable[..., RunInfo], accumulator: Callable[[str], Any]
) -> None:
    from PIL import Image

    run = run_info()
    red = np.zeros((2, 3, 4, 3), np.uint8)
    red[..., 0] = 200
    grey = np.full((1, 5, 6, 1), 9, np.uint8)
    tracker = TensorBoardTracker()
    tracker.start(run)
    tracker.log_images({"red": red, "grey": grey}, 3, captions={"red": ["a", "b"]})
    tracker.log_video({"film": np.stack([red[0], red[0] // 2])}, 3)
    tracker.log_audio({"beep": np.zeros((100, 2)), "mono": np.zeros(50)}, 3, sample_rate=8000)
    tracker.log_histogram({"w": np.array([0, 1.5, math.nan]), "none": np.zeros(0)}, 3)
    tracker.log_text({"said": "hello"}, 3)
    tracker.log_table("hits", ["name", "n"], [["a|b", 1], [None, 2]], 3)
    tracker.log_graph("Linear(1, 2)")
    assert tracker.state_dict()["last_step"] == 3
    tracker.finish()
    events = accumulator(run.logging_dir)

    def picture(tag: str) -> Any:
        (event,) = events.Images(tag)
        image = Image.open(io.BytesIO(event.encoded_image_string))
        assert (event.step, event.width, event.height) == (3, *image.size)
        return image

    assert sorted(events.Tags()["images"]) == ["film", "grey", "red/0", "red/1"]
    assert np.array_equal(np.asarray(picture("red/1")), red[1])
    assert np.array_equal(np.asarray(picture("grey")), grey[0, :, :, 0])
    assert picture("film").n_frames == 2
    (beep,), (mono,) = events.Audio("beep"), events.Audio("mono")
    assert (beep.sample_rate, beep.length_frames, mono.length_frames) == (8000, 100, 50)
    with wave.open(io.BytesIO(beep.encoded_audio_string)) as sound:
        assert sound.getnchannels() == 2
    (weights,) = events.Histograms("w")
    assert (weights.histogram_value.num, weights.histogram_value.max) == (2, 1.5)
    assert events.Tags()["histograms"] == ["w"]
    assert [event.value for event in events.Scalars("w/non_finite")] == [1]

    def text(tag: str) -> str:
        return str(events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode())

    assert text("said") == "hello"
    assert text("hits").splitlines()[2:] == ["| a&#124;b | 1 |", "| None | 2 |"]
    assert "| 1 | b |" in text("red/captions")
    assert text("graph") == "    Linear(1, 2)"


def test_a_traced_graph(
    run_info: Callable[..., RunInfo], accumulator: Callable[[str], Any]
) -> None:
    import torch

    run, tracker = run_info(), TensorBoardTracker()
    tracker.start(run)
    tracker.log_graph(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()), torch.ones(1, 2))
    tracker.finish()
    nodes = {node.op for node in accumulator(run.logging_dir).Graph().node}
    assert {"aten::linear", "aten::relu"} <= nodes


def test_a_figure(run_info: Callable[..., RunInfo], accumulator: Callable[[str], Any]) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    canvas = figure.canvas
    run, tracker = run_info(), TensorBoardTracker()
    tracker.start(run)
    tracker.log_figure({"curve": figure}, 4)
    tracker.finish()
    assert figure.canvas is canvas
    (event,) = accumulator(run.logging_dir).Images("curve")
    assert (event.step, event.width, event.height) == (4, 100, 50)


def test_a_resume_keeps_steps_of_another_unit(
    run_info: Callable[..., RunInfo], read_tensorboard: Callable[[str], Any]
) -> None:
    state = None
    for resumed, samples in ((None, (32, 64, 96, 128)), (3, (128, 160))):
        tracker = TensorBoardTracker()
        if state:
            tracker.load_state_dict(state)
        tracker.start(run_info(resumed))
        for step in samples:
            tracker.log({"loss": 1.0}, step)
            state = tracker.state_dict() if step == 96 else state
        tracker.finish()
    rows = read_tensorboard(run_info().logging_dir)
    assert [step for step, _ in rows] == [32, 64, 96, 128, 160]


def _steps_in_store(protocol: str, folder: str, **options: Any) -> list[int]:
    """Read the steps of all events that a store has."""
    import fsspec
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    steps = []
    fs = fsspec.filesystem(protocol, **options)
    for key in fs.find(folder):
        with tempfile.NamedTemporaryFile() as local:
            local.write(fs.cat_file(key))
            local.flush()
            events = [Event.FromString(event) for event in RawEventFileLoader(local.name).Load()]
        steps += [event.step for event in events if event.summary.value]
    return steps


KILLED = """
import signal, sys
from loggers import RunInfo, TensorBoardTracker, TrackerHub

tracker = TensorBoardTracker(flush_secs=1)
hub = TrackerHub([tracker], run=RunInfo("digits", "s3://bucket/tracker", "a1"))
hub.start()
hub.log({"loss": 1.0}, 1)
hub.state_dict()
print("saved", flush=True)
hub.log({"loss": 2.0}, 2)
signal.pause()
"""


@pytest.mark.s3
def test_a_kill_loses_seconds_in_a_store(s3_environment: dict[str, Any]) -> None:
    """A checkpoint is there at once, the rest after flush_secs, with nothing that comes after."""

    def steps() -> list[int]:
        options = {**s3_environment, "use_listings_cache": False}
        return _steps_in_store("s3", "bucket/tracker/tensorboard", **options)

    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"saved\n"
        assert steps()[:1] == [1]
        while steps() != [1, 2]:
            time.sleep(0.2)
        child.send_signal(signal.SIGKILL)
    assert steps() == [1, 2]


def test_files_start_no_thread_and_a_closed_writer_opens_another(
    run_info: Callable[..., RunInfo], read_tensorboard: Callable[[str], Any]
) -> None:
    run, tracker = run_info(), TensorBoardTracker()
    before = set(threading.enumerate())
    tracker.start(run)
    tracker.log({"loss": 1.0}, 1)
    assert set(threading.enumerate()) <= before
    assert read_tensorboard(run.logging_dir) == [(1, {"loss": 1.0})]
    tracker.raw.close()
    tracker.log({"loss": 2.0}, 2)
    tracker.finish()
    assert [step for step, _ in read_tensorboard(run.logging_dir)] == [1, 2]


def test_a_store_that_is_away_for_a_while(
    run_info: Callable[..., RunInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_info(logging_dir="memory://store-away")
    hub = TrackerHub([TensorBoardTracker(flush_secs=0)], run=run)
    hub.start()
    with monkeypatch.context() as patch:

        def refuse(*args: Any) -> None:
            raise ConnectionError("the store is away")

        patch.setattr("loggers.trackers.line_file.write_object", refuse)
        hub.log({"loss": 1.0}, 1)
        hub.state_dict()  # uploads even if that is not due
    hub.log({"loss": 2.0}, 2)
    hub.finish()
    report = hub.report()["tensorboard"]
    assert report.failures > 0
    assert (report.rows, report.lost_rows) == (2, 0)
    assert _steps_in_store("memory", "/store-away/tensorboard") == [1, 2]


def test_files_of_one_second_are_read_in_the_order_of_their_starts(
    run_info: Callable[..., RunInfo],
    accumulator: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that is resumed at once writes file 10 after file 9."""
    monkeypatch.setattr("loggers.trackers.event_file._numbers", itertools.count(9))
    for resumed_step, losses in ((None, {1: 1.0, 2: 2.0}), (1, {2: 20.0, 3: 30.0})):
        tracker = TensorBoardTracker()
        tracker.start(run_info(resumed_step))
        for step, loss in losses.items():
            tracker.log({"loss": loss}, step)
        tracker.finish()
    events = accumulator(run_info().logging_dir).Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 20.0), (3, 30.0)]
