"""The built-in callbacks in real runs: EarlyStopping, Checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import fsspec
import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint, EarlyStopping

# --- EarlyStopping ----------------------------------------------------------------------------


def epochs_run(values: list, *callbacks: Callback, **options) -> tuple[int, str | None]:
    """How many epochs a run goes that logs these values, one an epoch, and why it stopped."""
    stopper = EarlyStopping("val", **options)
    accel = Accelerator(cpu=True, callbacks=[stopper, *callbacks])
    count = 0
    with accel.run("stop") as run:
        for epoch in run.epochs(len(values)):
            accel.log({"other": 0.0})
            accel.log({"val": values[epoch]})
            count += 1
    return count, run.stop_reason


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([3, 2, 1, 2, 2, 2, 2, 2], {"patience": 3}, 6),
        ([1, 2, 3, 2, 2, 2, 2], {"patience": 2, "mode": "max"}, 5),
        ([1, 1, 1, 1], {"patience": 1}, 2),
        ([3, 2.9, 2.8, 2.7, 2.6], {"patience": 2, "min_delta": 0.5}, 3),
        ([3, 2.4, 1.8, 1.2], {"patience": 1, "min_delta": 0.5}, 4),
        ([2, 1, 2, 1], {"patience": 0}, 3),
        ([3, 2, 1], {"patience": 0}, 3),
        ([1, math.inf, 0, 0], {"patience": 3}, 2),
        ([1, -math.inf, 0, 0], {"patience": 3, "mode": "max"}, 2),
        ([1, math.nan, 0.5, 0.4], {"patience": 2, "check_finite": False}, 4),
        ([1, math.nan, math.nan, 0], {"patience": 2, "check_finite": False}, 3),
        ([torch.tensor(1.0), torch.tensor(2.0), torch.tensor([3.0]).sum(), 0], {"patience": 2}, 3),
    ],
)
def test_early_stopping_stops_after_patience_checks(values, options, epochs):
    count, reason = epochs_run(values, **options)
    assert count == epochs
    assert (reason is None) == (epochs == len(values))


def test_not_a_number_stops_at_once_and_says_so():
    assert epochs_run([math.nan, 1.0]) == (1, "val is nan")


@pytest.mark.parametrize("value", [math.nan, -math.nan])
def test_only_not_a_numbers_stop_with_a_reason_too(value):
    count, reason = epochs_run([value] * 5, patience=2, check_finite=False)
    assert count == 2
    assert reason


@pytest.mark.parametrize(
    ("options", "says"),
    [({"patience": -1}, "patience"), ({"mode": "up"}, "mode"), ({"min_delta": -1}, "min_delta")],
)
def test_bad_options_of_early_stopping_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        EarlyStopping("val", **options)


def test_a_stop_in_the_middle_of_an_epoch_ends_the_plain_loop_at_that_batch():
    accel = Accelerator(cpu=True, callbacks=[EarlyStopping("loss", patience=1)])
    loader = accel.prepare(torch.utils.data.DataLoader(range(10)))
    seen = []
    for batch in loader:
        accel.log({"loss": 1.0})
        seen.append(batch.item())
    assert seen == [0, 1]
    assert accel.current_run.should_stop
    assert list(loader) == []


def test_the_state_of_early_stopping_goes_through_a_checkpoint():
    first = EarlyStopping("val", patience=3)
    accel = Accelerator(cpu=True, callbacks=[first])
    for value in (2.0, 1.0, 1.5):
        accel.log({"val": value})
    accel.save_state("memory://early")
    second = EarlyStopping("val", patience=3)
    Accelerator(cpu=True, callbacks=[second]).load_state("memory://early")
    assert (second.best, second.wait_count, second.stop_reason) == (1.0, 1, None)


def stopping_run(folder: Path, patience: int) -> list[int]:
    """The epochs that a run goes with a value that never improves."""
    stopper = EarlyStopping("val", patience=patience)
    accel = Accelerator(cpu=True, callbacks=[stopper, Checkpoint(folder)])
    epochs = []
    with accel.run("stop") as run:
        for epoch in run.epochs(8):
            epochs.append(epoch)
            accel.log({"val": 1.0})
    return epochs


def test_a_run_that_was_stopped_stays_stopped_when_it_is_resumed(tmp_path):
    assert stopping_run(tmp_path, patience=2) == [0, 1, 2]
    assert stopping_run(tmp_path, patience=2) == []


def test_more_patience_lets_a_stopped_run_go_on(tmp_path):
    assert stopping_run(tmp_path, patience=2) == [0, 1, 2]
    assert stopping_run(tmp_path, patience=4) == [3, 4]


# --- Checkpoint -------------------------------------------------------------------------------


def fit(
    *callbacks: Callback,
    epochs: int = 3,
    window: int = 1,
    batches: int = 4,
    scores: list[float] | None = None,
    resume: bool = True,
) -> Accelerator:
    """Train a scalar; logs one of ``scores`` at the end of each epoch."""
    accel = Accelerator(cpu=True, gradient_accumulation_steps=window, callbacks=callbacks)
    weight = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(batches, 1))
    model, optimizer, loader = accel.prepare(weight, optimizer, loader)
    with accel.run("fit", resume=resume) as run:
        for epoch in run.epochs(epochs):
            for batch in loader:
                with accel.accumulate(model):
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            if scores is not None:
                accel.log({"val": scores[epoch]})
    return accel


class Written(Callback):
    """Notes each checkpoint in the order of writing."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_checkpoint_saved(self, run, model, path):
        self.steps.append(int(path.rsplit("-", 1)[1]))


