"""Loops over data that no prepared loader delivers: batches, steps, saves, stops and resumes."""

from __future__ import annotations

import io
import os
import signal
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import (
    Checkpoint,
    EarlyStopping,
    LearningRateMonitor,
    Preemption,
    Profiler,
    ProgressBar,
    SampleLogger,
    Throughput,
    Timer,
)
from accel_callbacks.loop.own_batches import OwnBatches

BEGIN = ["setup fit", "fit_start", "train_start"]
END = ["train_end", "fit_end", "teardown fit"]


def batches(*indices: int) -> list[str]:
    return [f"train_batch_{edge} {i}" for i in indices for edge in ("start", "end")]


def saved(folder: Path) -> list[int]:
    return sorted(int(one.name.removeprefix("step-")) for one in folder.glob("step-*"))


def test_the_block_of_accumulate_is_the_batch(training):
    t = training(full=True, gradient_accumulation_steps=2)
    with t.accel.run("own"):
        for _ in range(2):
            with t.accel.accumulate(t.model):
                t.step(torch.ones(2, 1))
    backward = ["before_backward", "after_backward"]
    assert t.recorder.trace == [
        *BEGIN, "train_batch_start 0", *backward, "train_batch_end 0",
        "train_batch_start 1", *backward, "before_optimizer_step", "after_optimizer_step 1",
        "before_zero_grad", "train_batch_end 1", *END,
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2])
def test_a_block_inside_of_a_block_is_no_batch_of_its_own(training, steps):
    traces = []
    for depth in (1, 2):
        t = training(full=True, gradient_accumulation_steps=steps)
        with t.accel.run("own"):
            for _ in range(2):
                with ExitStack() as blocks:
                    for _ in range(depth):
                        blocks.enter_context(t.accel.accumulate(t.model))
                    t.step(torch.ones(2, 1))
        traces.append(list(t.recorder.trace))
    assert traces[0] == traces[1]


def test_without_a_block_the_optimizer_step_ends_the_batch(training):
    t = training(full=True)
    for _ in range(2):
        t.accel.backward(t.model(torch.ones(2, 1)).mean())  # accumulated by hand
        t.step(torch.ones(2, 1))
    t.accel.end_training()
    backward = ["before_backward", "after_backward"]

    def step(index):
        return [
            f"train_batch_start {index}", *backward, *backward, "before_optimizer_step",
            f"after_optimizer_step {index + 1}", f"train_batch_end {index}", "before_zero_grad",
        ]  # fmt: skip

    assert t.recorder.trace == [*BEGIN, *step(0), *step(1), *END]


def test_a_batch_ends_after_the_schedulers_step(training):
    t = training()
    scheduler = t.accel.prepare(torch.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.5))
    for _ in range(2):
        t.step(torch.ones(2, 1))
        scheduler.step()
        t.accel.log({"loss": 1.0})
    assert t.recorder.take() == [*BEGIN, *batches(0), "log loss 1", *batches(1), "log loss 2"]
    with t.accel.accumulate(t.model):
        t.step(torch.ones(2, 1))
    assert t.recorder.take() == ["train_batch_start 2"]
    scheduler.step()
    assert t.recorder.take() == ["train_batch_end 2"]


def test_a_batch_whose_scheduler_steps_only_now_and_then_ends_where_the_next_begins(training):
    t = training()
    t.accel.prepare(torch.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.5))
    with t.accel.run("own"):
        for _ in range(2):
            t.step(torch.ones(2, 1))
        with t.accel.evaluate():
            pass
    evaluation = ["start", "epoch_start", "epoch_end", "end"]
    assert t.recorder.trace == [
        *BEGIN, *batches(0, 1), *(f"validation_{one}" for one in evaluation), *END
    ]  # fmt: skip


def test_the_next_batch_begins_before_its_backward_though_a_scheduler_has_not_stepped(training):
    t = training(full=True)
    t.accel.prepare(torch.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.5))
    for _ in range(2):
        t.step(torch.ones(2, 1))
    again = t.recorder.trace.index("train_batch_start 1")
    assert t.recorder.trace[again - 1 : again + 2] == [
        "train_batch_end 0", "train_batch_start 1", "before_backward",
    ]  # fmt: skip


