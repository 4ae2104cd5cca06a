"""The hooks that a loop fires, written down whole: which, in what order, with which arguments."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks.base import HOOKS

BEGIN = ["setup fit", "fit_start", "train_start"]
END = ["train_end", "fit_end", "teardown fit"]


def batches(*indices):
    return [f"train_batch_{edge} {i}" for i in indices for edge in ("start", "end")]


def epoch(number, *inside):
    return [f"train_epoch_start {number}", *inside, f"train_epoch_end {number}"]


def validation(*inside):
    return [
        "validation_start", "validation_epoch_start", *inside,
        "validation_epoch_end", "validation_end",
    ]  # fmt: skip


def val_batches(*indices, suffix=""):
    return [
        f"validation_batch_{edge} {i}{suffix}" for i in indices for edge in ("start", "end")
    ]  # fmt: skip


# --- whole loops ---------------------------------------------------------------------------


def test_a_plain_loop_over_two_epochs_with_validation_by_the_models_mode(training):
    t = training(val_batches=2)
    for _ in range(2):
        t.model.train()
        for batch in t.train:
            t.step(batch)
        t.model.eval()
        for batch in t.val:
            t.model(batch)
    t.accel.end_training()
    assert t.recorder.trace == [
        *BEGIN,
        *epoch(0, *batches(0, 1)),
        *validation(*val_batches(0, 1)),
        *epoch(1, *batches(0, 1)),
        *validation(*val_batches(0, 1)),
        *END,
    ]


def test_the_hooks_inside_of_a_step(training):
    t = training(batches=1, full=True)
    for batch in t.train:
        t.step(batch)
    assert t.recorder.trace == [
        *BEGIN, "train_epoch_start 0", "train_batch_start 0", "before_backward", "after_backward",
        "before_optimizer_step", "after_optimizer_step 1", "before_zero_grad",
        "train_batch_end 0", "train_epoch_end 0",
    ]  # fmt: skip


def test_inside_of_a_gradient_window_only_backward_is_told(training):
    t = training(batches=3, full=True, gradient_accumulation_steps=2)
    for batch in t.train:
        with t.accel.accumulate(t.model):
            t.step(batch)
    backward = ["before_backward", "after_backward"]
    assert t.recorder.trace == [
        *BEGIN, "train_epoch_start 0",
        "train_batch_start 0", *backward, "train_batch_end 0",
        "train_batch_start 1", *backward,
        "before_optimizer_step", "after_optimizer_step 1", "before_zero_grad", "train_batch_end 1",
        "train_batch_start 2", *backward,
        "before_optimizer_step", "after_optimizer_step 2", "before_zero_grad", "train_batch_end 2",
        "train_epoch_end 0",
    ]  # fmt: skip


def test_a_run_with_epochs_and_evaluate(training):
    t = training()
    with t.accel.run("demo") as run:
        for _ in run.epochs(2):
            for batch in t.train:
                t.step(batch)
            with t.accel.evaluate(t.model):
                for batch in t.val:
                    t.model(batch)
            t.accel.log({"val/loss": 1.0})
    inside = [*validation(*val_batches(0))]
    assert t.recorder.trace == [
        *BEGIN,
        *epoch(0, *batches(0, 1), *inside, "log val/loss 2"),
        *epoch(1, *batches(0, 1), *inside, "log val/loss 4"),
        *END,
    ]


def test_several_loaders_in_one_evaluation_are_told_apart_from_the_second_on(training):
    t = training()
    second, third = t.accel.prepare(DataLoader(range(2)), DataLoader(range(1)))
    with t.accel.evaluate(t.model):
        for loader in (t.val, second, third):
            for _ in loader:
                pass
    two = ["validation_batch_start 0 1", "validation_batch_end 0 1"]
    assert t.recorder.take() == [
        "setup fit",
        "fit_start",
        *validation(
            *val_batches(0), *two, *val_batches(1, suffix=" 1"), *val_batches(0, suffix=" 2")
        ),
    ]
    with t.accel.evaluate(t.model):
        list(second)
    assert t.recorder.take() == validation(*val_batches(0, 1))


def test_an_evaluation_in_the_middle_of_an_epoch(training):
    t = training()
    with t.accel.run("demo") as run:
        for _ in run.epochs(1):
            for batch in t.train:
                t.step(batch)
                if run.batch_idx == 0:
                    with t.accel.evaluate(t.model):
                        list(t.val)
    first = ["train_batch_start 0", *validation(*val_batches(0)), "train_batch_end 0"]
    assert t.recorder.trace == [*BEGIN, *epoch(0, *first, *batches(1)), *END]


def test_an_evaluation_by_mode_in_the_middle_of_an_epoch(training):
    t = training()
    for batch in t.train:
        t.step(batch)
        t.model.eval()
        list(t.val)
        t.model.train()
    inside = validation(*val_batches(0))
    assert t.recorder.trace == [
        *BEGIN,
        *epoch(
            0,
            *["train_batch_start 0", *inside, "train_batch_end 0"],
            *["train_batch_start 1", *inside, "train_batch_end 1"],
        ),
    ]


def test_an_evaluation_without_any_training(training):
    t = training()
    with t.accel.run("test only"), t.accel.evaluate(t.model):
        list(t.val)
    assert t.recorder.trace == [
        "setup fit", "fit_start", *validation(*val_batches(0)), "fit_end", "teardown fit",
    ]  # fmt: skip


# --- loops that end early ------------------------------------------------------------------


def test_a_break_after_the_step_ends_the_batch_and_the_epoch_with_what_comes_next(training):
    t = training(batches=3)
    for batch in t.train:
        t.step(batch)
        break
    assert t.recorder.take() == [*BEGIN, "train_epoch_start 0", "train_batch_start 0"]
    for batch in t.train:
        t.step(batch)
    assert t.recorder.take() == [
        "train_batch_end 0", "train_epoch_end 0", *epoch(1, *batches(0, 1, 2)),
    ]  # fmt: skip


def test_a_break_before_the_step_leaves_the_batch_out(training):
    t = training(batches=3)
    for index, batch in enumerate(t.train):
        if index == 1:
            break
        t.step(batch)
    t.accel.end_training()
    assert t.recorder.trace == [
        *BEGIN, *epoch(0, *batches(0), "train_batch_start 1"), *END,
    ]  # fmt: skip


def test_a_break_in_a_counted_epoch_goes_on_with_the_next_epoch(training):
    t = training(batches=3)
    with t.accel.run("demo") as run:
        for _ in run.epochs(2):
            for batch in t.train:
                t.step(batch)
                break
    assert t.recorder.trace == [*BEGIN, *epoch(0, *batches(0)), *epoch(1, *batches(0)), *END]


def test_a_break_out_of_the_epochs_ends_the_epoch(training):
    t = training()
    with t.accel.run("demo") as run:
        for _ in run.epochs(5):
            for batch in t.train:
                t.step(batch)
            break
    assert t.recorder.trace == [*BEGIN, *epoch(0, *batches(0, 1)), *END]
    assert run.epochs_done == 1


def test_a_break_in_an_evaluation_ends_the_evaluation(training):
    t = training(val_batches=3)
    with t.accel.evaluate(t.model):
        for _ in t.val:
            break
    assert t.recorder.take()[-3:] == [
        "validation_batch_start 0", "validation_epoch_end", "validation_end",
    ]  # fmt: skip
    t.model.eval()
    for _ in t.val:
        break
    t.model.train()
    list(t.train)
    assert t.recorder.take() == [
        *validation("validation_batch_start 0"), "train_start", *epoch(0, *batches(0, 1)),
    ]  # fmt: skip


def test_an_exception_in_a_run_tells_the_exception_and_tears_down_and_no_more(training):
    t = training()

    def script():
        with t.accel.run("demo") as run:
            for _ in run.epochs(2):
                for batch in t.train:
                    t.step(batch)
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()
    assert t.recorder.trace == [
        *BEGIN, "train_epoch_start 0", "train_batch_start 0",
        "exception ZeroDivisionError", "teardown fit",
    ]  # fmt: skip


def test_an_exception_in_an_evaluation_ends_neither_it_nor_the_epoch(training):
    t = training()

    def script():
        with t.accel.run("demo") as run:
            for _ in run.epochs(2):
                list(t.train)
                with t.accel.evaluate(t.model):
                    for _ in t.val:
                        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()
    assert t.recorder.trace == [
        *BEGIN, "train_epoch_start 0", *batches(0, 1),
        "validation_start", "validation_epoch_start", "validation_batch_start 0",
        "exception ZeroDivisionError", "teardown fit",
    ]  # fmt: skip
    assert t.model.training
    assert torch.is_grad_enabled()


def test_an_exception_in_a_plain_loop_fires_nothing_while_it_unwinds(training):
    t = training()

    def script():
        for batch in t.train:
            t.step(batch)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()
    assert t.recorder.trace == [*BEGIN, "train_epoch_start 0", "train_batch_start 0"]


def test_end_training_in_a_finally_does_not_take_a_failed_loop_for_a_finished_one(training):
    t = training()

    def script():
        try:
            for batch in t.train:
                t.step(batch)
                raise ZeroDivisionError
        finally:
            t.accel.end_training()

    with pytest.raises(ZeroDivisionError):
        script()
    assert "train_end" not in t.recorder.trace
    assert "train_epoch_end 0" not in t.recorder.trace


def test_end_training_twice_or_inside_of_a_run_ends_it_once(training):
    t = training()
    with t.accel.run("demo"):
        for batch in t.train:
            t.step(batch)
        t.accel.end_training()
        t.accel.end_training()
    assert t.recorder.trace == [*BEGIN, *epoch(0, *batches(0, 1)), *END]


def test_end_training_of_a_script_that_did_nothing_fires_nothing(training):
    t = training()
    t.accel.end_training()
    assert t.recorder.trace == []


# --- resumed loops -------------------------------------------------------------------------


def test_a_counted_epoch_resumed_in_its_middle_does_not_start_again(training, tmp_path):
    t = training(batches=3)
    with t.accel.run("demo") as run:
        for _ in run.epochs(2):
            for batch in t.train:
                t.step(batch)
                if run.batch_idx == 1:
                    t.accel.save_state(tmp_path / "c")
                    break
            break
    u = training(batches=3)
    with u.accel.run("demo", resume=str(tmp_path / "c")) as run:
        for _ in run.epochs(2):
            for batch in u.train:
                u.step(batch)
    assert u.recorder.trace == [
        "setup fit", "load_checkpoint", "fit_start", "train_start",
        *batches(2), "train_epoch_end 0", *epoch(1, *batches(0, 1, 2)), *END,
    ]  # fmt: skip


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_plain_epoch_resumed_in_its_middle_does_not_start_again(training, tmp_path, taken):
    t = training(batches=3)
    for index, batch in enumerate(t.train):
        t.step(batch)
        if index + 1 == taken:
            t.accel.save_state(tmp_path / "c")
            break
    u = training(batches=3)
    u.accel.load_state(tmp_path / "c")
    assert u.accel.current_run.epochs_done == 0  # asked, the run counts: nothing may be left
    for batch in u.train:
        u.step(batch)
    assert u.recorder.trace == [
        "load_checkpoint", *BEGIN, *batches(*range(taken, 3)), "train_epoch_end 0",
    ]  # fmt: skip
    assert u.accel.current_run.global_step == 3
    assert u.accel.current_run.epochs_done == 1


def test_an_epoch_resumed_in_its_validation_trains_on_nothing_again(training, tmp_path):
    t = training()
    with t.accel.run("demo") as run:
        for _ in run.epochs(2):
            for batch in t.train:
                t.step(batch)
            with t.accel.evaluate(t.model):
                t.accel.save_state(tmp_path / "c")
            break
    u = training()
    with u.accel.run("demo", resume=str(tmp_path / "c")) as run:
        for _ in run.epochs(1):
            for batch in u.train:
                u.step(batch)
            with u.accel.evaluate(u.model):
                list(u.val)
    assert u.recorder.trace == [
        "setup fit", "load_checkpoint", "fit_start", "train_start",
        *validation(*val_batches(0)), "train_epoch_end 0", *END,
    ]  # fmt: skip


# --- other ways to iterate -----------------------------------------------------------------


def test_a_loop_by_next_fires_the_same_hooks(training):
    t = training()
    iterator, steps = iter(t.train), 0
    while steps < 3:
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = iter(t.train)
            continue
        t.step(batch)
        steps += 1
    del iterator
    t.accel.end_training()
    assert t.recorder.trace == [
        *BEGIN, *epoch(0, *batches(0, 1)), *epoch(1, *batches(0)), *END,
    ]  # fmt: skip


def test_a_look_at_the_first_batch_is_taken_back(training):
    t = training()
    next(iter(t.train))
    for batch in t.train:
        t.step(batch)
    assert t.recorder.trace == [
        *BEGIN, *epoch(0, "train_batch_start 0", *batches(0, 1)),
    ]  # fmt: skip


def test_a_look_at_the_first_batch_of_a_run_is_not_counted_as_an_epoch(training):
    t = training()
    with t.accel.run("demo") as run:
        next(iter(t.train))
        open_while_training = []
        for _ in run.epochs(2):
            for batch in t.train:
                t.step(batch)
                open_while_training.append((run.epochs_done, run.epoch_open))
    assert open_while_training == [(0, True)] * 2 + [(1, True)] * 2
    assert t.recorder.trace.count("train_epoch_end 0") == 1


def test_a_pass_over_the_training_data_before_the_epochs_takes_none_of_them(training):
    t = training()
    with t.accel.run("demo") as run:
        list(t.train)  # to find the mean of the data, say
        assert list(run.epochs(2)) == [0, 1]


def test_an_iterator_that_is_kept_does_not_silence_the_loops_after_it(training):
    t = training()
    kept = iter(t.train)
    next(kept)
    t.recorder.take()
    for batch in t.train:
        t.step(batch)
    assert t.recorder.trace.count("train_batch_end 1") == 1
    del kept


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_read_twice_at_a_time_is_an_error_that_says_what_to_do(training, workers):
    t = training(workers=workers)
    with pytest.raises(RuntimeError, match="prepare a second DataLoader"):
        list(zip(t.train, t.train, strict=False))
    passes = iter(t.train)
    t.step(next(passes))
    with t.accel.evaluate(t.model):
        list(t.train)
    with pytest.raises(RuntimeError, match="prepare a second DataLoader"):
        next(passes)
    assert len(list(t.train)) == 2


def test_a_second_loader_inside_of_a_training_loop_is_data_and_no_epoch(training):
    t = training()
    extra = t.accel.prepare(DataLoader(range(2)))
    for _ in zip(t.train, extra, strict=False):
        pass
    for _ in t.train:
        list(extra)
    assert t.recorder.trace == [*BEGIN, *epoch(0, *batches(0, 1)), *epoch(1, *batches(0, 1))]


def test_an_empty_loader_is_an_epoch_without_batches(training):
    t = training()
    empty = t.accel.prepare(DataLoader([]))
    with t.accel.run("demo") as run:
        for _ in run.epochs(1):
            list(empty)
    assert t.recorder.trace == [*BEGIN, *epoch(0), *END]


# --- callbacks -----------------------------------------------------------------------------


def test_the_outputs_of_a_batch_hold_its_last_loss_undivided(training):
    seen = []

    class Losses(Callback):
        def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
            seen.append((outputs["loss"].item(), outputs["loss"].requires_grad))

    t = training(Losses(), gradient_accumulation_steps=2)
    expected = []
    for batch in t.train:
        with t.accel.accumulate(t.model):
            loss = t.model(batch).mean()
            expected.append((loss.item(), False))
            t.accel.backward(loss)
            t.optimizer.step()
            t.optimizer.zero_grad()
    assert seen == expected


def test_a_batch_without_a_loss_has_no_outputs(training):
    seen = []

    class Losses(Callback):
        def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
            seen.append(outputs)

    t = training(Losses())
    for index, batch in enumerate(t.train):
        if index == 0:
            t.step(batch)
    assert [output is None for output in seen] == [False, True]


class Named:
    """A callback without our base class, that tells a shared list which hook it was."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def setup(self, run, model, stage):
        self.calls.append(f"{self.name} setup")

    def on_train_start(self, run, model):
        self.calls.append(f"{self.name} train_start")

    def on_train_end(self, run, model):
        self.calls.append(f"{self.name} train_end")

    def on_fit_end(self, run, model):
        self.calls.append(f"{self.name} fit_end")

    def teardown(self, run, model, stage):
        self.calls.append(f"{self.name} teardown")


