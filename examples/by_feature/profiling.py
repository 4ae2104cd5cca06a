"""Profiling: where the time of a step goes, as a table and as a trace for each process.

The profiler is torch's own; it is on inside of the block and writes its traces when that ends.

    python examples/by_feature/profiling.py
    accel launch --num_processes 2 examples/by_feature/profiling.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator, ProfileKwargs, set_seed


def load_data() -> TensorDataset:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target))


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, kernel_size=3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile some training steps.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output_trace_dir", default="runs/profiling")
    parser.add_argument("--cpu", action="store_true", default=None)
    args = parser.parse_args()

    set_seed(0)
    # The feature: what is recorded, and where the traces go.
    options = ProfileKwargs(record_shapes=True, output_trace_dir=args.output_trace_dir)
    accel = Accelerator(cpu=args.cpu, kwargs_handlers=[options])
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(load_data(), 64, shuffle=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)

    with accel.profile() as profiler:
        for step, (images, targets) in enumerate(loader):
            if step == args.steps:
                break
            accel.backward(nn.functional.cross_entropy(model(images), targets))
            optimizer.step()
            optimizer.zero_grad()

    events = profiler.key_averages()
    accel.print(events.table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=40))
    calls = {event.key: event.count for event in events}
    accel.print(f"{calls['aten::convolution']} convolutions in {args.steps} steps")
    accel.wait_for_everyone()  # until all traces are there
    traces = sorted(path.name for path in Path(args.output_trace_dir).glob("*.json"))
    accel.print(f"traces in {args.output_trace_dir}: {', '.join(traces)}")
    accel.print("open them in chrome://tracing or https://ui.perfetto.dev")
    accel.end_training()


if __name__ == "__main__":
    main()
