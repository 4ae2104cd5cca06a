"""Checkpoint hooks: save the adapter and not the model under it; save objects of your own.

A network that knows digits is frozen, and an adapter on it learns to tell even from odd ones.
Hooks write and read the adapter alone, and a history is registered, so that it is saved too. The
run is cut in two by a checkpoint; it ends as the one that was not.

    python examples/by_feature/checkpoint_hooks.py
    accel launch --num_processes 2 examples/by_feature/checkpoint_hooks.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, set_seed

FILE = "adapter.safetensors"


class History:
    """An object of the script's own that belongs into the checkpoint."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


class Adapted(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(128, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.body(images))


def train_body(images: torch.Tensor, targets: torch.Tensor) -> nn.Module:
    """In plain torch, the same on each process: it stands for a model that was downloaded."""
    set_seed(0)
    body, head = nn.Sequential(nn.Linear(64, 128), nn.ReLU()), nn.Linear(128, 10)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(40):
        nn.functional.cross_entropy(head(body(images)), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return body


def train(
    args: argparse.Namespace, data: TensorDataset, epochs: int, resume_from: str | None = None
) -> tuple[Accelerator, nn.Module, History]:
    """Train from the start or from a checkpoint, up to this epoch."""
    body = train_body(*data.tensors)
    set_seed(0)
    accel = Accelerator(cpu=args.cpu, project_dir=args.project_dir)
    model, history = Adapted(body), History()
    optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=3e-3)
    loader = DataLoader(data, 32, shuffle=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)

    # The feature: what a checkpoint holds of the models is up to the hooks.
    def save_adapter(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        if accel.is_main_process:
            adapter = accel.unwrap_model(models[0]).adapter
            state = {name: value.contiguous() for name, value in adapter.state_dict().items()}
            save_file(state, Path(output_dir, FILE))
        weights.pop()  # the Accelerator saves what is left here

    def load_adapter(models: list[nn.Module], input_dir: str) -> None:
        adapter = accel.unwrap_model(models.pop()).adapter  # and loads what is left here
        adapter.load_state_dict(load_file(Path(input_dir, FILE)))

    accel.register_save_state_pre_hook(save_adapter)
    accel.register_load_state_pre_hook(load_adapter)
    accel.register_for_checkpointing(history=history)

    if resume_from is not None:
        accel.load_state(resume_from)
    while len(history.losses) < epochs:
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets % 2)
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        history.losses.append(accel.reduce(loss, "mean").item())
    return accel, accel.unwrap_model(model).cpu(), history


def load_tensors(file: Path) -> list[torch.Tensor]:
    return list(load_file(file).values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Save an adapter only, with hooks.")
    parser.add_argument("--project_dir", default="runs/checkpoint_hooks")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()
    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))

    first, *_ = train(args, data, epochs=3)
    checkpoint = first.save_state()
    accel, resumed, history = train(args, data, epochs=6, resume_from=checkpoint)
    _, whole, whole_history = train(args, data, epochs=6)

    pairs = zip(resumed.parameters(), whole.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    with torch.no_grad():
        hits = resumed(data.tensors[0]).argmax(dim=1) == data.tensors[1] % 2
    tensors = [one for file in Path(checkpoint).glob("*.safetensors") for one in load_tensors(file)]
    saved = sum(one.numel() for one in tensors if one.is_floating_point())
    model, adapter = (sum(p.numel() for p in m.parameters()) for m in (resumed, resumed.adapter))
    accel.print(f"the adapter has {adapter} of {model} weights; saved numbers: {saved}")
    accel.print(f"resumed and unbroken weights are the same: {same}")
    accel.print(f"histories are the same: {history.losses == whole_history.losses}")
    accel.print(f"even or odd: accuracy {hits.float().mean():.1%}")
    accel.end_training()


if __name__ == "__main__":
    main()
