"""Callbacks of your own: a class with state, a function, and the test kit tried on the class.

python examples/own_callback.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, Callback, set_seed
from accel_callbacks.testing import check_callback, tiny_training


class EpochLoss(Callback):
    """Logs the mean loss of each epoch, and stops the run once it is low enough.

    Args:
        enough: the loss to stop at.
    """

    can_vote = False  # it asks for a stop at the end of an epoch, where all processes vote anyway

    def __init__(self, enough: float = 0.0) -> None:
        self.enough = enough
        self._forget()

    def _forget(self) -> None:
        self.total: torch.Tensor | float = 0.0
        self.count = 0
        self.history: list[torch.Tensor] = []

    def setup(self, run, model, stage):
        if run.resumed_from is None:  # a new run begins anew, a resumed one goes on
            self._forget()

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.total = self.total + outputs["loss"]  # stays on the device: nothing waits for it
        self.count += 1

    def on_train_epoch_end(self, run, model):
        mean = run.accelerator.reduce(torch.as_tensor(self.total) / max(self.count, 1), "mean")
        self.history.append(mean.cpu())
        self.total, self.count = 0.0, 0
        run.accelerator.log({"epoch/loss": mean})
        if mean < self.enough:  # read once an epoch
            run.stop(f"the loss is below {self.enough}")

    def state_dict(self):
        return {"total": self.total, "count": self.count, "history": self.history}

    def load_state_dict(self, state_dict):
        self.total, self.count = state_dict["total"], state_dict["count"]
        self.history = list(state_dict["history"])


def main() -> None:
    # A test file needs no more than this; see docs/how-to/test-a-callback.md.
    check_callback(EpochLoss)
    print("EpochLoss keeps the contract. It is called like this:")
    print(tiny_training([EpochLoss()], epochs=1, batches=2).recorder)

    set_seed(0)
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = EpochLoss(enough=0.3)
    accel = Accelerator(callbacks=[losses])
    model, optimizer, train = accel.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))

    @accel.on("train_batch_end", every=20, main_process_only=True)
    def show(step, loss):
        print(f"step {step}: loss {loss.item():.2f}")

    with accel.run("own") as run:
        for _epoch in run.epochs(20):
            for inputs, labels in train:
                accel.backward(nn.functional.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
    means = ", ".join(f"{loss:.2f}" for loss in losses.history)
    accel.print(f"mean loss of each epoch: {means}")
    accel.print(f"stopped after epoch {run.epochs_done} of 20: {run.stop_reason}")
    accel.end_training()


if __name__ == "__main__":
    main()
