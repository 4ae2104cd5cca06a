"""How much longer a wrapped loop takes than a plain DistributedDataParallel loop, two processes.

    python benchmarks/ddp_overhead.py

It starts its two processes itself, and measures in rounds (process_rounds.py). The step is a
realistic one (20 ms or more on a CPU core; --width makes it longer): prepared loader, accumulate,
backward, clipping, optimizer, scheduler, zero_grad. Accelerate takes part where it is installed.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from process_rounds import Loop, measure, plain_loop, report, start_processes, wrapped_loop
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, BATCH = 20, 64


def parts(width: int) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 8))
    data = TensorDataset(torch.randn(2 * STEPS * BATCH, width))
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), data


def plain(width: int) -> Loop:
    model, optimizer, data = parts(width)
    model = DistributedDataParallel(model)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10_000)
    return plain_loop(model, optimizer, loader, scheduler)


def wrapped(accelerator, width: int) -> Loop:
    model, optimizer, data = parts(width)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10_000)
    loader = DataLoader(data, BATCH, shuffle=True)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    return wrapped_loop(accelerator, *prepared)


def contenders(width: int) -> dict[str, Loop]:
    from accel_callbacks import Accelerator

    found = {"ours": wrapped(Accelerator(cpu=True), width), "plain": plain(width)}
    try:
        from accelerate import Accelerator as Peer
    except ImportError:
        return found
    return {**found, "accelerate": wrapped(Peer(cpu=True), width)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--width", type=int, default=768)
    args = parser.parse_args()
    start_processes(2)
    torch.set_num_threads(1)
    report(measure(contenders(args.width), args.rounds, STEPS), STEPS, "plain DDP")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