def kept(folder: str | Path) -> list[int]:
    return [
        int(e.name.removeprefix("step-")) for e in checkpoint_io.CheckpointFolder(folder).list()
    ]


@pytest.mark.parametrize(
    ("options", "window", "steps"),
    [
        ({"every_n_steps": 2}, 1, [2, 4, 6, 8, 8]),
        ({"every_n_steps": 3}, 1, [3, 6, 8]),
        ({"every_n_steps": 1}, 4, [1, 2, 2]),
        ({"every_n_steps": 1}, 3, [1, 2, 3, 4, 4]),
        ({"every_n_epochs": 1}, 1, [4, 8]),
        ({"every_n_epochs": 2}, 1, [8]),
        ({"every_n_steps": 3, "every_n_epochs": 1}, 1, [3, 4, 6, 8]),
        ({}, 1, [4, 8]),
    ],
)
def test_saves_come_at_their_intervals_and_at_the_end(tmp_path, options, window, steps):
    written = Written()
    fit(Checkpoint(tmp_path, **options), written, epochs=2, window=window)
    assert written.steps == steps


def test_the_newest_are_kept(tmp_path):
    saver = Checkpoint(tmp_path, every_n_steps=1, keep_last=2)
    fit(saver)
    assert kept(tmp_path) == [11, 12]
    assert saver.last_path == str(tmp_path / "step-00000012")


def test_keep_last_none_keeps_all(tmp_path):
    fit(Checkpoint(tmp_path, every_n_steps=1, keep_last=None))
    assert kept(tmp_path) == list(range(1, 13))


@pytest.mark.parametrize("name", ["every_n_steps", "every_n_epochs", "keep_last", "keep_best"])
def test_nothing_to_keep_or_an_interval_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=name):
        Checkpoint("c", **{name: 0})


def test_only_an_improved_metric_saves(tmp_path):
    written = Written()
    saver = Checkpoint(tmp_path, monitor="val", keep_last=None)
    fit(saver, written, epochs=4, scores=[3.0, 1.0, 2.0, 0.5])
    assert written.steps == [4, 8, 16]
    assert saver.best_path == str(tmp_path / "step-00000016")


@pytest.mark.parametrize(
    ("mode", "scores", "best"),
    [
        ("min", [3.0, 1.0, 2.0, 2.0, 2.0], 8),
        ("max", [3.0, 9.0, 2.0, 2.0, 2.0], 8),
        ("min", [1.0, 3.0, 2.0, 2.0, 2.0], 4),
        ("min", [math.nan, 1.0, 3.0, 2.0, 2.0], 8),
        ("max", [math.nan, 9.0, 3.0, 2.0, 2.0], 8),
        ("min", [1.0, 3.0, math.nan, 2.0, 2.0], 4),
    ],
)
@pytest.mark.filterwarnings("ignore::checkpoint_io.CheckpointWarning")
def test_the_best_is_kept_besides_the_newest(tmp_path, mode, scores, best):
    saver = Checkpoint(tmp_path, every_n_epochs=1, keep_last=1, monitor="val", mode=mode)
    fit(saver, epochs=5, scores=scores)
    assert kept(tmp_path) == [best, 20]
    assert saver.best_path == str(tmp_path / f"step-{best:08d}")