def two_optimizers(*callbacks: Callback):
    accel = Accelerator(cpu=True, callbacks=callbacks)
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    return accel, weights, accel.prepare(*(torch.optim.SGD([one], lr=0.1) for one in weights))


@pytest.mark.parametrize("turns", [[0, 1] * 3, [0, 0, 1, 0]])
def test_two_optimizers_that_take_turns_are_one_batch_and_one_step(recorder, turns):
    record = recorder(skip=("on_before_backward", "on_after_backward", "on_before_optimizer_step"))
    accel, weights, optimizers = two_optimizers(record)
    for turn in turns:
        accel.backward(weights[turn].sum())
        optimizers[turn].step()
    accel.end_training()
    steps = [one for one in record.trace if one.startswith("after")]
    hooks = [one for one in record.trace if "batch" in one]
    assert hooks == batches(*range(3))
    assert accel.current_run.global_step == 3
    assert len(steps) == len(turns)


def test_a_step_that_the_scaler_skips_ends_the_batch_and_is_not_counted(training):
    t, skipped = training(mixed_precision="fp16"), []
    with t.accel.run("own") as run:
        for factor in (0.01, float("inf"), 0.01):
            t.accel.backward(t.model(torch.ones(2, 1)).mean() * factor)
            t.optimizer.step()
            t.optimizer.zero_grad()
            skipped.append(t.optimizer.step_was_skipped)
        assert skipped == [False, True, False]
        assert (run.global_step, run.batch_idx) == (2, 2)
    assert t.recorder.trace == [*BEGIN, *batches(0, 1, 2), *END]


# --- every way to iterate again ------------------------------------------------------------


def test_the_hooks_go_on_through_cycle(training):
    t = training()
    with t.accel.run("own") as run:
        for batch in islice(cycle(t.train), 5):
            t.step(batch)
        assert run.global_step == 5
    assert t.recorder.trace == [
        *BEGIN, "train_epoch_start 0", *batches(0, 1), "train_epoch_end 0", *batches(2, 3, 4), *END
    ]  # fmt: skip


def test_the_hooks_go_on_through_next_by_hand(training):
    t = training()
    with t.accel.run("own"):
        iterator = iter(t.train)
        for _ in range(3):
            try:
                batch = next(iterator)
            except StopIteration:
                iterator = iter(t.train)
                batch = next(iterator)
            t.step(batch)
        iterator.close()
    first, second = ["train_epoch_start 0", *batches(0, 1), "train_epoch_end 0"], batches(0)
    assert t.recorder.trace == [
        *BEGIN, *first, "train_epoch_start 1", *second, "train_epoch_end 1", *END
    ]  # fmt: skip


def test_the_hooks_go_on_through_a_cached_list_and_islice(training):
    t = training()
    cached = list(t.train)
    t.recorder.take()
    for batch in cached:
        t.step(batch)
    for batch in islice(t.train, 1):
        t.step(batch)
    t.step(cached[0])
    t.accel.end_training()
    assert t.recorder.trace == [
        *batches(2, 3), "train_epoch_start 1", *batches(0), "train_epoch_end 1", *batches(1), *END
    ]  # fmt: skip


def test_a_zip_of_two_loaders_is_not_counted_twice(training):
    t = training()
    other = t.accel.prepare(torch.utils.data.DataLoader(torch.ones(4, 1), 2))
    with t.accel.run("own"):
        for batch, _ in zip(t.train, other, strict=True):
            t.step(batch)
    epoch = ["train_epoch_start 0", *batches(0, 1), "train_epoch_end 0"]
    assert t.recorder.trace == [*BEGIN, *epoch, *END]


def test_a_block_whose_data_comes_from_a_loader_is_its_batch(training):
    t = training()
    with t.accel.run("own"):
        iterator = iter(t.train)
        for _ in range(2):
            with t.accel.accumulate(t.model):
                t.step(next(iterator))
        iterator.close()
    assert [one for one in t.recorder.trace if "batch_end" in one] == batches(0, 1)[1::2]


# --- the built-in callbacks ----------------------------------------------------------------


def steps(t, number: int) -> None:
    """Steps on ones, until the run should stop."""
    for _ in range(number):
        if t.accel.current_run.should_stop:
            break
        t.step(torch.ones(2, 1))


