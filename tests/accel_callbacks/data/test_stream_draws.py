"""Streams that draw from torch's generator give the samples of a plain loop and of a resume."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Callback, Checkpoint


class Masked(IterableDataset):
    """Samples with a mask of torch's global generator."""

    def __iter__(self):
        for index in range(7):
            yield torch.full((4,), float(index)) * (torch.rand(4) > 0.5)


class Votes(Callback):
    """A callback that is asked at each batch, and counts them."""

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.batch_idx = batch_idx


def parts(seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, DataLoader(Masked(), batch_size=2)


def plain(epochs=2):
    model, optimizer, loader = parts()
    losses = []
    for _ in range(epochs):
        for batch in loader:
            losses.append(model(batch).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses).tolist()


def prepared(accel, seed=0, stop=None, epochs=2):
    model, optimizer, loader = accel.prepare(*parts(seed))
    losses = []
    with accel.run("masks") as run:
        for _ in run.epochs(epochs):
            for batch in loader:
                with accel.accumulate(model):
                    losses.append(model(batch).square().mean())
                    accel.backward(losses[-1])
                    optimizer.step()
                    optimizer.zero_grad()
                if len(losses) == stop:
                    raise KeyboardInterrupt
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("callbacks", [(), (Votes(),)], ids=["bare", "votes"])
def test_masks_and_dropout_are_those_of_the_plain_loop(callbacks):
    assert prepared(Accelerator(cpu=True, callbacks=callbacks)) == plain()


@pytest.mark.parametrize("stop", [2, 3, 4, 5])
def test_a_resume_draws_the_masks_that_the_unbroken_run_draws(tmp_path, stop):
    def accelerator():
        return Accelerator(cpu=True, callbacks=[Checkpoint(tmp_path, every_n_steps=1)])

    with pytest.raises(KeyboardInterrupt):
        prepared(accelerator(), stop=stop)
    resumed = prepared(accelerator(), seed=1)
    assert 8 - stop <= len(resumed) <= 9 - stop
    assert resumed == plain()[-len(resumed) :]


def test_an_error_in_a_sample_comes_after_the_step_before_it_also_where_the_end_is_asked_for():
    class Torn(IterableDataset):
        def __iter__(self):
            yield 0
            yield 1
            raise ValueError("torn")

    accel = Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = accel.prepare(DataLoader(Torn(), batch_size=1))
    batches = iter(loader)
    assert [(next(batches).item(), loader.on_last) for _ in range(2)] == [(0, False), (1, False)]
    with pytest.raises(ValueError, match="torn"):
        next(batches)