def test_objects_with_hooks_are_callbacks_and_exit_hooks_go_in_reverse():
    calls = []
    accel = Accelerator(cpu=True, callbacks=[Named("a", calls), Named("b", calls)])
    loader = accel.prepare(DataLoader(range(1)))
    with accel.run("demo"):
        list(loader)
    entering = [f"{name} {hook}" for hook in ("setup", "train_start") for name in "ab"]
    leaving = [f"{name} {hook}" for hook in ("train_end", "fit_end", "teardown") for name in "ba"]
    assert calls == entering + leaving


def test_a_callback_that_runs_last_does_so_in_every_hook(recorder):
    calls = []
    first, second = Named("last", calls), Named("b", calls)
    first.runs_last = True
    accel = Accelerator(cpu=True, callbacks=[first, second])
    loader = accel.prepare(DataLoader(range(1)))
    with accel.run("demo"):
        list(loader)
    assert calls[::2] == [
        f"b {h}" for h in ("setup", "train_start", "train_end", "fit_end", "teardown")
    ]
    assert all(call.startswith("last ") for call in calls[1::2])


def test_a_hook_nobody_overrides_costs_nothing(recorder):
    accel = Accelerator(cpu=True, callbacks=[Callback()])
    assert all(accel.loop.dispatch.hooks[hook] == () for hook in HOOKS)