def test_the_progress_bar_counts_the_batches(training):
    file = io.StringIO()
    t = training(ProgressBar(file=file))
    with t.accel.run("own"):
        steps(t, 3)
    with t.accel.run("own") as run:
        for _ in run.epochs(1):
            steps(t, 2)
    first, second = file.getvalue().splitlines()
    assert first.startswith("training: 3 batches, ")
    assert second.startswith("epoch 1/1: 2 batches, ")


@pytest.mark.parametrize("block", [True, False])
def test_throughput_counts_steps_and_batches(training, block):
    def refuse(batch):
        raise AssertionError("there is no batch")

    speed = Throughput(samples=refuse, tokens=refuse, log_every_n_steps=2)
    t = training(speed)
    with t.accel.run("own"):
        for _ in range(5):
            if block:
                with t.accel.accumulate(t.model):
                    t.step(torch.ones(2, 1))
            else:
                t.step(torch.ones(2, 1))
    names = {name.removeprefix("throughput/") for name in speed.rates}
    counts = {"steps_per_s", "batches_per_s", "device/batches_per_s", "data_wait_fraction"}
    assert names >= {*counts, "total_seconds"}
    assert ("tflops" in names) == block
    assert speed.rates["throughput/steps_per_s"] > 0
    assert "total_samples" not in names


def test_timer_and_early_stopping_stop_at_a_step(training):
    t = training(Timer(0.0001))
    with t.accel.run("own") as run:
        steps(t, 3)
    assert run.global_step == 1
    assert run.stop_reason.startswith("the time is up")

    t = training(EarlyStopping("loss", patience=1))
    with t.accel.run("own") as run:
        for _ in range(5):
            steps(t, 1)
            t.accel.log({"loss": 1.0})
    assert run.global_step == 2
    assert run.stop_reason.startswith("loss did not improve")


def test_a_signal_preempts_at_the_end_of_the_step(training):
    def train(t) -> None:
        with t.accel.run("own"):
            steps(t, 1)
            os.kill(os.getpid(), signal.SIGTERM)
            steps(t, 3)

    t = training(Preemption())
    with pytest.raises(SystemExit):
        train(t)
    assert t.accel.current_run.preempted
    assert t.accel.current_run.global_step == 2


def test_rates_samples_and_profiles_come_at_their_steps(training, tmp_path):
    shown: list[tuple[int, object]] = []

    def show(run, model, batch, outputs):
        shown.append((run.global_step, batch))
        return {}

    rates = LearningRateMonitor("2 steps")
    profiler = Profiler(tmp_path, wait=0, warmup=1, active=1, activities=["cpu"])
    t = training(rates, SampleLogger(show, stage="train", every="2 steps"), profiler)
    with t.accel.run("own"):
        steps(t, 5)
    assert [one for one in t.recorder.trace if "lr-SGD" in one] == ["log lr-SGD 2", "log lr-SGD 4"]
    assert shown == [(2, None), (4, None)]
    assert profiler.traces == [str(tmp_path / "rank0.00000002.pt.trace.json")]


# --- saves, stops and resumes --------------------------------------------------------------


def build(folder: Path, *callbacks: Callback, seed: int = 1, **options):
    accel = Accelerator(cpu=True, callbacks=callbacks, project_dir=folder, **options)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return accel, *accel.prepare(model, optimizer, scheduler)


