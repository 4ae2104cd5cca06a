"""Which line a warning names, and what a killed run leaves to say."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint, EarlyStopping, configured
from loggers import CSVTracker, RunInfo, TrackerHub
from tests.support import warm

TRAIN = """
import os, signal, sys, torch
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint

folder, fatal = sys.argv[1], int(sys.argv[2])
rename = os.replace

def rename_or_die(source, target):
    if f"step-{fatal:08d}" in os.fspath(target):
        os.kill(os.getpid(), signal.SIGKILL)  # the files are written, and nothing is committed
    rename(source, target)

os.replace = rename_or_die
saver = Checkpoint(every_n_steps=2, keep_last=2, async_save=False)
accel = Accelerator(cpu=True, project_dir=folder, callbacks=[saver])
model = torch.nn.Linear(1, 1)
loader = torch.utils.data.DataLoader(torch.ones(8, 1))
model, optimizer, loader = accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
with accel.run("fit") as run:
    for _ in run.epochs(1):
        for batch in loader:
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_resume_after_a_kill_skips_the_unfinished_checkpoint_with_one_line(tmp_path):
    command = [sys.executable, "-c", TRAIN, str(tmp_path)]
    killed = warm.run([*command, "4"], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL
    resumed = warm.run([*command, "0"], capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    lines = resumed.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("[accel] skipped step-00000004: ")
    assert "never finished" in lines[0]
    assert lines[1].startswith("[accel] resumed from ")
    assert "step-00000002" in lines[1]


def test_a_library_user_gets_the_skip_as_a_warning_or_as_asked(tmp_path):
    def folder(**options) -> checkpoint_io.CheckpointFolder:
        return checkpoint_io.CheckpointFolder(tmp_path, **options)

    for step in (1, 2, 3):
        folder().save(step, {"w": torch.ones(3)}, metadata={"run_id": "r"})
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    damaged = next((tmp_path / "step-00000002").glob("tensors-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.warns(checkpoint_io.CheckpointWarning) as caught:
        folder().load_latest()
    assert [w.filename for w in caught] == [__file__] * 2
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder(on_warning=told.append).load_latest()
    assert [text.partition(":")[0] for text in told] == [
        "skipped step-00000003",
        f"passed over {tmp_path / 'step-00000002'}",
    ]


# --- a set of warnings from all over the packages ---------------------------------------------


class Broken(Callback):
    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        raise RuntimeError("broken")


def loop(accel):
    loader = accel.prepare(torch.utils.data.DataLoader(torch.ones(2, 1)))
    with accel.run("warns") as run:
        for _ in run.epochs(1):
            for _ in loader:
                pass


def a_hook_that_fails(folder):
    loop(Accelerator(cpu=True, callbacks=[configured(Broken(), on_error="disable")]))


def a_metric_that_is_missing(folder):
    accel = Accelerator(cpu=True, callbacks=[EarlyStopping("loss")])
    train, _ = accel.prepare(*(torch.utils.data.DataLoader(torch.ones(2, 1)) for _ in range(2)))
    with accel.run("warns") as run:
        for _ in run.epochs(1):  # without a validation, after which it could be logged
            for _ in train:
                pass


def a_save_that_fails(folder):
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-00000000").write_text("in the way")
    saver = Checkpoint(every_n_epochs=1, when_failed="warn", async_save=False)
    loop(Accelerator(cpu=True, project_dir=folder, callbacks=[saver]))


def trackers_that_are_started_twice(folder):
    accel = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
    try:
        accel.init_trackers("a")
        accel.init_trackers("b")
    finally:
        accel.end_training()


def weights_that_are_missing(folder):
    from accel_callbacks import load_checkpoint_in_model

    torch.save({"weight": torch.ones(1, 1)}, folder / "model.bin")
    load_checkpoint_in_model(torch.nn.Linear(1, 1), folder / "model.bin", strict=False)


def a_value_that_no_tracker_takes(folder):
    run = RunInfo("warns", os.fspath(folder), "a1")
    with TrackerHub([CSVTracker()], run=run) as hub:
        hub.log({"x": None, "loss": 0.5}, 1)


def a_kind_of_media_that_no_tracker_takes(folder):
    accel = Accelerator(cpu=True, log_with="csv", project_dir=folder)
    try:
        accel.log({"loss": 0.5})
        accel.log_text({"note": "words"})
    finally:
        accel.end_training()


def a_checkpoint_that_is_skipped(folder):
    checkpoints = checkpoint_io.CheckpointFolder(folder)
    checkpoints.save(1, {"w": torch.ones(3)})
    (folder / "step-00000001" / "manifest.json").unlink()
    checkpoints.list()


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (a_hook_that_fails, "Broken.on_train_batch_end failed"),
        (a_metric_that_is_missing, "loss"),
        (a_save_that_fails, "training continues"),
        (trackers_that_are_started_twice, "init_trackers after"),
        (weights_that_are_missing, "model.bin"),
        (a_value_that_no_tracker_takes, "None"),
        (a_kind_of_media_that_no_tracker_takes, "csv"),
        (a_checkpoint_that_is_skipped, "skipped step-00000001"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_warning_names_the_line_of_the_user(tmp_path, cause, text):
    with pytest.warns(UserWarning, match=text) as caught:
        cause(tmp_path)
    for warning in caught:
        assert Path(warning.filename) == Path(__file__), warning


def test_a_warning_without_a_line_of_the_user_names_none_of_ours():
    import threading

    from checkpoint_io.warning import warn

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warn, args=("on a thread",))
        thread.start()
        thread.join()
    assert [(one.filename, str(one.message)) for one in caught] in (
        [("sys", "on a thread")],
        [("<sys>", "on a thread")],  # from Python 3.12
    )