def test_two_best_are_kept(tmp_path):
    saver = Checkpoint(tmp_path, every_n_epochs=1, keep_last=1, monitor="val", keep_best=2)
    fit(saver, epochs=5, scores=[1.0, 5.0, 2.0, 3.0, 4.0])
    assert kept(tmp_path) == [4, 12, 20]


def test_the_best_survives_a_resume(tmp_path):
    def saver() -> Checkpoint:
        return Checkpoint(tmp_path, every_n_epochs=1, keep_last=1, monitor="val")

    scores = [1.0, 5.0, 5.0, 5.0]
    fit(saver(), epochs=2, scores=scores)
    resumed = saver()
    fit(resumed, epochs=4, scores=scores)
    assert kept(tmp_path) == [4, 8, 16]  # the best, the one resumed from, the newest
    assert resumed.best_path == str(tmp_path / "step-00000004")


def test_a_step_saved_twice_does_not_lose_that_it_was_the_best(tmp_path):
    """A score logged in the loop's body, a save after it, and one at the end of the epoch."""
    saver = Checkpoint(
        tmp_path, every_n_steps=4, every_n_epochs=1, keep_last=1, monitor="val", keep_best=1
    )
    accel = Accelerator(cpu=True, callbacks=[saver])
    weight = torch.nn.Linear(1, 1)
    model, optimizer, loader = accel.prepare(
        weight,
        torch.optim.SGD(weight.parameters(), lr=0.1),
        torch.utils.data.DataLoader(torch.ones(4, 1)),
    )
    with accel.run("twice") as run:
        for epoch in run.epochs(3):
            for index, batch in enumerate(loader):
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                if index == 3:
                    accel.log({"val": [1.0, 2.0, 3.0][epoch]})
    assert saver.best_path == str(tmp_path / "step-00000004")
    assert kept(tmp_path) == [4, 12]


def test_the_checkpoints_of_another_run_are_left_alone(tmp_path):
    fit(Checkpoint(tmp_path, every_n_steps=1, keep_last=None), epochs=1, batches=3)
    fit(Checkpoint(tmp_path, every_n_epochs=1, keep_last=1), epochs=3, resume=False)
    assert kept(tmp_path)[-1] == 12
    assert set(kept(tmp_path)) == {1, 2, 3, 12}


def test_a_resumed_run_saves_on_and_its_generations_count_on(tmp_path):
    fit(Checkpoint(tmp_path, every_n_steps=2, keep_last=None), epochs=1)
    accel = fit(Checkpoint(tmp_path, every_n_steps=2, keep_last=None), epochs=2)
    assert accel.current_run.global_step == 8
    entries = checkpoint_io.CheckpointFolder(tmp_path).list()
    assert [e.name for e in entries] == [f"step-{n:08d}" for n in (2, 4, 6, 8)]
    generations = [e.manifest.generation for e in entries]
    assert generations == sorted(set(generations))


def test_going_back_to_an_older_checkpoint_makes_what_is_saved_then_the_newest(tmp_path):
    first = fit(Checkpoint(tmp_path, every_n_steps=1, keep_last=None), epochs=1)
    saver = Checkpoint(tmp_path, every_n_steps=1, keep_last=None)
    accel = Accelerator(cpu=True, callbacks=[saver])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 1))
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    with accel.run("again", resume=str(tmp_path / "step-00000001")) as run:
        assert run.global_step == 1
        assert run.run_id == first.current_run.run_id
        for batch in loader:
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            break
    newest = checkpoint_io.CheckpointFolder(tmp_path).latest()
    assert newest.name == "step-00000002"


def test_a_finished_run_that_is_started_again_does_nothing(tmp_path):
    fit(Checkpoint(tmp_path), epochs=2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("[!.]*")}
    written = Written()
    fit(Checkpoint(tmp_path), written, epochs=2)
    assert written.steps == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("[!.]*")} == before


def test_resume_false_starts_afresh(tmp_path):
    fit(Checkpoint(tmp_path), epochs=2)
    assert fit(Checkpoint(tmp_path), epochs=1, resume=False).current_run.global_step == 4


def test_checkpoints_on_memory():
    fit(Checkpoint("memory://callbacks/c", every_n_steps=1, keep_last=2), epochs=1)
    assert kept("memory://callbacks/c") == [3, 4]
    accel = fit(Checkpoint("memory://callbacks/c", every_n_steps=1, keep_last=2), epochs=2)
    assert accel.current_run.resumed_from == "memory://callbacks/c/step-00000004"
    assert kept("memory://callbacks/c") == [4, 7, 8]  # with the one resumed from
    fsspec.filesystem("memory").rm("/callbacks", recursive=True)


