"""A plain PyTorch loop, moved over: the five changed lines are marked. Hooks fire all the same.

python examples/plain_loop.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, Callback  # 1 (Callback only for the demonstration)


class CountHooks(Callback):
    """Shows that a loop without `run`, `epochs` or `accumulate` reaches the callbacks too."""

    def __init__(self) -> None:
        self.batches = self.steps = self.evaluations = 0

    def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
        self.batches += 1

    def on_after_optimizer_step(self, run, model, optimizer):
        self.steps += 1

    def on_validation_end(self, run, model):
        self.evaluations += 1


def main() -> None:
    torch.manual_seed(0)
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    train_part, test_part = torch.utils.data.random_split(data, [1500, 297])
    train = DataLoader(train_part, batch_size=50, shuffle=True)
    test = DataLoader(test_part, batch_size=50)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loss_fn = nn.CrossEntropyLoss()

    counter = CountHooks()
    accel = Accelerator(callbacks=[counter])  # 2
    model, optimizer, train, test = accel.prepare(model, optimizer, train, test)  # 3

    for epoch in range(10):
        model.train()
        for inputs, labels in train:  # 4: no .to(device)
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), labels)
            accel.backward(loss)  # 5: was loss.backward()
            optimizer.step()

        model.eval()
        hits = total = 0
        with torch.no_grad():
            for inputs, labels in test:
                guesses, labels = accel.gather_for_metrics((model(inputs).argmax(dim=1), labels))
                hits += (guesses == labels).sum().item()
                total += len(labels)
        accel.print(f"epoch {epoch + 1}: accuracy {hits / total:.1%} on {total} images")

    accel.print(
        f"hooks saw {counter.batches} batches, {counter.steps} optimizer steps and "
        f"{counter.evaluations} evaluations"
    )
    accel.end_training()


if __name__ == "__main__":
    main()
