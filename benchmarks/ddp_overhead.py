"""How much longer a wrapped loop takes than a plain DistributedDataParallel loop, two processes.

    python benchmarks/ddp_overhead.py

It starts its two processes itself. Both loops run in the same processes, in rounds whose order is
shuffled alike on both, and the ratio is taken within each round, so that what else the machine
does falls on both sides. The step is a realistic one (20 ms or more on a CPU core; --width makes
it longer): prepared loader, accumulate, backward, clipping, optimizer, scheduler, zero_grad.
Accelerate takes part where it is installed.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, BATCH = 20, 64
Contender = Callable[[], None]


def parts(width: int) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 8))
    data = TensorDataset(torch.randn(2 * STEPS * BATCH, width))
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), data


def plain(width: int) -> Contender:
    model, optimizer, data = parts(width)
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, BATCH, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10_000)

    def run() -> None:
        for (batch,) in loader:
            loss = model(batch).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def wrapped(accelerator, width: int) -> Contender:
    model, optimizer, data = parts(width)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10_000)
    loader = DataLoader(data, BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def run() -> None:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def contenders(width: int) -> dict[str, Contender]:
    from accel_callbacks import Accelerator

    found = {"ours": wrapped(Accelerator(cpu=True), width), "plain": plain(width)}
    try:
        from accelerate import Accelerator as Peer
    except ImportError:
        return found
    return {**found, "accelerate": wrapped(Peer(cpu=True), width)}


def measure(width: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a step of the slower process, for each contender and round."""
    running = contenders(width)
    for run in running.values():
        run()
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name in order.sample(sorted(running), len(running)):
            gc.collect()
            dist.barrier()
            started = time.perf_counter()
            running[name]()
            took = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[name].append(float(took) / STEPS * 1e3)
    return times


def report(times: dict[str, list[float]]) -> None:
    print(
        f"torch {torch.__version__}, two processes, {len(times['plain'])} rounds of {STEPS} steps"
    )
    for name, values in times.items():
        ratio = statistics.median(t / b for t, b in zip(values, times["plain"], strict=True))
        print(f"{name:12} {statistics.median(values):8.2f} ms a step   {ratio:.3f} of plain DDP")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--width", type=int, default=768)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        again = subprocess.run([*command, __file__, *sys.argv[1:]], check=False)
        sys.exit(again.returncode)
    torch.set_num_threads(1)
    times = measure(args.width, args.rounds)
    if dist.get_rank() == 0:
        report(times)


if __name__ == "__main__":
    main()
