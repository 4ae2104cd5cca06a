"""A run inside of another one, and parts that are prepared inside of a run."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Callback, Checkpoint


def prepare(accel):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accel.prepare(model, optimizer, DataLoader(torch.ones(4, 1)))


def train(accel, model, optimizer, data):
    for batch in data:
        accel.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()


class Ends(Callback):
    def __init__(self):
        self.seen = []

    def on_fit_end(self, run, model):
        self.seen.append((run.name, run.global_step))

    def on_exception(self, run, model, exception):
        self.seen.append((run.name, run.global_step, type(exception).__name__))


def test_a_run_inside_of_a_run_is_an_error_there(tmp_path):
    ends = Ends()
    accel = Accelerator(
        cpu=True, project_dir=tmp_path, callbacks=[ends, Checkpoint(every_n_steps=4)]
    )
    parts = prepare(accel)
    with accel.run("outer") as outer:
        train(accel, *parts)
        expected = r"accel.run\('inner'\) inside of accel.run\('outer'\).*Accelerator of its own"
        with pytest.raises(RuntimeError, match=expected), accel.run("inner", resume=False):
            pass
        assert ends.seen == []
        train(accel, *parts)  # it goes on where it was
        assert outer.global_step == 8
    assert ends.seen == [("outer", 8)]
    with accel.run("after", resume=False) as after:
        train(accel, *parts)
    assert after.global_step == 4


def test_a_script_that_does_not_catch_it_fails_as_one(tmp_path):
    ends = Ends()
    accel = Accelerator(cpu=True, project_dir=tmp_path, callbacks=[ends])
    parts = prepare(accel)

    def fail():
        with accel.run("outer"):
            train(accel, *parts)
            with accel.run("inner"):
                pass

    with pytest.raises(RuntimeError, match="inside of"):
        fail()
    assert ends.seen == [("outer", 4, "RuntimeError")]
    with accel.run("again") as again:  # a run that failed is no open run
        train(accel, *parts)
    assert again.global_step == 4


def test_another_accelerator_may_have_a_run_inside(tmp_path):
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    parts, others = prepare(first), prepare(second)
    with first.run("outer") as outer:
        train(first, *parts)
        with second.run("inner") as inner:
            train(second, *others)
        train(first, *parts)
    assert (outer.global_step, inner.global_step) == (8, 4)


def test_parts_that_are_prepared_inside_are_told_at_the_first_save(tmp_path):
    accel = Accelerator(cpu=True, project_dir=tmp_path, callbacks=[Checkpoint(every_n_steps=2)])
    told = pytest.warns(UserWarning, match=r"inside of accel.run\('late'\).*before\s+`with accel")
    with told as warned, accel.run("late"):
        train(accel, *prepare(accel))
    assert len([w for w in warned if "inside of accel.run" in str(w.message)]) == 1


def test_parts_that_are_prepared_before_are_not(tmp_path):
    accel = Accelerator(cpu=True, project_dir=tmp_path, callbacks=[Checkpoint(every_n_steps=2)])
    parts = prepare(accel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with accel.run("early"):
            train(accel, *parts)
            accel.prepare(DataLoader(torch.ones(2, 1)))  # for an evaluation
            accel.save_state()
