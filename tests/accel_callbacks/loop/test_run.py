"""TrainingRun: steps, epochs, stopping, resuming, and how it ends."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, Callback, ResumeError
from accel_callbacks.callbacks import Checkpoint, EarlyStopping
from loggers import Tracker


class Notes(Tracker):
    """Keeps what it is told, and with which status it was finished."""

    name = "notes"

    def __init__(self):
        self.runs, self.rows, self.statuses = [], [], []

    def start(self, run):
        self.runs.append(run)

    def log(self, scalars, step):
        self.rows.append((step, dict(scalars)))

    def finish(self, status="success"):
        self.statuses.append(status)


class At(Callback):
    """Does something in one hook."""

    def __init__(self, hook, action, key="at"):
        self.key = key
        setattr(self, hook, lambda run, model, *args: action(run, *args))

    @property
    def state_key(self):
        return self.key


def train(t, run, epochs, body=lambda run: None):
    """The usual loop; returns what the model weighs in the end."""
    for _ in run.epochs(epochs):
        for batch in t.train:
            t.step(batch)
            body(run)
    return [p.detach().clone() for p in t.model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- steps and epochs ----------------------------------------------------------------------


def test_the_step_counts_optimizer_steps_and_the_epochs_are_counted(training):
    t = training(batches=3)
    seen = []
    with t.accel.run("demo") as run:
        train(t, run, 2, lambda r: seen.append((r.current_epoch, r.batch_idx, r.global_step)))
    assert seen == [(e, b, 3 * e + b + 1) for e in range(2) for b in range(3)]
    assert (run.epochs_done, run.current_epoch, run.max_epochs) == (2, 1, 2)
    assert run.num_training_batches == 3


def gan(accel):
    generator, critic = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    return accel.prepare(
        generator,
        critic,
        torch.optim.SGD(generator.parameters(), lr=0.1),
        torch.optim.SGD(critic.parameters(), lr=0.1),
        DataLoader(torch.ones(3, 1)),
    )


def test_two_optimizers_that_step_in_turn_make_one_step():
    accel = Accelerator(cpu=True)
    generator, critic, first, second, loader = gan(accel)
    steps = []
    for batch in loader:
        for model, optimizer in ((critic, second), (generator, first)):
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        steps.append(accel.current_run.global_step)
    assert steps == [1, 2, 3]


def test_a_critic_that_steps_more_often_is_what_counts():
    accel = Accelerator(cpu=True)
    generator, critic, first, second, loader = gan(accel)
    for batch in loader:
        for _ in range(5):
            accel.backward(critic(batch).sum())
            second.step()
        accel.backward(generator(batch).sum())
        first.step()
    assert accel.current_run.global_step == 15


def test_an_optimizer_prepared_later_goes_on_counting(training):
    t = training(batches=3)
    for batch in t.train:
        t.step(batch)
    t.optimizer = t.accel.prepare(torch.optim.Adam(t.model.parameters()))
    for batch in t.train:
        t.step(batch)
    assert t.accel.current_run.global_step == 6


def test_epochs_can_be_asked_for_in_several_parts(training):
    t = training()
    with t.accel.run("demo") as run:
        assert list(run.epochs(2)) == [0, 1]
        assert list(run.epochs(2)) == []
        assert list(run.epochs(4)) == [2, 3]


def test_a_loop_without_epochs_counts_passes(training):
    t = training()
    with t.accel.run("demo") as run:
        seen = []
        for _ in range(3):
            for _ in t.train:
                seen.append(run.current_epoch)
    assert seen == [0, 0, 1, 1, 2, 2]
    assert run.epochs_done == 3


def test_the_run_shows_what_lightnings_trainer_shows(training):
    notes = Notes()
    t = training(log_with=notes)
    with t.accel.run("demo", config={"lr": 0.1}) as run:
        assert run.is_global_zero
        assert run.loggers == [notes]
        assert run.logger is notes
        assert run.optimizers == [t.optimizer]
        assert run.models == [t.model]
        assert run.config == {"lr": 0.1}
        assert not run.sanity_checking
    assert notes.runs[0].name == "demo"
    assert notes.runs[0].run_id == run.run_id


# --- metrics -------------------------------------------------------------------------------


def test_metrics_keep_the_last_value_of_each_name(training):
    t = training()
    run = t.accel.current_run
    t.accel.log({"a": 1, "b": torch.tensor(2.0, requires_grad=True)})
    t.accel.log({"a": 3})
    assert run.callback_metrics["a"] == 3
    assert float(run.callback_metrics["b"]) == 2.0
    assert (
        not torch.is_tensor(run.callback_metrics["b"])
        or not run.callback_metrics["b"].requires_grad
    )
    assert run.logged_metrics is run.callback_metrics


def test_nested_metrics_are_found_by_their_flat_name(training):
    stopper = EarlyStopping("val/loss", patience=1)
    t = training(stopper)
    for _ in range(2):
        t.accel.log({"val": {"loss": 1.0}})
    assert t.accel.current_run.callback_metrics == {"val/loss": 1.0}
    assert t.accel.current_run.should_stop


def test_a_value_that_is_reset_after_it_was_logged_was_logged_before(training):
    notes = Notes()
    t = training(log_with=notes)
    total = torch.tensor(5.0)
    with t.accel.run("demo") as run:
        t.accel.log({"total": total})
        total.zero_()
        assert float(run.callback_metrics["total"]) == 5.0
    assert notes.rows == [(0, {"total": 5.0})]


def test_a_value_that_is_no_number_is_an_error_that_names_it(training):
    with pytest.raises(TypeError, match="strange"):
        training().accel.log({"strange": object()})


def test_metrics_come_back_with_a_resume(training, tmp_path):
    t = training()
    t.accel.log({"a": torch.tensor(2.0), "b": "text"})
    t.accel.save_state(tmp_path / "c")
    u = training()
    u.accel.load_state(tmp_path / "c")
    assert u.accel.current_run.callback_metrics == {"a": 2.0, "b": "text"}


# --- stopping ------------------------------------------------------------------------------


def test_a_stop_before_the_epochs_means_no_epoch(training):
    t = training()
    with t.accel.run("demo") as run:
        run.stop("no time left")
        assert list(run.epochs(3)) == []
    assert run.epochs_done == 0


def test_a_stop_before_a_plain_loop_means_no_batch(training):
    t = training()
    t.accel.current_run.stop()
    assert list(t.train) == []


def test_a_stop_in_an_epoch_ends_it_after_the_batch(training, capsys):
    t = training(batches=3)
    with t.accel.run("demo") as run:
        train(t, run, 3, lambda r: r.stop("enough") if r.global_step == 2 else None)
    assert (run.global_step, run.current_epoch, run.stop_reason) == (2, 0, "enough")
    assert "stopped at step 2: enough" in capsys.readouterr().err


def test_a_stop_after_the_last_batch_of_an_epoch_lets_it_be_done(training):
    t = training(batches=3)
    with t.accel.run("demo") as run:
        train(t, run, 3, lambda r: r.stop() if r.global_step == 3 else None)
    assert (run.global_step, run.epochs_done) == (3, 1)


def test_a_stop_between_batches_and_the_end_of_the_epoch_ends_after_it(training):
    t = training()
    with t.accel.run("demo") as run:
        for _ in run.epochs(3):
            list(t.train)
            run.stop()
    assert run.epochs_done == 1


def test_a_stop_in_a_plain_loop_ends_all_passes(training):
    t = training(batches=3)
    for _ in range(3):
        for batch in t.train:
            t.step(batch)
            if t.accel.current_run.global_step == 2:
                t.accel.current_run.should_stop = True
    assert t.accel.current_run.global_step == 2
    assert t.accel.current_run.stop_reason == "requested"


def test_the_first_reason_is_kept_and_a_stop_can_be_taken_back(training):
    run = training().accel.current_run
    run.stop("first")
    run.stop("second")
    assert run.stop_reason == "first"
    run.should_stop = False
    assert not run.should_stop
    assert run.stop_reason is None
    run.stop("third")
    assert run.stop_reason == "third"


def test_a_stop_after_the_run_changes_nothing_of_the_next(training):
    t = training()
    with t.accel.run("first") as first:
        train(t, first, 1)
    first.stop()
    with t.accel.run("second") as second:
        train(t, second, 1)
    assert second.epochs_done == 1
    assert second.stop_reason is None


def stopped_at_two(training, folder):
    t = training(Checkpoint(folder), batches=3)
    with t.accel.run("demo") as run:
        train(t, run, 2, lambda r: r.stop("slot is over") if r.global_step == 2 else None)
    return t


def test_a_run_that_was_stopped_in_an_epoch_goes_on_inside_of_it(training, tmp_path):
    whole = training(batches=3)
    with whole.accel.run("demo") as run:
        expected = train(whole, run, 2)
    stopped_at_two(training, tmp_path)
    t = training(Checkpoint(tmp_path), batches=3)
    seen = []
    with t.accel.run("demo") as run:
        weights = train(t, run, 2, lambda r: seen.append((r.current_epoch, r.batch_idx)))
    assert seen == [(0, 2), (1, 0), (1, 1), (1, 2)]
    assert (run.global_step, run.epochs_done) == (6, 2)
    assert same(weights, expected)


def test_an_early_stopped_run_that_is_started_again_does_nothing(training, tmp_path):
    def go():
        t = training(EarlyStopping("loss", patience=1), Checkpoint(tmp_path))
        with t.accel.run("demo") as run:
            for _ in run.epochs(9):
                list(t.train)
                t.accel.log({"loss": 1.0})
        return run

    first, again, third = go(), go(), go()
    assert first.epochs_done == again.epochs_done == third.epochs_done == 2
    assert again.stop_reason == first.stop_reason
    assert again.resumed_from is not None


# --- resuming ------------------------------------------------------------------------------


def test_a_path_chooses_the_checkpoint_and_false_starts_afresh(training, tmp_path, capsys):
    def saver():
        return Checkpoint(tmp_path, every_n_steps=1, keep_last=None)

    t = training(saver())
    with t.accel.run("demo") as run:
        train(t, run, 2)
    u = training(saver())
    with u.accel.run("demo", resume=str(tmp_path / "step-00000003")) as run:
        assert (run.global_step, run.current_epoch, run.epochs_done) == (3, 1, 1)
        assert run.resumed_from == str(tmp_path / "step-00000003")
        assert "resumed from" in capsys.readouterr().err
        assert same(train(u, run, 2), t.model.parameters())
    v = training(saver())
    with v.accel.run("demo", resume=False) as run:
        assert (run.global_step, run.epochs_done, run.resumed_from) == (0, 0, None)


@pytest.mark.parametrize("before", ["nothing", "evaluation", "look"])
def test_a_run_goes_on_from_a_load_state_whatever_was_looked_at_since(training, tmp_path, before):
    t = training(batches=3)
    with t.accel.run("demo") as run:
        whole = train(t, run, 2, lambda r: r.global_step == 4 and t.accel.save_state(tmp_path))
    u = training(batches=3)
    u.accel.load_state(tmp_path)
    if before == "evaluation":
        with u.accel.evaluate(u.model):
            list(u.val)
    elif before == "look":
        next(iter(u.train))
    with u.accel.run("demo", resume=False) as run:
        assert run.global_step == 4
        assert same(train(u, run, 2), whole)
        assert run.global_step == 6
    with u.accel.run("another", resume=False) as run:
        assert run.global_step == 0


def test_a_path_that_does_not_exist_is_an_error(training, tmp_path):
    t = training()
    with (
        pytest.raises(Exception, match="nowhere"),
        t.accel.run("demo", resume=str(tmp_path / "nowhere")),
    ):
        pass


def test_a_finished_run_has_nothing_left_to_do(training, tmp_path, capsys):
    for _ in range(3):
        t = training(Checkpoint(tmp_path))
        with t.accel.run("demo") as run:
            train(t, run, 2)
        assert (run.global_step, run.epochs_done, run.current_epoch) == (4, 2, 1)
    assert "nothing left to do: 2 epochs are done" in capsys.readouterr().err
    assert "train_start" not in t.recorder.trace
    assert t.recorder.trace[-2:] == ["fit_end", "teardown fit"]


def test_a_finished_run_goes_on_when_more_epochs_are_asked_for(training, tmp_path):
    whole = training()
    with whole.accel.run("demo") as run:
        expected = train(whole, run, 3)
    for epochs in (2, 3):
        t = training(Checkpoint(tmp_path))
        with t.accel.run("demo") as run:
            weights = train(t, run, epochs)
    assert same(weights, expected)


def test_a_resume_after_epochs_that_were_cut_by_a_break_is_exact(training, tmp_path):
    """Two batches of each epoch of four, as `limit_train_batches` would have it."""

    def go(epochs, *callbacks):
        t = training(*callbacks, batches=4)
        with t.accel.run("demo") as run:
            for _ in run.epochs(epochs):
                for index, batch in enumerate(t.train):
                    t.step(batch)
                    if index == 1:
                        break
        return [p.detach().clone() for p in t.model.parameters()]

    expected = go(3)
    go(1, Checkpoint(tmp_path))
    assert same(go(3, Checkpoint(tmp_path)), expected)


@pytest.mark.parametrize("epochs_counted", [True, False])
def test_a_save_after_any_step_resumes_to_bitwise_the_same_weights(
    training, tmp_path, epochs_counted
):
    def loop(t, run, save_at=None):
        for _ in run.epochs(2) if epochs_counted else range(run.epochs_done, 2):
            for batch in t.train:
                t.step(batch)
                if run.global_step == save_at:
                    t.accel.save_state(tmp_path / str(save_at))
                    return None
        return [p.detach().clone() for p in t.model.parameters()]

    expected = loop(whole := training(batches=3), whole.accel.current_run)
    for step in range(1, 7):
        t = training(batches=3)
        loop(t, t.accel.current_run, save_at=step)
        u = training(batches=3)
        torch.manual_seed(999)
        u.accel.load_state(tmp_path / str(step))
        assert same(loop(u, u.accel.current_run), expected), step


def test_a_save_before_the_step_trains_on_that_batch_after_the_resume(training, tmp_path):
    def loop(t, save=False):
        for index, batch in enumerate(t.train):
            if save and index == 1:
                t.accel.save_state(tmp_path / "c")
                return None
            t.step(batch)
        return [p.detach().clone() for p in t.model.parameters()]

    expected = loop(training(batches=3))
    loop(training(batches=3), save=True)
    t = training(batches=3)
    t.accel.load_state(tmp_path / "c")
    assert same(loop(t), expected)


def test_a_hook_that_saves_saves_what_a_resume_needs(training, tmp_path):
    hooks = ("on_train_batch_end", "on_after_optimizer_step", "on_train_epoch_end", "on_log",
             "on_validation_end", "on_train_end")  # fmt: skip
    for hook in hooks:
        folder = tmp_path / hook
        saver = At(hook, lambda run, *_: run.accelerator.save_state(folder))  # noqa: B023
        t = training(saver)
        with t.accel.run("demo") as run:
            for _ in run.epochs(2):
                for batch in t.train:
                    t.step(batch)
                t.accel.log({"a": 1})
                with t.accel.evaluate(t.model):
                    list(t.val)
        # The last save is at the end of the last epoch or after it: nothing is left to train on.
        u = training()
        with u.accel.run("demo", resume=str(folder)) as run:
            weights = train(u, run, 2)
        assert (run.global_step, run.epochs_done) == (4, 2), hook
        assert same(weights, t.model.parameters()), hook


def test_a_resume_that_does_not_fit_changes_nothing_and_the_next_run_works(training, tmp_path):
    accel = Accelerator(cpu=True)
    accel.prepare(torch.nn.Linear(2, 1))
    accel.save_state(tmp_path / "c")
    t = training()
    before = [p.detach().clone() for p in t.model.parameters()]
    with pytest.raises(ResumeError), t.accel.run("demo", resume=str(tmp_path / "c")):
        pass
    assert same(before, t.model.parameters())
    with t.accel.run("demo") as run:
        train(t, run, 1)
    assert (run.global_step, run.epochs_done) == (2, 1)


def test_a_run_that_could_not_begin_is_torn_down_and_not_ended_well(training, tmp_path):
    notes = Notes()
    t = training(At("on_fit_start", lambda run: 1 / 0), log_with=notes)
    with pytest.raises(ZeroDivisionError), t.accel.run("demo"):
        pass
    t.accel.end_training()
    assert "fit_end" not in t.recorder.trace
    assert "teardown fit" in t.recorder.trace
    assert notes.statuses == ["failed"]


# --- the end -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "success"), (ValueError, "failed"), (KeyboardInterrupt, "interrupted")],
)
def test_trackers_are_finished_with_how_the_run_ended(training, error, status):
    notes = Notes()
    t = training(log_with=notes)

    def go():
        with t.accel.run("demo") as run:
            t.accel.log({"a": 1})
            for _ in run.epochs(2):
                for batch in t.train:
                    t.step(batch)
                    if error is not None:
                        raise error

    if error is None:
        go()
    else:
        with pytest.raises(error):
            go()
        assert t.recorder.trace[-2:] == [f"exception {error.__name__}", "teardown fit"]
        assert t.accel.current_run.epochs_done == 0
    assert notes.statuses == [status]


@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
def test_an_error_in_a_hook_does_not_hide_the_exception_that_ended_the_run(training, hook, capsys):
    def fail(*_):
        raise LookupError("in the hook")

    t = training(At(hook, fail))
    with pytest.raises(ZeroDivisionError), t.accel.run("demo"):
        raise ZeroDivisionError
    assert "LookupError: in the hook" in capsys.readouterr().err
    assert t.recorder.trace[-2:] == ["exception ZeroDivisionError", "teardown fit"]


def test_an_error_in_a_hook_of_the_loop_ends_the_run_with_it(training):
    notes = Notes()
    t = training(At("on_train_batch_end", lambda *_: 1 / 0), log_with=notes)
    with pytest.raises(ZeroDivisionError), t.accel.run("demo") as run:
        train(t, run, 1)
    assert notes.statuses == ["failed"]
    assert t.recorder.trace[-2:] == ["exception ZeroDivisionError", "teardown fit"]


def test_an_error_in_an_end_hook_still_tears_the_run_down(training):
    t = training(At("on_train_end", lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError), t.accel.run("demo") as run:
        train(t, run, 1)
    assert t.recorder.trace[-1] == "teardown fit"


def test_each_callback_is_torn_down_once_where_the_teardown_of_one_fails(training):
    torn = []

    def tear(run, stage):
        torn.append("fails")
        raise ZeroDivisionError

    t = training(At("teardown", lambda run, stage: torn.append("other")), At("teardown", tear, "b"))
    with pytest.raises(ZeroDivisionError), t.accel.run("demo") as run:
        train(t, run, 1)
    assert torn == ["fails", "other"]
    assert t.recorder.trace[-2:] == ["exception ZeroDivisionError", "teardown fit"]
    t.recorder.take()
    with pytest.raises(ZeroDivisionError), t.accel.run("again") as run:
        train(t, run, 1)
    assert torn == ["fails", "other"] * 2


def test_training_is_training_after_an_evaluation_could_not_begin(training):
    t = training(At("on_validation_epoch_start", lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError), t.accel.evaluate(t.model):
        pass
    assert t.accel.loop.phase == "train"


def test_an_error_in_an_end_hook_does_not_come_back_in_the_next_run(training):
    calls = []

    def fail_once(run):
        calls.append(run.name)
        if len(calls) == 1:
            raise ZeroDivisionError

    t = training(At("on_train_end", fail_once))
    with pytest.raises(ZeroDivisionError), t.accel.run("first") as run:
        train(t, run, 1)
    with t.accel.run("second") as run:
        train(t, run, 1)
    assert calls == ["first", "second"]


def test_runs_after_runs_and_after_failed_ones_fire_whole_lives(training):
    t = training()
    for name in ("first", "failed", "third"):
        t.recorder.take()
        try:
            with t.accel.run(name) as run:
                for _ in run.epochs(1):
                    for batch in t.train:
                        t.step(batch)
                        if name == "failed":
                            raise ZeroDivisionError
        except ZeroDivisionError:
            assert (run.epochs_done, run.current_epoch, run.epoch_open) == (0, 0, True)
        else:
            assert t.recorder.trace[:3] == ["setup fit", "fit_start", "train_start"]
            assert t.recorder.trace[-3:] == ["train_end", "fit_end", "teardown fit"]
            assert t.recorder.trace.count("train_epoch_start 0") == 1
            assert (run.name, run.epochs_done, run.current_epoch) == (name, 1, 0)


def test_a_second_run_counts_its_own_steps(training):
    t = training()
    for _ in range(2):
        with t.accel.run("demo") as run:
            train(t, run, 1)
        assert run.global_step == 2


def test_a_second_run_reads_the_epochs_from_the_first_on(training):
    t = training(batches=8)
    orders = []
    for _ in range(2):
        torch.manual_seed(3)  # of which the order is drawn
        with t.accel.run("demo"):
            orders.append([batch.flatten().tolist() for batch in t.train])
            assert t.accel.current_run.current_epoch == 0
    assert orders[0] == orders[1]


def test_two_runs_have_two_ids_and_a_resumed_one_keeps_its_own(training, tmp_path):
    ids = []
    for resume in (False, False, True):
        t = training(Checkpoint(tmp_path))
        with t.accel.run("demo", resume=resume) as run:
            train(t, run, 2 if resume else 1)
        ids.append(run.run_id)
    assert ids[0] != ids[1]
    assert ids[2] == ids[1]


# --- where in the body of an epoch a save is -----------------------------------------------


def in_turn(t, extra, note):
    for batch in t.train:
        t.step(batch)
        note()
    note()
    for batch in extra:
        t.step(batch)
        note()


def train_on(t):
    for batch in t.train:
        t.step(batch)


def side_by_side(t, extra, note):
    for batch, other in zip(t.train, extra, strict=False):
        t.step(batch + other)
        note()


def inside(t, extra, note):
    for batch in t.train:
        for other in extra:
            t.step(batch + other)
        note()


@pytest.mark.parametrize("body", [in_turn, side_by_side, inside])
def test_a_resume_from_anywhere_in_an_epoch_takes_the_same_steps(training, tmp_path, body):
    saved = []

    def go(start, save):
        t = training()
        extra = t.accel.prepare(DataLoader(torch.arange(4.0).reshape(-1, 1), 2, shuffle=True))

        def note():
            if save:
                saved.append(t.accel.save_state(tmp_path / str(len(saved))))

        if start is not None:
            t.accel.load_state(start)
        with t.accel.run("demo", resume=False) as run:
            for _ in run.epochs(3):
                note()
                body(t, extra, note)
                note()
        return run.global_step, t.model.weight.detach().clone()

    steps, whole = go(None, save=True)
    for path in saved:
        assert go(path, save=False) == (steps, whole), path


def test_an_evaluation_on_the_training_data_does_not_hide_that_its_epoch_is_trained(
    training, tmp_path
):
    t = training()
    with t.accel.run("demo") as run:
        for _ in run.epochs(1):
            train_on(t)
            with t.accel.evaluate(t.model):
                list(t.train)
            t.accel.save_state(tmp_path)
    u = training()
    u.accel.load_state(tmp_path)
    with u.accel.run("demo", resume=False) as run:
        for _ in run.epochs(2):
            train_on(u)
    assert run.global_step == 4


def test_in_a_plain_loop_too_loaders_side_by_side_begin_the_next_epoch_together(training, tmp_path):
    def made():
        t = training()
        return t, t.accel.prepare(DataLoader(torch.arange(4.0).reshape(-1, 1), 2))

    t, extra = made()
    side_by_side(t, extra, lambda: t.accel.save_state(tmp_path))  # the last time in the last batch
    for asks in (True, False):  # a script that does not count by the run counts the epoch as done
        u, other = made()
        u.accel.load_state(tmp_path)
        if asks:
            assert u.accel.current_run.epochs_done == 0
            assert list(zip(u.train, other, strict=False)) == []
        assert len(list(zip(u.train, other, strict=False))) == 2


def test_a_stop_inside_of_a_gradient_window_waits_for_its_end(training):
    t = training(batches=4, gradient_accumulation_steps=2)
    with t.accel.run("demo") as run:
        for _ in run.epochs(1):
            for batch in t.train:
                with t.accel.accumulate(t.model):
                    t.step(batch)
                run.stop("asked")
    assert (run.global_step, t.train.position, t.accel.window.dirty) == (1, 4, False)