@pytest.mark.parametrize("block", [True, False])
def test_checkpoints_by_steps_and_of_the_finished_run(tmp_path, block):
    saver = Checkpoint(tmp_path / "c", every_n_steps=2, keep_last=None)
    accel, model, optimizer, scheduler = build(tmp_path, saver)
    with accel.run("own"):
        for _ in range(5):
            if block:
                with accel.accumulate(model):
                    accel.backward(model(torch.randn(3, 2)).sum())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            else:
                accel.backward(model(torch.randn(3, 2)).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert saved(tmp_path / "c") == [2, 4, 5]


class Crash(Exception):
    pass


@pytest.mark.parametrize("block", [True, False])
def test_a_resume_of_random_batches_is_exact(tmp_path, block):
    def train(folder: Path, crash_at: int | None = None, seed: int = 1):
        saver = Checkpoint(folder / "c", every_n_steps=2)
        accel, model, optimizer, scheduler = build(folder, saver, seed=seed)
        with accel.run("own") as run:
            for epoch in run.epochs(2):
                for index in range(run.batch_idx + 1, 5):
                    if (epoch, index) == (1, crash_at):
                        raise Crash
                    batch = torch.randn(3, 2)
                    if block:
                        with accel.accumulate(model):
                            accel.backward(model(batch).sum())
                            optimizer.step()
                            scheduler.step()
                    else:
                        accel.backward(model(batch).sum())
                        optimizer.step()
                        scheduler.step()
                    optimizer.zero_grad()
        return [p.tolist() for p in model.parameters()], run.global_step, scheduler.get_last_lr()

    whole = train(tmp_path / "whole")
    with pytest.raises(Crash):
        train(tmp_path / "cut", crash_at=4)
    assert saved(tmp_path / "cut" / "c") == [4, 6, 8]
    assert train(tmp_path / "cut", seed=2) == whole
    assert whole[1] == 10


def test_steps_before_a_run_are_not_the_run_to_resume(tmp_path):
    for expected in (3, 6):
        accel, model, optimizer, _ = build(tmp_path, Checkpoint(tmp_path / "c"))
        accel.backward(model(torch.ones(1, 2)).sum())  # compiles, say
        optimizer.step()
        with accel.run("own") as run:
            for _ in range(3):
                accel.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
        assert run.global_step == expected
        assert saved(tmp_path / "c")[-1] == expected


def test_a_stop_takes_effect_at_a_step_and_the_epoch_goes_on_after_a_resume(tmp_path):
    class StopAt(Callback):
        step = 3

        def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
            if run.global_step == self.step:
                run.stop("enough")

    done = []

    def train() -> None:
        stopper = StopAt()
        accel, model, optimizer, _ = build(tmp_path, stopper, Checkpoint(tmp_path / "c"))
        with accel.run("own") as run:
            for epoch in run.epochs(2):
                for index in range(run.batch_idx + 1, 4):
                    accel.backward(model(torch.ones(1, 2)).sum())
                    optimizer.step()
                    accel.schedulers[0].step()
                    done.append((epoch, index))
                    if run.should_stop:
                        break

    train()
    assert done == [(0, 0), (0, 1), (0, 2)]
    train()
    assert done == [(epoch, index) for epoch in range(2) for index in range(4)]


def test_an_epoch_that_went_on_after_the_stop_is_done(tmp_path):
    accel, model, optimizer, scheduler = build(tmp_path)
    with accel.run("own") as run:
        for _ in run.epochs(2):
            for index in range(3):
                accel.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                scheduler.step()
                if index == 1:
                    run.stop("enough")
    assert (run.epochs_done, run.epoch_open, run.global_step) == (1, False, 3)


def test_a_batch_that_an_error_ended_is_counted_again(training):
    t = training()
    with t.accel.run("own") as run:
        for fails in (True, False):
            try:
                with t.accel.accumulate(t.model):
                    if fails:
                        raise MemoryError
                    t.step(torch.ones(2, 1))
            except MemoryError:
                pass
        assert run.batch_idx == 0


def test_a_save_before_the_backward_does_not_count_the_batch(training, tmp_path):
    t = training()
    for index in range(2):
        with t.accel.accumulate(t.model):
            if index == 1:
                t.accel.save_state(tmp_path / "s")
            t.step(torch.ones(2, 1))
    t.accel.load_state(tmp_path / "s")
    assert (t.accel.current_run.batch_idx, t.accel.current_run.global_step) == (0, 1)


def test_several_steps_in_a_batch_do_not_jump_over_a_save(training, tmp_path):
    t = training(Checkpoint(tmp_path / "c", every_n_steps=4, keep_last=None))
    with t.accel.run("own") as run:
        for _ in run.epochs(2):
            for batch in t.train:
                for _ in range(3):
                    t.step(batch)
    assert saved(tmp_path / "c") == [6, 9, 12]


def test_the_parts_of_a_step_in_any_order():
    seen: list[str] = []
    own = OwnBatches(["a", "b"], [])
    own.connect(lambda: seen.append("begin"), lambda: seen.append("end"))
    own.before_backward()
    own.before_step("b")
    own.note_call("b")
    own.before_backward()
    own.note_call("a")
    assert seen == ["begin", "end"]