def test_hooks_that_are_set_on_the_instance_are_called(training):
    calls = []
    callback = Callback()
    callback.on_train_start = lambda run, model: calls.append((run, model))
    t = training(callback)
    list(t.train)
    assert calls == [(t.accel.current_run, t.model)]


def test_a_misnamed_hook_is_an_error_with_the_right_name():
    class Typo:
        def on_train_epoch_ends(self, run, model): ...

    with pytest.raises(
        TypeError, match=r"Typo.on_train_epoch_ends is no hook.*on_train_epoch_end'"
    ):
        Accelerator(cpu=True, callbacks=[Typo()])


def test_a_misnamed_hook_that_is_set_on_the_instance_is_an_error_too():
    callback = Callback()
    callback.on_train_epoch_ends = lambda run, model: None
    with pytest.raises(TypeError, match="is no hook"):
        Accelerator(cpu=True, callbacks=[callback])


def test_a_class_instead_of_an_instance_is_an_error_that_says_so():
    with pytest.raises(TypeError, match=r"pass an instance, Named\(\)"):
        Accelerator(cpu=True, callbacks=[Named])


def test_two_callbacks_of_one_state_key_are_numbered(recorder):
    accel = Accelerator(cpu=True, callbacks=[recorder("x"), recorder("x")])
    assert "  1  x\n  2  x#2\n" in accel.describe_callbacks()


