"""TensorBoard: curves, pictures, distributions, texts, tables, a film and the model's graph.

python examples/trackers_tensorboard.py
tensorboard --logdir runs/trackers_tensorboard
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description="Log to TensorBoard.")
    parser.add_argument("--project_dir", default="runs/trackers_tensorboard")
    folder = parser.parse_args().project_dir
    set_seed(0)
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    accel = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    model, optimizer, train = accel.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))

    frames = []
    with accel.run("digits", config={"optimizer": {"lr": 0.5, "betas": None}}) as run:
        accel.log_graph(model, data.tensors[0][:1])
        accel.log_images({"digits": data.tensors[0][:4].view(-1, 1, 8, 8)})
        for epoch in run.epochs(3):
            for inputs, labels in train:
                with accel.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accel.log({"train/loss": loss})
            weights = accel.unwrap_model(model).weight.detach()
            frames.append(as_picture(weights))
            with accel.evaluate(model):
                guesses = model(data.tensors[0]).argmax(dim=1)
            hits = (guesses == data.tensors[1]).float()
            accel.log({"val/accuracy": hits.mean(), "epoch": epoch})
            accel.log_histogram({"weights": weights})
            of_digit = [[d, hits[data.tensors[1] == d].mean().item()] for d in range(10)]
            accel.log_table("val/by digit", columns=["digit", "accuracy"], data=of_digit)
        accel.log_video({"weights": torch.stack(frames)}, fps=2)
        accel.log_text({"notes": "Softmax regression: *one* linear layer."})
    accel.end_training()
    print(f"accuracy {hits.mean():.2%}")
    print(f"tensorboard --logdir {folder}")


def as_picture(weights: torch.Tensor) -> torch.Tensor:
    """The ten rows of weights side by side: (1, 8, 80), between 0 and 1."""
    low, high = weights.min(), weights.max()
    rows = ((weights - low) / (high - low)).view(10, 8, 8)
    return rows.permute(1, 0, 2).reshape(1, 8, 80)


if __name__ == "__main__":
    main()
