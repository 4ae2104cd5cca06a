"""Weights & Biases, offline where there is no key: rows, pictures, a table and the model.

python examples/trackers_wandb.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, set_seed
from loggers import WandBTracker


def main() -> None:
    parser = argparse.ArgumentParser(description="Log to Weights & Biases.")
    parser.add_argument("--project_dir", default="runs/trackers_wandb")
    folder = parser.parse_args().project_dir
    set_seed(0)
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tracker = WandBTracker(tags=["softmax"], job_type="example")  # arguments of wandb.init
    accel = Accelerator(cpu=True, log_with=tracker, project_dir=folder)
    model, optimizer, train = accel.prepare(model, optimizer, DataLoader(data, 64, shuffle=True))

    with accel.run("digits", config={"optimizer": {"lr": 0.5}}) as run:
        for epoch in run.epochs(2):
            for inputs, labels in train:
                with accel.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accel.log({"train/loss": loss})
            with accel.evaluate(model):
                guesses = model(data.tensors[0]).argmax(dim=1)
            wrong = (guesses != data.tensors[1]).nonzero().flatten()
            accel.log({"val/accuracy": 1 - len(wrong) / len(guesses), "epoch": epoch})
            accel.log_images({"val/wrong": data.tensors[0][wrong[:4]].view(-1, 1, 8, 8)})
            pairs = zip(data.tensors[1][wrong].tolist(), guesses[wrong].tolist(), strict=True)
            accel.log_table("val/mistakes", columns=["digit", "guess"], data=[*map(list, pairs)])
        accel.save_model(model, f"{folder}/model")
        accel.log_artifact(f"{folder}/model", name="softmax", kind="model")
        raw = accel.get_tracker("wandb", unwrap=True)  # the wandb run itself
        offline, files = raw.offline, raw.dir
    accel.end_training()
    print(f"accuracy {1 - len(wrong) / len(guesses):.2%}")
    print(f"upload it with: wandb sync {files.removesuffix('files')}" if offline else raw.url)


if __name__ == "__main__":
    main()