class Counts:
    """Counts training batches and keeps the count; an object with hooks, and no Callback."""

    count = 0

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Counter(Counts, Callback):
    """The same as a Callback with a key of its own."""

    def __init__(self, key):
        self.key = key

    @property
    def state_key(self):
        return self.key


def test_the_state_of_a_callback_that_is_not_here_survives_a_load_and_a_save(training, tmp_path):
    t = training(Counter("a"), Counter("b"))
    for batch in t.train:
        t.step(batch)
    t.accel.save_state(tmp_path / "1")
    without = training(Counter("b"))
    without.accel.load_state(tmp_path / "1")
    list(without.train)
    without.accel.save_state(tmp_path / "2")
    a, b = Counter("a"), Counter("b")
    training(b, a).accel.load_state(tmp_path / "2")
    assert (a.count, b.count) == (2, 4)


def test_the_state_of_an_object_with_hooks_is_restored_too(training, tmp_path):
    t = training(Counts())
    list(t.train)
    t.accel.save_state(tmp_path / "c")
    restored = Counts()
    training(restored).accel.load_state(tmp_path / "c")
    assert restored.count == 2


def test_two_accelerators_side_by_side_hear_only_their_own_loops(training):
    first, second = training(gradient_accumulation_steps=2), training()
    for batch, other in zip(first.train, second.train, strict=True):
        with first.accel.accumulate(first.model):
            first.step(batch)
            second.step(other)
    assert first.recorder.trace == second.recorder.trace
    assert first.recorder.trace == [*BEGIN, *epoch(0, *batches(0, 1))]
    assert first.accel.current_run.global_step == 1
    assert second.accel.current_run.global_step == 2


