"""Functions as callbacks: arguments, filters, handles, and counters that a resume goes on with."""

from __future__ import annotations

import functools

import pytest
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.callbacks.base import HOOKS


def logs(accel, count):
    for number in range(1, count + 1):
        accel.log({"n": number}, step=number)


# --- arguments -----------------------------------------------------------------------------------


def test_a_function_gets_the_arguments_that_it_names(training):
    t = training()
    run, seen = t.accel.current_run, []

    @t.accel.on("train_batch_end")
    def batch_end(batch_idx, loss, run, *, outputs, step, epoch, factor=3):
        seen.append((batch_idx, loss is outputs["loss"], run, step, epoch, factor))

    @t.accel.on("on_before_optimizer_step")
    def before(optimizer, model, accelerator):
        seen.append((optimizer, model, accelerator))

    @t.accel.on("validation_batch_start")
    def everything(**arguments):
        seen.append(arguments)

    for batch in t.train:
        t.step(batch)
        break
    assert seen == [(t.optimizer, t.model, t.accel)]
    with t.accel.evaluate():
        for batch in t.val:
            assert seen.pop() == {
                "run": run, "model": t.model, "batch": batch, "batch_idx": 0, "dataloader_idx": 0,
                "step": 1, "epoch": 0, "accelerator": t.accel,
            }  # fmt: skip
    assert seen[1:] == [(0, True, run, 1, 0, 3)]


def test_a_batch_without_a_backward_has_no_loss(training):
    t, seen = training(), []
    t.accel.on("train_batch_end")(lambda loss: seen.append(loss))
    list(t.train)
    assert seen == [None, None]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_takes_a_function(hook):
    handle = Accelerator(cpu=True).on(hook.removeprefix("on_"))(lambda run, model: None)
    assert hasattr(handle.callback, hook)


