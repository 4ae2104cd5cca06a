"""run.end_epoch: the rest of an epoch is left out, and what follows it is not."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, Callback


class Ends(Callback):
    """Asks in one hook, at one batch of the first epoch."""

    def __init__(self, hook, at):
        self.at, self.trace = at, []
        setattr(self, hook, self.ask)

    def ask(self, run, model, *args):
        if run.current_epoch == 0 and args[-1] == self.at:
            run.end_epoch("enough")

    def on_train_epoch_end(self, run, model):
        self.trace.append(("end", run.current_epoch, run.global_step))

    def on_validation_end(self, run, model):
        self.trace.append(("validated", run.current_epoch))


def train(accel, epochs=2, counted=True):
    """Return the batches that the body has seen, by epoch."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(torch.arange(8.0)[:, None], batch_size=2)
    model, optimizer, data = accel.prepare(model, optimizer, data)
    seen = []
    with accel.run("end", resume=False) as run:
        for _ in run.epochs(epochs) if counted else range(epochs):
            seen.append(0)
            for batch in data:
                with accel.accumulate(model):
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                seen[-1] += 1
            with accel.evaluate(model):
                pass
    return seen, run


@pytest.mark.parametrize("counted", [True, False])
def test_c14_asked_at_the_start_of_a_batch_leaves_it_out(counted):
    ends = Ends("on_train_batch_start", 2)
    seen, run = train(Accelerator(cpu=True, callbacks=[ends]), counted=counted)
    assert seen == [2, 4]
    assert (run.global_step, run.should_stop) == (6, False)
    ended = [one for one in ends.trace if one[0] == "end"]
    assert ended == [("end", 0, 2), ("end", 1, 6)]
    assert [one for one in ends.trace if one[0] == "validated"] == [
        ("validated", 0),
        ("validated", 1),
    ]


@pytest.mark.parametrize("at", [1, 3])
def test_c14_asked_at_the_end_of_a_batch_ends_after_it(at):
    seen, _ = train(Accelerator(cpu=True, callbacks=[Ends("on_train_batch_end", at)]))
    assert seen == [at + 1, 4]


def test_c14_a_gradient_window_is_finished_first():
    ends = Ends("on_train_batch_start", 1)
    accel = Accelerator(cpu=True, callbacks=[ends], gradient_accumulation_steps=2)
    seen, run = train(accel)
    assert seen == [2, 4]
    assert run.global_step == 3


def test_c14_the_first_batch_can_be_left_out_and_a_resume_goes_on(tmp_path):
    accel = Accelerator(cpu=True, callbacks=[Ends("on_train_batch_start", 0)])
    seen, run = train(accel, epochs=1)
    assert (seen, run.epochs_done, run.global_step) == ([0], 1, 0)
    accel.save_state(tmp_path / "c")
    again = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    data = DataLoader(torch.arange(8.0)[:, None], batch_size=2)
    *_, data = again.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    again.load_state(tmp_path / "c")
    assert again.current_run.epochs_done == 1
    assert len(list(data)) == 4
