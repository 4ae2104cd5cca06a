"""Automatic batch size: the largest that fits into memory on all processes.

The memory for training is limited for real: on a GPU by its allocator, on a CPU by the operating
system (Linux). The last process gets half of what the others have, and all of them train with the
batch size that fits there too.

    python examples/by_feature/automatic_batch_size.py
    accel launch --num_processes 2 examples/by_feature/automatic_batch_size.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, find_executable_batch_size, set_seed


def load_data() -> TensorDataset:
    images, targets = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets))


@contextmanager
def limited_memory(device: torch.device, megabytes: int) -> Iterator[None]:
    """Inside, this process can allocate no more than this on top of what it has."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        allowed = torch.cuda.memory_allocated(device) + megabytes * 2**20
        torch.cuda.set_per_process_memory_fraction(allowed / total, device)
        yield
    elif sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as memory:
            used = int(memory.read().split()[5]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + megabytes * 2**20, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
    else:
        raise SystemExit("This example can limit memory on Linux and on NVIDIA GPUs only.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Find the batch size that fits.")
    parser.add_argument("--memory_mb", type=int, default=180)
    parser.add_argument("--batch_size", type=int, default=1024, help="to begin with")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    accel = Accelerator(cpu=args.cpu)
    data = load_data()
    halved = accel.num_processes > 1 and accel.is_last_process
    megabytes = args.memory_mb // 2 if halved else args.memory_mb
    tried: list[int] = []

    # The feature: called again with a smaller batch size where any process ran out of memory.
    @find_executable_batch_size(
        starting_batch_size=args.batch_size, reduce_batch_size_fn=lambda size: size // 2
    )
    def train(batch_size: int) -> tuple[int, float]:
        accel.free_memory()  # what the attempt before left
        tried.append(batch_size)
        set_seed(0)
        model = nn.Sequential(nn.Linear(64, 16384), nn.ReLU(), nn.Linear(16384, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = DataLoader(data, batch_size, shuffle=True)
        model, optimizer, loader = accel.prepare(model, optimizer, loader)
        with limited_memory(accel.device, megabytes):
            for _ in range(args.epochs):
                for images, targets in loader:
                    loss = nn.functional.cross_entropy(model(images), targets)
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return batch_size, accel.reduce(loss, "mean").item()

    batch_size, loss = train()
    used = accel.gather(torch.tensor([batch_size], device=accel.device)).tolist()
    accel.print(f"tried {tried}")
    accel.print(f"batch size of each process: {used}; loss {loss:.3f} after {args.epochs} epochs")
    accel.end_training()


if __name__ == "__main__":
    main()
