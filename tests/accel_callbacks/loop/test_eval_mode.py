"""Models that are in eval mode, and trained all the same: hooks, checkpoints and a resume."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Callback, Checkpoint


class Seen(Callback):
    """The hooks in their order, with the index of the batch."""

    def __init__(self):
        self.hooks = []

    def on_train_start(self, run, model):
        self.hooks.append("train")

    def on_train_batch_start(self, run, model, batch, batch_idx):
        self.hooks.append(f"[{batch_idx}")

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.hooks.append(f"{batch_idx}]")

    def on_validation_start(self, run, model):
        self.hooks.append("evaluate")

    def on_validation_batch_start(self, run, model, batch, batch_idx):
        self.hooks.append(f"<{batch_idx}")

    def on_validation_batch_end(self, run, model, outputs, batch, batch_idx):
        self.hooks.append(f"{batch_idx}>")

    def on_validation_end(self, run, model):
        self.hooks.append("evaluated")


TRAINED = ["[0", "0]", "[1", "1]"]
EVALUATED = ["evaluate", "<0", "0>", "<1", "1>", "evaluated"]


def whole():
    """As from_pretrained returns a model."""
    return torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.Linear(2, 1)
    ).eval()


def probe():
    """A frozen body in eval mode, and a head that is trained."""
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)
    )
    model.eval()
    model[:2].requires_grad_(False)
    model[2].train()
    return model


def prepare(accel, model, batches=2):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return accel.prepare(model, optimizer, DataLoader(torch.ones(2 * batches, 2), batch_size=2))


def train(accel, model, optimizer, loader, stop=None):
    for batch in loader:
        with accel.accumulate(model):
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        if stop is not None and accel.loop.run.global_step == stop:
            raise KeyboardInterrupt


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("build", [whole, probe])
def test_a_model_in_eval_mode_is_trained_with_all_hooks(build, window):
    seen = Seen()
    accel = Accelerator(cpu=True, callbacks=[seen], gradient_accumulation_steps=window)
    parts = prepare(accel, build())
    modes = [module.training for module in parts[0].modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with accel.run("eval mode") as run:
            for _ in run.epochs(2):
                train(accel, *parts)
    assert seen.hooks == ["train", *TRAINED, *TRAINED]
    assert (run.global_step, run.epochs_done) == (4 // window, 2)
    assert [module.training for module in parts[0].modules()] == modes


@pytest.mark.parametrize("build", [whole, probe])
def test_a_run_in_eval_mode_that_was_killed_goes_on_exactly(tmp_path, build):
    torch.manual_seed(0)
    unbroken, start = Seen(), build()
    weights = {name: value.clone() for name, value in start.state_dict().items()}
    accel = Accelerator(cpu=True, callbacks=[unbroken])
    parts = prepare(accel, start, batches=3)
    with accel.run("eval mode") as run:
        for _ in run.epochs(2):
            train(accel, *parts)
    hooks = []
    for stop in (4, None):
        seen, model = Seen(), build()
        model.load_state_dict(weights)
        saver = Checkpoint(every_n_steps=1, async_save=False)
        accel = Accelerator(cpu=True, project_dir=tmp_path, callbacks=[seen, saver])
        parts = prepare(accel, model, batches=3)

        def loop(accel=accel, parts=parts, stop=stop):
            with accel.run("eval mode") as run:
                for _ in run.epochs(2):
                    train(accel, *parts, stop=stop)

        if stop is None:
            loop()
        else:
            with pytest.raises(KeyboardInterrupt):
                loop()
        hooks += [hook for hook in seen.hooks if hook.endswith("]")]
    # The step at which it was killed had not ended.
    assert hooks == [hook for hook in unbroken.hooks if hook.endswith("]")]
    assert all(map(torch.equal, model.parameters(), start.parameters()))


def without_gradients(accel, model, loader):
    with torch.no_grad():
        for batch in loader:
            model(batch)


def within_the_body(accel, model, loader):
    for batch in loader:
        with torch.no_grad():
            accel.gather_for_metrics(model(batch))


def with_gradients(accel, model, loader):
    for batch in loader:
        accel.gather_for_metrics(model(batch))


@pytest.mark.parametrize("evaluate", [without_gradients, within_the_body, with_gradients])
@pytest.mark.parametrize("trained", [False, True])
def test_an_evaluation_in_eval_mode_is_one(evaluate, trained):
    seen = Seen()
    accel = Accelerator(cpu=True, callbacks=[seen])
    model, optimizer, loader = prepare(accel, whole())
    other = accel.prepare(DataLoader(torch.ones(4, 2), batch_size=2))
    expected = []
    if trained:
        train(accel, model, optimizer, loader)
        expected = ["train", *TRAINED]
    evaluate(accel, model, other)
    train(accel, model, optimizer, loader)
    accel.end_training()
    again = TRAINED if trained else ["train", *TRAINED]
    assert seen.hooks == [*expected, *EVALUATED, *again]


def test_a_peek_at_the_first_batch_is_no_training():
    seen = Seen()
    accel = Accelerator(cpu=True, callbacks=[seen])
    _, _, loader = prepare(accel, whole())
    next(iter(loader))
    accel.end_training()
    assert "train" not in seen.hooks


def test_a_model_that_an_evaluation_left_in_eval_mode_is_told_and_trained():
    seen = Seen()
    accel = Accelerator(cpu=True, callbacks=[seen])
    model, optimizer, loader = prepare(accel, whole().train(), batches=3)
    train(accel, model, optimizer, loader)
    model.eval()
    with pytest.warns(UserWarning, match="an evaluation has left it.*until its first step"):
        train(accel, model, optimizer, loader)
    seen.hooks.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        train(accel, model, optimizer, loader)
    accel.end_training()
    assert seen.hooks == [*TRAINED, "[2", "2]"]


def on_ranks():
    seen = Seen()
    accel = Accelerator(cpu=True, callbacks=[seen])
    parts = prepare(accel, whole(), batches=4)
    with accel.run("eval mode") as run:
        for _ in run.epochs(2):
            train(accel, *parts)
    return seen.hooks, run.global_step


@pytest.mark.distributed
def test_the_ranks_of_a_model_in_eval_mode_agree(pool):
    expected = ["train", *TRAINED, *TRAINED], 4
    assert pool.run(on_ranks) == [expected, expected]
