"""A model larger than the memory it may take: planned, and run from the files it was saved in.

python examples/by_feature/larger_than_memory.py
python examples/by_feature/larger_than_memory.py --memory 4MB
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from accel_callbacks import (
    Accelerator,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    set_seed,
)
from accel_callbacks.offload import Weights, plan, report

FOLDER = "larger-than-memory-weights"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A config that stands for that of a downloaded model."""

    def __init__(self, width: int = 192, depth: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a model that does not fit into memory.")
    parser.add_argument("--memory", default="6MB", help="that its weights may take")
    args = parser.parse_args()
    accel = Accelerator(cpu=True)

    # Stands for weights that were downloaded.
    set_seed(0)
    resident = Net().eval()
    accel.save_model(resident, FOLDER, max_shard_size="4MB")
    accel.wait_for_everyone()

    # The feature: a plan from sizes alone, and a model that stays in the files.
    with init_empty_weights():
        model = Net().eval()
    found = plan(Weights.of_model(model), {"cpu": args.memory})
    accel.print(found.table())
    model = load_checkpoint_and_dispatch(model, FOLDER, device_map=found.device_map)

    inputs = torch.randn(16, 192, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        same = all(torch.equal(model(inputs), resident(inputs)) for _ in range(3))
    accel.print(f"the outputs of the model in memory: {same}")
    after = report(model)
    weights = sum(p.numel() * p.element_size() for p in resident.parameters())
    accel.print(f"{weights} bytes of weights, of them {after.on_disk} on disk")
    taken = sum(after.resident.values()) + after.traffic.peak
    accel.print(f"{taken} bytes of memory for weights at most")
    accel.end_training()


if __name__ == "__main__":
    main()
