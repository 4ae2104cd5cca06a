"""evaluate(checkpoint=...) on two processes."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from accel_callbacks import Accelerator, RemoteError
from accel_callbacks.callbacks import EMA, Checkpoint
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed

SCORES = (0.5, 0.2, 0.4)


class Job:
    """Each process trains on half of the data and logs a score of its own."""

    def __init__(self, folder: str) -> None:
        self.saver = Checkpoint(folder, every="1 epoch", keep_last=None, monitor="val")
        callbacks = [EMA(0.8), self.saver]
        self.accel = Accelerator(cpu=True, timeout=BOUND, callbacks=callbacks)
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        data = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        self.model, self.optimizer, self.data = self.accel.prepare(self.net, sgd, loader)
        self.averaged: list[list[float]] = []

    def fit(self) -> None:
        with self.accel.run("job") as run:
            for epoch in run.epochs(3):
                for batch in self.data:
                    self.accel.backward(self.model(batch).square().mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                with self.accel.evaluate(self.model):
                    self.averaged.append(self.weights())
                # The main process's score counts.
                self.accel.log({"val": SCORES[epoch] if run.is_global_zero else epoch})

    def weights(self) -> list[float]:
        return torch.cat([v.detach().flatten().float() for v in self.state()]).tolist()

    def state(self) -> list[torch.Tensor]:
        return [*self.net.parameters(), *self.net.buffers()]


def evaluate_best(folder: str):
    job = Job(folder)
    job.fit()
    before = job.weights()
    with job.accel.evaluate(job.model, checkpoint="best"):
        inside = job.weights()
        job.model(torch.ones(2, 2) * job.accel.process_index)
    own = [value.tolist() for value in job.net.state_dict().values()]
    return inside, job.averaged[1], before == job.weights(), job.saver.best_path, own


def test_the_averages_of_the_best_are_evaluated_on_all_processes(pool, tmp_path):
    results = pool.run(evaluate_best, str(tmp_path))
    for inside, averaged, put_back, best, _ in results:
        # The running statistics of a rank are its own; the checkpoint has those of the first.
        assert inside == results[0][0] == results[0][1]
        assert averaged[:20] == inside[:20]
        assert put_back
        assert best.endswith("step-00000008")


def fails_on_one(folder: str):
    job = Job(folder)
    path = job.accel.save_state(f"{folder}/c")
    if job.accel.process_index == 1:  # another shape there
        job.net[0].weight.data = torch.zeros(3, 3)
    before = job.weights()
    try:
        with job.accel.evaluate(job.model, checkpoint=path):
            return "entered", False
    except Exception as error:
        unchanged = before == job.weights()
        return type(error).__name__, unchanged and job.accel.reduce(torch.ones(1)).item() == 2.0


def test_a_checkpoint_that_does_not_fit_on_one_process_is_refused_on_all(pool, tmp_path):
    assert pool.run(fails_on_one, str(tmp_path)) == [
        (RemoteError.__name__, True),
        ("ResumeError", True),
    ]


def raises_on_one(folder: str):
    job = Job(folder)
    job.fit()
    before = job.weights()
    with suppress(ZeroDivisionError), job.accel.evaluate(job.model, checkpoint="last"):
        assert 1 // (1 - job.accel.process_index)
    return before == job.weights()


def test_an_error_on_one_process_puts_the_weights_back_there(pool, tmp_path):
    assert pool.run(raises_on_one, str(tmp_path)) == [True, True]
