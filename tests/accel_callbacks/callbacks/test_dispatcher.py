"""Order, policies for errors, the ledger, and callbacks that come and go while a loop runs."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, Callback, GradScalerKwargs
from accel_callbacks.callbacks import CallbackTime, EarlyStopping, configured
from accel_callbacks.callbacks.dispatch.ledger import MOST_ROWS


class Named(Callback):
    """Tells a shared list of each log and each batch."""

    def __init__(self, name, calls=None, **options):
        self.name, self.calls = name, [] if calls is None else calls
        vars(self).update(options)

    @property
    def state_key(self):
        return self.name

    def on_log(self, run, model, metrics, step):
        self.calls.append(self.name)

    def on_train_batch_start(self, run, model, batch, batch_idx):
        self.calls.append(f"{self.name} start {batch_idx}")

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.calls.append(f"{self.name} end {batch_idx}")


class Special(Named):
    """A class of its own, to be named in constraints."""


def log(accel, times):
    for _ in range(times):
        accel.log({"x": 1.0})


def order_of(*callbacks):
    """The names in the order of their calls."""
    calls = []
    accel = Accelerator(cpu=True, callbacks=callbacks)
    for callback in accel.callbacks:
        callback.calls = calls
    accel.log({"x": 1.0})
    return "".join(calls)


# --- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "abcd"),
        ({"a": {"after": "c"}}, "bcad"),
        ({"d": {"before": "b"}}, "acdb"),
        ({"a": {"after": ("d", "b")}}, "bcda"),
        ({"c": {"before": "a"}, "d": {"after": "b"}}, "bcad"),
        ({"a": {"after": "b"}, "b": {"after": "c"}, "c": {"after": "d"}}, "dcba"),
        ({"a": {"runs_last": True}}, "bcda"),
        ({"a": {"runs_last": True}, "b": {"after": "a"}}, "cdab"),
        ({"a": {"runs_last": True, "before": "c"}}, "bdac"),
    ],
)
def test_each_callback_waits_for_those_before_it_and_else_keeps_its_place(options, expected):
    assert order_of(*(Named(name, **options.get(name, {})) for name in "abcd")) == expected


def test_constraints_name_objects_classes_with_their_subclasses_and_keys():
    c = Named("c")
    assert order_of(Named("a", after=c), Named("b"), c) == "bca"
    assert order_of(Named("a", after=Special), Named("b"), Special("s")) == "bsa"
    assert order_of(Special("s", before=Named), Named("a"), Special("t", after="Named")) == "sat"
    assert (
        order_of(configured(configured(Named("a"), after="b"), after="c"), Named("b"), c) == "bca"
    )


def test_a_class_that_nobody_is_of_means_nothing():
    assert order_of(Named("a", after=EarlyStopping), Named("b", before=(EarlyStopping,))) == "ab"


@pytest.mark.parametrize("value", [0, 2.5, None, torch.ones(2), {"loss": 1.0}])
def test_an_attribute_that_means_something_else_is_no_constraint(value):
    assert order_of(Named("a", before=value, after=value), Named("b")) == "ab"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("EarlyStopping:los", r"'EarlyStopping:los', and no such.*mean 'EarlyStopping:loss'"),
        (Named("elsewhere"), "a is to be called before or after Named, and no such callback"),
    ],
)
def test_a_name_or_an_object_that_nobody_is_is_refused(target, says):
    with pytest.raises(ValueError, match=says):
        Accelerator(cpu=True, callbacks=[EarlyStopping("loss"), Named("a", after=target)])


@pytest.mark.parametrize(
    ("after", "says"),
    [
        ({"a": "b", "b": "a"}, "b before a before b|a before b before a"),
        ({"a": "c", "b": "a", "c": "b"}, "(a before b before c|b before c|c before a before b)"),
    ],
)
def test_a_circle_is_refused_with_its_names(after, says):
    with pytest.raises(ValueError, match=f"wait for each other: .*{says}"):
        order_of(*(Named(name, after=after.get(name, ())) for name in "abc"))


def test_a_callback_that_is_refused_leaves_the_others_as_they_were():
    first = Named("a")
    accel = Accelerator(cpu=True, callbacks=[first])
    for wrong in (first, Named("b", after="nobody"), Named("b", on_error="ignore"), Named):
        with pytest.raises((ValueError, TypeError)):
            accel.add_callback(wrong)
    assert accel.callbacks == [first]
    accel.log({"x": 1.0})
    assert first.calls == ["a"]


# --- what is no callback -------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_predict_batch_end", "on_sanity_check_start"])
def test_a_hook_that_only_a_trainer_fires_is_refused_with_that_reason(hook):
    callback = Callback()
    setattr(callback, hook, lambda *args: None)
    with pytest.raises(TypeError, match=f"Callback.{hook} would never be called: only the Trainer"):
        Accelerator(cpu=True, callbacks=[callback])


@pytest.mark.slow  # the import alone
def test_a_callback_for_the_trainer_of_transformers_is_refused():
    transformers = pytest.importorskip("transformers")

    class Own(transformers.TrainerCallback):
        pass

    with pytest.raises(TypeError, match="Own is a callback for the Trainer of transformers"):
        Accelerator(cpu=True, callbacks=[Own()])


def test_a_callback_of_lightning_is_taken_in_its_adapter():
    lightning = pytest.importorskip("lightning.pytorch.callbacks")
    stopper = lightning.EarlyStopping("val", patience=1)
    wrapped = configured(lightning.LambdaCallback(), before=lightning.EarlyStopping)
    accel = Accelerator(cpu=True, callbacks=[stopper, wrapped])
    assert "  1  LambdaCallback" in accel.describe_callbacks()
    assert stopper not in accel.callbacks
    accel.remove_callback(stopper)
    assert len(accel.callbacks) == 1


# --- errors --------------------------------------------------------------------------------------


class Breaks(Named):
    """Raises in the log of one value."""

    def on_log(self, run, model, metrics, step):
        super().on_log(run, model, metrics, step)
        raise metrics.get("error", ValueError)("broken")


def test_an_error_with_raise_reaches_the_loop():
    accel = Accelerator(cpu=True, callbacks=[Breaks("a")])
    with pytest.raises(ValueError, match="broken"):
        accel.log({"x": 1.0})


@pytest.mark.parametrize(
    ("policy", "calls", "says"),
    [
        ("warn", 3, "a.on_log failed; the callback stays enabled"),
        ("disable", 1, "a.on_log failed; the callback is disabled"),
    ],
)
@pytest.mark.parametrize("given", ["attribute", "configured", "added"])
def test_an_error_can_be_a_warning(policy, calls, says, given, caplog):
    first, second = Breaks("a"), Named("b")
    if given == "attribute":
        first.on_error = policy
    if given == "added":
        accel = Accelerator(cpu=True, callbacks=[second])
        accel.add_callback(first, before=second, on_error=policy)
    else:
        option = policy if given == "configured" else None
        accel = Accelerator(cpu=True, callbacks=[configured(first, on_error=option), second])
    caplog.set_level(logging.WARNING, logger="accel_callbacks")
    with pytest.warns(UserWarning, match=f"{says}.*ValueError: broken") as told:
        log(accel, 3)
    assert len(told) == calls
    assert first.calls == ["a"] * calls
    assert second.calls == ["b"] * 3
    assert "Traceback" in caplog.text
    assert ("switched off" in accel.describe_callbacks()) == (policy == "disable")


def test_what_is_called_no_more_closes_what_it_holds_and_its_state_is_kept(tmp_path):
    class Held(Callback):
        torn, broken = 0, False

        def on_log(self, run, model, metrics, step):
            raise ValueError("broken")

        def teardown(self, run, model, stage):
            self.torn += 1

        def state_dict(self):
            if self.broken:
                raise OSError("gone")
            return {"torn": self.torn}

    held = Held()
    accel = Accelerator(cpu=True, callbacks=[configured(held, on_error="disable")])
    accel.save_state(str(tmp_path / "a"))
    with accel.run("held"), pytest.warns(UserWarning, match="Held.on_log failed"):
        accel.log({"x": 1.0})
    assert held.torn == 1
    held.broken = True
    with pytest.warns(UserWarning, match="Held.state_dict failed"):
        path = accel.save_state(str(tmp_path / "b"))
    held.broken = False
    accel.load_state(path)


@pytest.mark.parametrize("policy", ["warn", "disable"])
def test_an_interrupt_passes_every_policy(policy):
    class Interrupted(Callback):
        def on_log(self, run, model, metrics, step):
            raise KeyboardInterrupt

    accel = Accelerator(cpu=True, callbacks=[configured(Interrupted(), on_error=policy)])
    with pytest.raises(KeyboardInterrupt):
        accel.log({"x": 1.0})


def test_a_callback_that_meets_other_processes_must_raise():
    class Meets(Callback):
        collective = True

    with pytest.raises(ValueError, match=r"Meets calls collectives.*'warn'"):
        Accelerator(cpu=True, callbacks=[configured(Meets(), on_error="warn")])


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="on_error='ignore' is unknown"):
        configured(Callback(), on_error="ignore")


# --- the ledger ----------------------------------------------------------------------------------


def test_the_report_counts_calls_and_time_of_each_callback_and_hook():
    accel = Accelerator(cpu=True, callbacks=[Named("a"), Breaks("b", on_error="warn")])
    with pytest.warns(UserWarning, match="b.on_log"):
        log(accel, 3)
    report = accel.callback_report()
    counted = {(row.callback, row.hook): row for row in report.rows}
    assert {key: row.calls for key, row in counted.items()} == {
        ("a", "on_log"): 3,
        ("b", "on_log"): 3,
    }
    for row in report.rows:
        assert 0 < row.max_s <= row.total_s
        assert row.mean_s == row.total_s / 3
    assert report.rows[0].total_s >= report.rows[1].total_s
    assert report.total_s == sum(row.total_s for row in report.rows)
    head, *body = str(report).splitlines()
    assert head.split() == ["callback", "hook", "calls", "total", "ms", "mean", "us", "max", "us"]
    assert sorted(line.split()[:3] for line in body) == [["a", "on_log", "3"], ["b", "on_log", "3"]]


def calls_of(accel):
    """The number of calls in the report, by name."""
    return {row.callback: row.calls for row in accel.callback_report().rows}


def test_callbacks_of_one_hook_share_clock_reads_and_few_of_them_wait_to_be_added_up():
    accel = Accelerator(cpu=True, callbacks=[Named("a"), Named("b"), Named("c")])
    dispatch = accel.loop.dispatch
    assert len(dispatch.hooks["on_log"]) == 1
    assert [entry.name for entry in dispatch.called("on_log")] == ["a", "b", "c"]
    waiting = []
    for _ in range(3 * MOST_ROWS // 2):
        log(accel, 1)
        waiting.append(len(dispatch.ledger.rows))
    assert 0 < max(waiting) < MOST_ROWS
    assert calls_of(accel) == dict.fromkeys("abc", 3 * MOST_ROWS // 2)


def test_of_callbacks_that_share_a_hook_those_after_an_error_count_no_call():
    accel = Accelerator(cpu=True, callbacks=[Named("a"), Breaks("b"), Named("c")])
    with pytest.raises(ValueError, match="broken"):
        log(accel, 1)
    assert calls_of(accel) == {"a": 1, "b": 1}


def test_of_callbacks_that_share_a_hook_one_that_is_removed_meanwhile_counts_no_call():
    class Removes(Named):
        def on_log(self, run, model, metrics, step):
            handle.remove()

    accel = Accelerator(cpu=True, callbacks=[Removes("a")])
    handle = accel.add_callback(Named("b"))
    accel.add_callback(Named("c"))
    log(accel, 1)
    assert calls_of(accel) == {"a": 1, "c": 1}


def test_a_report_of_nothing_is_a_head():
    assert Accelerator(cpu=True).callback_report().rows == ()
    assert CallbackTime("a", "on_log", 0, 0.0, 0.0).mean_s == 0.0


def test_callbacks_without_a_key_are_told_apart():
    class Hello:
        def on_log(self, run, model, metrics, step): ...

    accel = Accelerator(cpu=True, callbacks=[Hello(), Hello()])
    name = Hello.__qualname__
    accel.log({"x": 1.0})
    assert {row.callback for row in accel.callback_report().rows} == {name, f"{name}#2"}
    assert f"{name}, {name}#2" in accel.describe_callbacks()


def test_the_plan_tells_who_is_called_where():
    accel = Accelerator(cpu=True, callbacks=[Named("b", runs_last=True), Named("a", can_vote=True)])
    hooks = ["on_log", "on_train_batch_end", "on_train_batch_start"]
    *head, first, second, third = accel.describe_callbacks().splitlines()
    assert head == ["callbacks", "  1  a  votes", "  2  b  runs last", "hooks"]
    assert sorted(line.split()[0] for line in (first, second, third)) == hooks
    assert all(line.endswith("  a, b") for line in (first, second, third))
    assert Accelerator(cpu=True).describe_callbacks() == "no callbacks"


# --- coming and going ----------------------------------------------------------------------------


def test_callbacks_come_and_go_in_the_middle_of_a_pass():
    accel = Accelerator(cpu=True)
    loader = accel.prepare(DataLoader(range(6)))
    late = Named("late")
    for index, _ in enumerate(loader):
        if index == 1:
            handle = accel.add_callback(late)
        if index == 3:
            handle.remove()
            handle.remove()  # a second time does nothing
    assert late.calls == ["late end 1", "late start 2", "late end 2", "late start 3"]
    assert handle.removed
    assert accel.callbacks == []


def test_a_handle_is_a_context_manager():
    accel, callback = Accelerator(cpu=True), Named("a")
    with accel.add_callback(callback) as handle:
        assert handle.callback is callback
        accel.log({"x": 1.0})
    accel.log({"x": 1.0})
    assert callback.calls == ["a"]


def test_what_is_removed_inside_of_a_hook_is_not_called_any_more():
    class Removes(Callback):
        def on_log(self, run, model, metrics, step):
            run.accelerator.remove_callback(later)
            run.accelerator.add_callback(new)

    later, new = Named("later"), Named("new")
    removes = Removes()
    accel = Accelerator(cpu=True, callbacks=[removes, later])
    accel.log({"x": 1.0})
    assert (later.calls, new.calls) == ([], [])  # the new one from the next call on
    accel.remove_callback(removes)
    accel.log({"x": 1.0})
    assert (later.calls, new.calls) == ([], ["new"])


def test_removing_what_is_not_there_is_an_error_that_says_who_is():
    accel = Accelerator(cpu=True, callbacks=[Named("a")])
    with pytest.raises(ValueError, match="Special is not registered; there are: a"):
        accel.remove_callback(Special("b"))


def test_a_callback_of_a_run_that_is_on_is_set_up_at_once_and_torn_down(training):
    told = []

    class Opens(Callback):
        def setup(self, run, model, stage):
            told.append(f"setup {stage}")

        def teardown(self, run, model, stage):
            told.append(f"teardown {stage}")

    t = training()
    outside = t.accel.add_callback(Opens())
    outside.remove()
    assert told == []
    with t.accel.run("demo"):
        with t.accel.add_callback(Opens()):
            assert told == ["setup fit"]
        assert told == ["setup fit", "teardown fit"]
        t.accel.add_callback(Opens())
    assert told == ["setup fit", "teardown fit"] * 2


class Counts(Callback):
    """Keeps how many batches it has seen."""

    count = 0

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_a_callback_that_comes_after_a_resume_is_given_its_state(training, tmp_path):
    t = training(Counts())
    list(t.train)
    t.accel.save_state(tmp_path / "c")
    resumed, late = training(), Counts()
    resumed.accel.load_state(tmp_path / "c")
    resumed.accel.add_callback(late)
    assert late.count == 2
    list(resumed.train)
    assert late.count == 4


def test_a_removed_callback_leaves_no_state(training, tmp_path):
    t, counts = training(), Counts()
    with t.accel.add_callback(counts):
        list(t.train)
    t.accel.save_state(tmp_path / "c")
    resumed = training(late := Counts())
    resumed.accel.load_state(tmp_path / "c")
    assert (counts.count, late.count) == (2, 0)


def test_a_step_may_be_left_out(training):
    class Skips(Callback):
        def on_before_optimizer_step(self, run, model, optimizer):
            if run.batch_idx == 1:
                run.skip_step("too large")

    steps = []

    class After(Callback):
        def on_after_optimizer_step(self, run, model, optimizer):
            steps.append(run.global_step)

    t = training(Skips(), After(), batches=3)
    scheduler = t.accel.prepare(torch.optim.lr_scheduler.StepLR(t.optimizer, 1, gamma=0.5))
    seen = []
    for batch in t.train:
        before = t.model.weight.detach().clone()
        t.step(batch)
        scheduler.step()
        moved = not torch.equal(before, t.model.weight)
        seen.append((t.optimizer.step_was_skipped, moved, scheduler.get_last_lr()))
    assert seen == [(False, True, [0.05]), (True, False, [0.05]), (False, True, [0.025])]
    assert steps == [1, 2]
    assert t.accel.current_run.global_step == 2
    assert t.model.weight.grad is None


def test_a_step_that_is_left_out_lets_the_scale_of_fp16_follow(training):
    class Skips(Callback):
        def on_before_optimizer_step(self, run, model, optimizer):
            if not all(torch.isfinite(p.grad).all() for p in model.parameters()):
                run.skip_step("not finite")

    scaler = GradScalerKwargs(init_scale=4.0)
    t = training(Skips(), batches=3, mixed_precision="fp16", kwargs_handlers=[scaler])
    scales = [t.accel.scaler.get_scale()]
    for index, batch in enumerate(t.train):
        t.accel.backward(t.model(batch).mean() * (float("inf") if index == 1 else 1.0))
        t.optimizer.step()
        t.optimizer.zero_grad()
        t.accel.precision.state_dict()  # what is due of the scale is done
        scales.append(t.accel.scaler.get_scale())
    assert scales == [4.0, 4.0, 2.0, 2.0]
    assert t.accel.current_run.global_step == 2


def test_a_step_cannot_be_left_out_elsewhere(training):
    with pytest.raises(RuntimeError, match="on_before_optimizer_step"):
        training().accel.current_run.skip_step("no")
