"""Requests on one process: stop, save now, preempt; and how a preempted script ends."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import Checkpoint


class Tells(Callback):
    """Notes saves, preemptions and the end."""

    def __init__(self, code=None):
        self.told, self.code = [], code

    def resume_root(self, run):
        return "memory://nowhere", None

    def save_now(self, run, reason):
        self.told.append(f"save {run.batch_idx}: {reason}")

    def on_preempt(self, run, model, reason):
        run.exit_code = self.code
        self.told.append(f"preempt {run.batch_idx}: {reason}")

    def on_fit_end(self, run, model):
        self.told.append("fit_end")

    def on_exception(self, run, model, exception):
        self.told.append(f"exception {type(exception).__name__}")


def ask(tells, *kinds, at=1):
    """A run over one epoch of four batches in which the loop's body asks."""
    accel = Accelerator(cpu=True, callbacks=[tells] if tells else [], project_dir="memory://votes")
    loader = accel.prepare(DataLoader(range(4)))
    with accel.run("votes", resume=False) as run:
        for _ in run.epochs(2):
            for index, _ in enumerate(loader):
                if index == at:
                    for kind in kinds:
                        getattr(run, kind)(kind)
                        getattr(run, kind)("a second reason")
    return run


def test_a_save_is_made_at_the_end_of_the_body():
    tells = Tells()
    run = ask(tells, "save_now")
    assert tells.told == ["save 1: save_now", "save 1: save_now", "fit_end"]
    assert (run.epochs_done, run.stop_reason) == (2, None)


def test_a_save_that_nobody_makes_is_a_warning_once():
    with pytest.warns(UserWarning, match=r"run.save_now\('save_now'\): no callback saves") as told:
        run = ask(None, "save_now")
    assert len(told) == 1
    assert run.epochs_done == 2


def test_a_save_that_a_callback_makes_is_no_warning(recwarn):
    ask(Tells(), "save_now")
    assert not any("no callback saves" in str(warning.message) for warning in recwarn)


def test_a_save_is_made_by_checkpoint(tmp_path):
    saver = Checkpoint(tmp_path, every_n_epochs=100, async_save=False)
    accel = Accelerator(cpu=True, callbacks=[saver])
    loader = accel.prepare(DataLoader(range(4)))
    with accel.run("votes") as run:
        for index, _ in enumerate(loader):
            run.global_step += 1
            if index == 1:
                run.save_now("I say so")
            if index == 2:
                assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


def test_a_preemption_tells_the_callbacks_and_stops():
    tells = Tells()
    run = ask(tells, "preempt")
    assert tells.told == ["preempt 1: preempt", "fit_end"]
    assert (run.preempted, run.stop_reason, run.epochs_done) == (True, "preempt", 0)


def test_a_stop_and_a_preemption_at_once_keep_the_first_reason():
    tells = Tells()
    run = ask(tells, "stop", "preempt", "save_now")
    assert tells.told == ["save 1: save_now", "preempt 1: preempt", "fit_end"]
    assert run.stop_reason == "stop"


def test_a_preempted_run_ends_the_script_with_the_code_once_all_is_closed():
    tells = Tells(code=75)
    with pytest.raises(SystemExit) as ended:
        ask(tells, "preempt")
    assert ended.value.code == 75
    assert tells.told == ["preempt 1: preempt", "fit_end"]


def test_a_code_without_a_preemption_ends_nothing():
    accel = Accelerator(cpu=True)
    with accel.run("votes") as run:
        run.exit_code = 3
    accel.end_training()


def test_a_plain_loop_ends_with_the_code_at_end_training_and_only_once():
    tells = Tells(code=75)
    accel = Accelerator(cpu=True, callbacks=[tells])
    seen = 0
    for _ in accel.prepare(DataLoader(range(4))):
        seen += 1
        accel.current_run.preempt("no time left")
    with pytest.raises(SystemExit) as ended:
        accel.end_training()
    assert (seen, ended.value.code) == (1, 75)
    accel.end_training()


def test_an_error_after_a_preemption_is_what_ends_the_script():
    tells = Tells(code=75)
    accel = Accelerator(cpu=True, callbacks=[tells])
    loader = accel.prepare(DataLoader(range(4)))

    def script():
        with accel.run("votes") as run:
            for _ in loader:
                run.preempt("no time left")
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        script()
    assert tells.told == ["preempt 0: no time left", "exception OSError"]


def test_a_request_from_before_the_epochs_is_granted_before_them():
    tells = Tells()
    accel = Accelerator(cpu=True, callbacks=[tells])
    run = accel.current_run
    run.preempt("already")
    assert list(run.epochs(3)) == []
    assert tells.told == ["preempt -1: already"]


def test_requests_of_a_run_are_gone_with_it():
    tells = Tells()
    accel = Accelerator(cpu=True, callbacks=[tells])
    with accel.run("first") as first:
        pass
    first.preempt("too late")
    with accel.run("second") as second:
        assert list(second.epochs(2)) == [0, 1]
    assert not second.preempted


def test_trackers_are_told_that_a_preempted_run_was_interrupted():
    from loggers import Tracker

    class Status(Tracker):
        name = "status"
        ended = ""

        def start(self, run): ...

        def log(self, scalars, step): ...

        def finish(self, status="success"):
            self.ended = status

    seen = []
    for kind in ("stop", "preempt"):
        status = Status()
        accel = Accelerator(cpu=True, log_with=status)
        with accel.run("votes") as run:
            getattr(run, kind)("now")
            assert list(run.epochs(1)) == []
        seen.append(status.ended)
    assert seen == ["success", "interrupted"]


def test_the_stop_of_a_training_that_is_over_does_not_stop_another(training):
    t = training()
    with t.accel.run("first") as run:
        for _ in run.epochs(1):
            for batch in t.train:
                t.step(batch)
                run.stop("enough")
    assert run.stop_reason == "enough"
    for _ in range(2):  # plain ones, of which the second follows a stop too
        assert len(list(t.train)) == 2
        t.accel.current_run.stop("again")
        t.accel.end_training()


def test_an_epoch_whose_stop_was_taken_back_is_done(training):
    t = training(batches=3)
    with t.accel.run("demo") as run:
        for _ in run.epochs(2):
            for batch in t.train:
                t.step(batch)
                run.should_stop = run.current_epoch == 0
            run.should_stop = False
    assert (run.epochs_done, run.epoch_open, run.global_step) == (2, False, 1 + 3)