def unknown(bach): ...
def positional(batch, /): ...
def several(*args): ...
async def later(batch): ...
def generates(batch):
    yield batch


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (unknown, r"unknown\(bach\) cannot be given by on_train_batch_end.*mean 'batch'"),
        (positional, r"positional\(batch\) cannot be given"),
        (several, r"several\(\*args\) cannot be given"),
        (later, "later is a coroutine or a generator"),
        (generates, "generates is a coroutine or a generator"),
        (3, "3 is not callable"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_it_is_registered(function, says):
    accel = Accelerator(cpu=True)
    with pytest.raises(TypeError, match=says):
        accel.on("train_batch_end")(function)
    assert accel.callbacks == []


@pytest.mark.parametrize(
    ("hook", "options", "says"),
    [
        ("train_batch_ended", {}, "'train_batch_ended' is no hook. Did you mean 'train_batch_end'"),
        ("state_dict", {}, "'state_dict' is no hook"),
        ("log", {"every": 0}, "every=0 must be"),
        ("log", {"every": True}, "every=True must be"),
        ("log", {"after": -1}, "after=-1 must be"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(hook, options, says):
    with pytest.raises(ValueError, match=says):
        Accelerator(cpu=True).on(hook, **options)


def test_what_has_no_name_of_its_own_can_be_registered_too():
    class Prints:
        def __call__(self, metrics):
            seen.append(metrics["n"])

    def scaled(by, metrics):
        seen.append(by * metrics["n"])

    accel, seen = Accelerator(cpu=True), []
    accel.on("log")(Prints())
    accel.on("log")(functools.partial(scaled, 10))
    logs(accel, 2)
    assert seen == [1, 10, 2, 20]


# --- filters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"every": 3}, [3, 6]),
        ({"after": 4}, [5, 6, 7]),
        ({"every": 2, "after": 4}, [6]),
        ({"every": 2, "after": 3}, [4, 6]),
        ({"once": True}, [1]),
        ({"once": True, "every": 2, "after": 2}, [4]),
        ({"main_process_only": True}, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_filters_count_the_calls_of_the_hook(options, expected):
    accel, seen = Accelerator(cpu=True), []
    accel.on("log", **options)(lambda metrics: seen.append(metrics["n"]))
    logs(accel, 7)
    assert seen == expected
    assert len(accel.callbacks) == (0 if options.get("once") else 1)


def test_counters_begin_anew_with_each_run(training):
    t, seen = training(batches=3), []
    t.accel.on("train_batch_end", every=2)(
        lambda run, batch_idx: seen.append((run.name, batch_idx))
    )
    for name in ("first", "second"):
        with t.accel.run(name) as run:
            for _ in run.epochs(1):
                list(t.train)
    assert seen == [("first", 1), ("second", 1)]


def registered(accel, seen):
    """Two functions of one name on one hook, and one that comes once."""

    def note(metrics):
        seen.append(("every third", metrics["n"]))

    accel.on("log", every=3)(note)

    def note(metrics):
        seen.append(("every fourth", metrics["n"]))

    accel.on("log", every=4)(note)
    accel.on("log", once=True, after=1)(lambda metrics: seen.append(("once", metrics["n"])))


def test_counters_go_on_where_a_checkpoint_was_taken(tmp_path):
    first, second = [], []
    accel = Accelerator(cpu=True)
    registered(accel, first)
    logs(accel, 5)
    accel.save_state(tmp_path / "c")
    resumed = Accelerator(cpu=True)
    registered(resumed, second)
    resumed.load_state(tmp_path / "c")
    logs(resumed, 4)
    assert first == [("once", 2), ("every third", 3), ("every fourth", 4)]
    assert second == [("every third", 1), ("every fourth", 3), ("every third", 4)]
    assert len(resumed.callbacks) == 2  # what has come once is gone here too
    resumed.save_state(tmp_path / "d")
    third = []
    again = Accelerator(cpu=True)
    again.load_state(tmp_path / "d")
    registered(again, third)  # after the load
    logs(again, 3)
    assert third == [("every third", 3), ("every fourth", 3)]


def test_a_setup_function_is_called_once_a_run_and_can_be_counted():
    accel, seen = Accelerator(cpu=True), []
    accel.on("setup")(lambda stage: seen.append(stage))
    accel.on("teardown", main_process_only=True)(lambda stage: seen.append(f"end of {stage}"))
    with accel.run("demo"):
        pass
    assert seen == ["fit", "end of fit"]


# --- handles -------------------------------------------------------------------------------------


def test_the_handle_is_the_function_and_takes_it_out():
    accel, seen = Accelerator(cpu=True), []

    @accel.on("log")
    def note(metrics):
        """Notes it."""
        seen.append(metrics["n"])
        return len(seen)

    assert (note.__name__, note.__doc__) == ("note", "Notes it.")
    assert note({"n": 7}) == 1
    with note as same:
        assert same is note
        logs(accel, 1)
    logs(accel, 2)
    assert seen == [7, 1]
    assert note.removed


def test_one_function_on_two_hooks(training):
    t, seen = training(batches=1), []

    @t.accel.on("train_epoch_end")
    @t.accel.on("train_epoch_start")
    def note(epoch):
        seen.append(epoch)

    list(t.train)
    assert seen == [0, 0]


def test_a_function_that_has_come_once_can_still_be_removed():
    accel = Accelerator(cpu=True)
    handle = accel.on("log", once=True)(lambda metrics: None)
    logs(accel, 2)
    handle.remove()
    assert accel.callbacks == []


def test_a_function_that_fails_may_be_switched_off():
    accel, seen = Accelerator(cpu=True), []

    @accel.on("log", on_error="disable")
    def fail(step):
        seen.append(step)
        raise OSError("no disk")

    with pytest.warns(UserWarning, match=r"fail:on_log.on_log failed.*OSError: no disk"):
        logs(accel, 3)
    assert seen == [1]


def test_a_function_stops_a_loop():
    accel = Accelerator(cpu=True)
    loader = accel.prepare(DataLoader(range(9)))

    @accel.on("train_batch_end", can_vote=True)
    def stop(run, batch_idx):
        if batch_idx == 2:
            run.stop("enough")

    assert len(list(loader)) == 3
    assert accel.current_run.stop_reason == "enough"
