"""Time training loops on several processes, in rounds; shared by benchmarks, not a script.

All loops run in the same processes, in rounds whose order is shuffled alike on all, and a ratio is
taken within each round, so that what else the machine does falls on all sides.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Loop = Callable[[], None]


def start_processes(number: int) -> None:
    """Start this script again, on several processes, and exit; return in these processes."""
    if "RANK" in os.environ:
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(number)]
    sys.exit(subprocess.run([*command, *sys.argv], check=False).returncode)


def plain_loop(
    model: nn.Module,
    optimizer: Any,
    loader: Iterable[Any],
    scheduler: Any,
    clip: Callable[[Any, float], Any] = nn.utils.clip_grad_norm_,
) -> Loop:
    """Return a pass over a loader with calls of torch alone."""

    def run() -> None:
        for (batch,) in loader:
            loss = model(batch).square().mean()
            loss.backward()
            clip(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def wrapped_loop(
    accelerator: Any, model: nn.Module, optimizer: Any, loader: Iterable[Any], scheduler: Any
) -> Loop:
    """Return the same pass with what an Accelerator, ours or another, has prepared."""

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


def measure(loops: Mapping[str, Loop], rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the milliseconds a step of the slowest process, for each loop and round.

    Args:
        loops: by name; each was not run before.
        rounds: in each, all loops run once.
        steps: of one run of a loop.
    """
    for run in loops.values():
        run()
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name in order.sample(sorted(loops), len(loops)):
            gc.collect()
            dist.barrier()
            started = time.perf_counter()
            loops[name]()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            took = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[name].append(float(took) / steps * 1e3)
    return times


def report(times: Mapping[str, list[float]], steps: int, base: str) -> None:
    """Print the milliseconds a step, and the ratio to the loop ``plain``, on rank 0.

    Args:
        times: from :func:`measure`.
        steps: of one run of a loop.
        base: what ``plain`` is, in words.
    """
    if dist.get_rank() != 0:
        return
    rounds = len(times["plain"])
    world = dist.get_world_size()
    print(f"torch {torch.__version__}, {world} processes, {rounds} rounds of {steps} steps")
    for name, values in times.items():
        ratios = [t / b for t, b in zip(values, times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        print(
            f"{name:12} {statistics.median(values):8.2f} ms a step   {middle:.3f} of {base} "
            f"[{low:.3f}..{high:.3f}]"
        )