def test_one_accelerator_evaluates_inside_of_the_training_of_another(training):
    first, second = training(), training()
    for batch in first.train:
        with second.accel.evaluate(second.model):
            list(second.val)
        first.step(batch)
    assert first.recorder.trace == [*BEGIN, *epoch(0, *batches(0, 1))]
    assert second.recorder.trace == [
        "setup fit", "fit_start", *validation(*val_batches(0)), *validation(*val_batches(0)),
    ]  # fmt: skip


def test_a_hook_that_evaluates_by_itself_nests(training):
    class Evaluates(Callback):
        def on_train_epoch_end(self, run, model):
            with run.accelerator.evaluate():
                list(self.loader)

    callback = Evaluates()
    t = training(callback)
    callback.loader = t.val
    with t.accel.run("demo") as run:
        for _ in run.epochs(2):
            list(t.train)
    inside = validation(*val_batches(0))
    assert t.recorder.trace == [
        *BEGIN, *epoch(0, *batches(0, 1)), *inside, *epoch(1, *batches(0, 1)), *inside, *END,
    ]  # fmt: skip


# --- the model that hooks get --------------------------------------------------------------


class Models(Callback):
    """Notes the model of the hooks of a step."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, run, model):
        self.seen.append(model)

    def on_before_zero_grad(self, run, model, optimizer):
        self.seen.append(model)

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.seen.append(model)


@pytest.mark.parametrize("order", ["together", "teacher first", "optimizer last"])
def test_hooks_get_the_first_model_that_has_an_optimizer(order):
    models = Models()
    accel = Accelerator(cpu=True, callbacks=[models])
    teacher, student, other = (torch.nn.Linear(1, 1) for _ in range(3))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (student, other)]
    if order == "together":
        accel.prepare(teacher, student, other, *optimizers)
    elif order == "teacher first":
        accel.prepare(teacher)
        accel.prepare(student, optimizers[0])
        accel.prepare(other, optimizers[1])
    else:
        accel.prepare(teacher, student, other)
        assert accel.current_run.model is teacher  # no model has an optimizer yet
        accel.prepare(*optimizers)
    assert accel.current_run.model is student
    accel.backward(student(torch.ones(1, 1)).sum())
    accel.optimizers[0].step()
    accel.optimizers[0].zero_grad()
    accel.end_training()
    assert len(models.seen) == 3
    assert all(one is student for one in models.seen)
