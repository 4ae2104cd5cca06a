"""What Lightning's trainer shows of itself, and the run too."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint, EarlyStopping


def stage_of(run):
    flags = (run.training, run.validating, run.testing, run.evaluating)
    return "".join(letter for letter, flag in zip("tvse", flags, strict=True) if flag)


def test_the_stage_follows_the_loop(training):
    t = training()
    run, seen = t.accel.current_run, []
    t.accel.on("train_batch_start")(lambda run: seen.append(stage_of(run)))
    list(t.train)
    for stage in ("validation", "test"):
        with t.accel.evaluate(stage=stage):
            seen.append(stage_of(run))
            assert t.accel.loop.phase == stage
            with t.accel.evaluate():
                assert stage_of(run) == "ve"
            assert t.accel.loop.phase == stage
    t.model.eval()
    seen.append(stage_of(run))
    assert seen == ["t", "t", "ve", "se", "ve"]


def test_an_unknown_stage_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"stage='tset'.*Did you mean 'test'"):
        Accelerator(cpu=True).evaluate(stage="tset")


def test_the_loaders_and_their_lengths(training):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    t = training(batches=3)
    run = t.accel.current_run
    stream = t.accel.prepare(DataLoader(Stream()))
    assert run.train_dataloader is None
    assert (run.val_dataloaders, run.test_dataloaders, run.num_val_batches) == ([], [], [])
    assert run.estimated_stepping_batches == math.inf
    last = []
    for _ in run.epochs(2):
        for batch in t.train:
            t.step(batch)
            last.append(run.is_last_batch)
        for _ in range(2):
            with t.accel.evaluate():
                list(t.val)
                list(stream)
        with t.accel.evaluate(stage="test"):
            list(t.val)
    assert last == [False, False, True] * 2
    assert run.train_dataloader is t.train
    assert run.val_dataloaders == [t.val, stream]
    assert run.test_dataloaders == [t.val]
    assert (run.num_val_batches, run.num_test_batches) == ([1, math.inf], [1])
    assert run.estimated_stepping_batches == 6
    run.accumulate_grad_batches = 2
    assert t.accel.gradient_accumulation_steps == 2
    assert (run.accumulate_grad_batches, run.estimated_stepping_batches) == (2, 4)
    t.accel.free_memory()
    assert run.train_dataloader is None


def test_callbacks_by_what_they_do(tmp_path):
    saver, stopper, other = Checkpoint(tmp_path), EarlyStopping("loss"), Callback()
    run = Accelerator(cpu=True, callbacks=[saver, stopper, other]).current_run
    assert run.callbacks == [saver, stopper, other]
    assert (run.checkpoint_callback, run.checkpoint_callbacks) == (saver, [saver])
    assert (run.early_stopping_callback, run.early_stopping_callbacks) == (stopper, [stopper])
    none = Accelerator(cpu=True).current_run
    assert (none.checkpoint_callback, none.early_stopping_callback) == (None, None)


@pytest.mark.parametrize(
    ("precision", "shown"), [("no", "32-true"), ("bf16", "bf16-mixed"), ("fp16", "16-mixed")]
)
def test_the_precision_in_lightnings_words(precision, shown):
    assert Accelerator(cpu=True, mixed_precision=precision).current_run.precision == shown


def test_places_and_this_process(training, tmp_path, capsys):
    t = training(project_dir=tmp_path)
    run = t.accel.current_run
    assert (run.default_root_dir, run.log_dir) == (str(tmp_path), str(tmp_path))
    assert (run.world_size, run.global_rank, run.local_rank, run.node_rank) == (1, 0, 0, 0)
    assert (run.num_nodes, run.num_devices, run.is_global_zero) == (1, 1, True)
    assert (run.max_steps, run.predicting, run.fast_dev_run) == (-1, False, False)
    assert run.model is t.model
    run.print("hello", 3)
    assert capsys.readouterr().out == "hello 3\n"


def test_the_run_saves_a_checkpoint_and_knows_which_it_came_from(training, tmp_path):
    t = training()
    t.accel.current_run.save_checkpoint(tmp_path / "c")
    resumed = training().accel
    assert resumed.current_run.ckpt_path is None
    with resumed.run("demo", resume=str(tmp_path / "c")) as run:
        assert run.ckpt_path == str(tmp_path / "c")


def test_the_progress_bar_metrics_are_numbers(training):
    t = training()
    t.accel.log({"loss": torch.tensor(2.5), "note": "text", "n": 3})
    assert t.accel.current_run.progress_bar_metrics == {"loss": 2.5, "n": 3.0}


class Slow(torch.utils.data.Dataset):
    """Takes its time for each sample."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        time.sleep(0.02)
        return index


def test_the_time_that_the_loop_waits_for_its_loader_is_told_apart_from_its_body():
    accel = Accelerator(cpu=True)
    run, loader = accel.current_run, accel.prepare(DataLoader(Slow()))
    waits = []
    for _ in loader:
        waits.append(run.data_wait_s)
        loader.dataset[0]  # as slow, and not waited for
        assert run.data_wait_s == waits[-1]
    assert 0.02 <= waits[0] < waits[1] < waits[2] == run.data_wait_s
    with accel.run("again") as again:
        assert again.data_wait_s == 0.0


class Batches(Callback):
    """Keeps the number of training batches as the first hooks see it."""

    def __init__(self):
        self.seen = {}
        for hook in ("setup", "on_fit_start", "on_train_start", "on_train_batch_start"):
            setattr(self, hook, self._keeper(hook))

    def _keeper(self, hook):
        return lambda run, *args: self.seen.setdefault(hook, run.num_training_batches)


def a_loader(batches, **options):
    return DataLoader(torch.ones(batches, 1), **options)


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_the_number_of_training_batches_is_not_that_of_a_validation_loader_prepared_first(
    evaluates_first,
):
    batches = Batches()
    accel = Accelerator(cpu=True, callbacks=batches)
    val, train = accel.prepare(a_loader(5), a_loader(3, shuffle=not evaluates_first))
    with accel.run("demo") as run:
        if evaluates_first:  # which leaves one loader
            with accel.evaluate():
                list(val)
        for _ in run.epochs(1):
            list(train)
            with accel.evaluate():
                list(val)
            assert run.num_training_batches == 3
    early = math.inf if evaluates_first else 3
    assert batches.seen == {
        "setup": early,
        "on_fit_start": early,
        "on_train_start": 3,
        "on_train_batch_start": 3,
    }


def test_the_number_of_training_batches_is_unknown_where_any_loader_may_be_trained_on():
    batches = Batches()
    accel = Accelerator(cpu=True, callbacks=batches)
    _, train = accel.prepare(a_loader(5), a_loader(3))
    with accel.run("demo") as run:
        for _ in run.epochs(1):
            list(train)
    assert batches.seen["on_train_start"] == math.inf
    assert batches.seen["on_train_batch_start"] == 3
