"""Whether a pass over a loader is training or validation, without a word by the script."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, Callback


class Passes(Callback):
    """The stage of each batch that is delivered."""

    def __init__(self) -> None:
        self.stages = ""

    def on_train_batch_start(self, run, model, batch, batch_idx):
        self.stages += "t"

    def on_validation_batch_start(self, run, model, batch, batch_idx, *loader):
        self.stages += "v"


def prepared(*frozen: torch.nn.Module):
    passes = Passes()
    accel = Accelerator(cpu=True, callbacks=[passes])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = DataLoader(torch.ones(3, 1))
    validation = DataLoader(torch.ones(2, 1))
    return accel, passes, *accel.prepare(model, optimizer, train, validation, *frozen)


def train_on(accel, model, optimizer, loader):
    for batch in loader:
        accel.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_pass_with_gradients_off_is_validation_in_train_mode_too(context):
    accel, passes, model, optimizer, train, validation = prepared()
    for _ in range(2):
        train_on(accel, model, optimizer, train)
        with context():
            for batch in validation:
                model(batch)
    run = accel.current_run
    assert passes.stages == "tttvv" * 2
    assert (run.epochs_done, run.num_training_batches, run.num_val_batches) == (2, 3, [2])


def test_a_teacher_in_train_mode_makes_no_training_of_a_validation():
    accel, passes, model, optimizer, train, validation, teacher = prepared(torch.nn.Linear(1, 1))
    assert teacher.training
    train_on(accel, model, optimizer, train)
    model.eval()
    for batch in validation:
        model(batch)
    model.train()
    teacher.eval()
    train_on(accel, model, optimizer, train)
    assert passes.stages == "tttvvttt"


def test_of_several_models_that_are_trained_one_in_train_mode_is_enough():
    accel, passes, model, optimizer, train, _ = prepared()
    other = torch.nn.Linear(1, 1)
    other, _ = accel.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    other.eval()
    train_on(accel, model, optimizer, train)
    assert passes.stages == "ttt"