@pytest.mark.parametrize("where", ["callback", "project"])
def test_the_root_of_a_store_is_a_folder_of_checkpoints_too(where):
    saver = Checkpoint("memory://" if where == "callback" else None)
    project = {} if where == "callback" else {"project_dir": "memory://"}
    accel = Accelerator(cpu=True, callbacks=[saver], **project)
    accel.prepare(torch.nn.Linear(1, 1))
    with accel.run("root", resume=False) as run:
        for _ in run.epochs(1):
            pass
    folder = "memory://" if where == "callback" else "memory://checkpoints/"
    try:
        assert saver.last_path == f"{folder}step-00000000"
        assert checkpoint_io.read_manifest(saver.last_path).metadata["step"] == 0
    finally:
        for name in ("step-00000000", "checkpoints"):
            if fsspec.filesystem("memory").exists(f"/{name}"):
                fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def test_an_error_of_a_stores_driver_while_old_checkpoints_go_is_a_warning(tmp_path, monkeypatch):
    def unreachable(self, *args, **kwargs):  # drivers raise what their clients raise
        raise RuntimeError("could not connect to the endpoint")

    monkeypatch.setattr(checkpoint_io.CheckpointFolder, "prune", unreachable)
    with pytest.warns(UserWarning, match="not removed: RuntimeError: could not connect"):
        fit(Checkpoint(tmp_path, every_n_steps=1, keep_last=1), epochs=1)
    assert kept(tmp_path) == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore::checkpoint_io.CheckpointWarning")
def test_a_write_that_fails_ends_the_run_and_keeps_the_older_checkpoints(tmp_path):
    (tmp_path / "step-00000003").write_text("in the way")
    saver = Checkpoint(tmp_path, every_n_steps=1, keep_last=1)
    with pytest.raises((checkpoint_io.CheckpointError, OSError)):
        fit(saver)
    assert kept(tmp_path) == [2]
    assert saver.last_path == str(tmp_path / "step-00000002")


def test_a_plain_loop_saves_in_the_project_and_at_its_end(tmp_path):
    saver = Checkpoint(every_n_steps=2)
    accel = Accelerator(cpu=True, project_dir=tmp_path, callbacks=[saver])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(3, 1))
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    for batch in loader:
        accel.backward(model(batch).sum())
        optimizer.step()
    accel.end_training()
    assert kept(tmp_path / "checkpoints") == [2, 3]


def test_an_error_in_the_loop_saves_nothing_more(tmp_path):
    class Fail(Callback):
        def on_after_optimizer_step(self, run, model, optimizer):
            if run.global_step == 3:
                raise ValueError("bad step")

    with pytest.raises(ValueError, match="bad step"):
        fit(Checkpoint(tmp_path, every_n_steps=2), Fail())
    assert kept(tmp_path) == [2]


def test_two_checkpoint_callbacks_of_one_run(tmp_path):
    often = Checkpoint(tmp_path / "often", every_n_steps=1, keep_last=1)
    rarely = Checkpoint(tmp_path / "rarely", every_n_epochs=1, keep_last=None)
    fit(often, rarely, epochs=2)
    assert kept(tmp_path / "often") == [8]
    assert kept(tmp_path / "rarely") == [4, 8]


def test_a_nested_metric_is_watched_by_its_flat_name(tmp_path):
    stopper = EarlyStopping("val/loss", patience=1)
    accel = Accelerator(cpu=True, callbacks=[stopper])
    accel.log({"val": {"loss": torch.tensor(1.0, requires_grad=True) * 2}})
    assert stopper.best == 2.0
    assert accel.current_run.callback_metrics["val/loss"] == 2.0


def test_a_second_run_of_one_accelerator_saves_its_steps_again(tmp_path):
    saver = Checkpoint(tmp_path / "c", every_n_steps=1, keep_last=None)
    accel = Accelerator(cpu=True, callbacks=[saver])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(1, 1))
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    owners = []
    for name in ("first", "second"):
        with accel.run(name, resume=False) as run:
            for batch in loader:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
        manifest = checkpoint_io.read_manifest(tmp_path / "c" / "step-00000001")
        owners.append(manifest.metadata["run_id"] == run.run_id)
    assert owners == [True, True]
