from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_writer_thread_that_dies_does_not_stop_the_run(
    run_info: Callable[..., RunInfo], caplog: pytest.LogCaptureFixture
) -> None:
    hub = TrackerHub(["tensorboard", "jsonl"], run=run_info(), flush_every_s=0.0)
    hub.start()
    recorder = hub.get("tensorboard").raw.file_writer.event_writer._async_writer._writer

    def fail(*args: Any) -> None:
        raise OSError("no space left")

    recorder.write = fail
    for step in range(30):
        hub.log({"a": step}, step)
    hub.finish()
    assert hub.report()["tensorboard"].disabled
    assert hub.report()["jsonl"].rows == 30
    assert "no space left" in caplog.text
