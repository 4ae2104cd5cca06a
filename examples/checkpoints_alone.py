"""Checkpoints without the Accelerator: `checkpoint_io` in a loop of plain torch.

The loop saves in the background, keeps the newest two and the best checkpoint, and goes on from
the newest whole one when it is started again. One weight is then read by itself.

    python examples/checkpoints_alone.py --folder runs/alone
    python examples/checkpoints_alone.py --folder runs/alone --epochs 8
    python examples/checkpoints_alone.py --folder s3://bucket/alone
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import checkpoint_io
from checkpoint_io import BackgroundSaver, CheckpointFolder, keep_best, keep_last

RUN = "digits"  # what carries another name is never removed


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    images, targets = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets)


def main() -> None:
    parser = argparse.ArgumentParser(description="Save and load without an Accelerator.")
    parser.add_argument("--folder", default="runs/alone", help="a path or any fsspec URL")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, targets = load_data()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    folder, saver = CheckpointFolder(args.folder), BackgroundSaver()

    # The feature: the newest checkpoint that is whole, or none. Damaged ones are passed over.
    first = 0
    if folder.latest() is not None:
        state = folder.load_latest().state
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    print(f"begins with epoch {first + 1}")

    for epoch in range(first, args.epochs):
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The feature: returns once the state is copied; it is written while training goes on.
        saver.save(
            folder.path(epoch),
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
            metadata={"run_id": RUN, "step": epoch, "loss": loss.item()},
            generation=epoch + 1,
        )
    saver.close()  # waits for the last one, and raises if it failed
    folder.prune(keep_last(2) | keep_best(1, "loss"), run_id=RUN)
    print("checkpoints:", *(info.name for info in folder.list()))

    # The feature: one tensor of a checkpoint, without reading the rest.
    newest = folder.latest()
    assert newest is not None
    reader = checkpoint_io.open_checkpoint(newest.path)
    weight = reader.state["model"]["0.weight"]
    same = torch.equal(weight[:8], model.state_dict()["0.weight"][:8])
    print(f"{weight.key} of {newest.name}: first 8 rows are the model's: {same}")


if __name__ == "__main__":
    main()
