"""How much longer a wrapped FSDP2 loop takes than the same calls of torch by hand, two processes.

    python benchmarks/sharding.py

It starts its processes itself (--processes). All loops run in the same processes, in rounds whose
order is shuffled alike on all, and the ratio is taken within each round, so that what else the
machine does falls on all sides. The units, their policy and the step are the same: loader,
forward, backward, clipping, optimizer, scheduler, zero_grad. Accelerate takes part where it is
installed and shards on this device.
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
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, BATCH = 10, 64
Contender = Callable[[], None]


class Block(nn.Module):
    """A residual block with two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


class Net(nn.Module):
    """Blocks, and a layer that belongs to the root."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.result = nn.Linear(width, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.result(inputs)


def parts(width: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = Net(width, depth)
    data = TensorDataset(torch.randn(dist.get_world_size() * STEPS * BATCH, width))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), data


def plain(width: int, depth: int) -> Contender:
    model, _, data = parts(width, depth)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=True))
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


def wrapped(accelerator, width: int, depth: int) -> Contender:
    model, optimizer, data = parts(width, depth)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10_000)
    loader = DataLoader(data, BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if not all(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise RuntimeError("it does not shard on this device")

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


def contenders(width: int, depth: int, cpu: bool) -> dict[str, Contender]:
    from accel_callbacks import Accelerator, FullyShardedDataParallelPlugin

    options = {
        "transformer_cls_names_to_wrap": ["Block"],
        "auto_wrap_policy": "transformer_based_wrap",
    }
    own = Accelerator(cpu=cpu, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    found = {"ours": wrapped(own, width, depth), "plain": plain(width, depth)}
    try:
        from accelerate import Accelerator as Peer
        from accelerate import FullyShardedDataParallelPlugin as PeerPlugin

        peer = Peer(cpu=cpu, fsdp_plugin=PeerPlugin(fsdp_version=2, **options))
        found["accelerate"] = wrapped(peer, width, depth)
        found["accelerate"]()
    except Exception as error:
        print(f"accelerate is left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
        found.pop("accelerate", None)
    return found


def measure(width: int, depth: int, rounds: int, cpu: bool) -> dict[str, list[float]]:
    """Milliseconds a step of the slowest process, for each contender and round."""
    running = contenders(width, depth, cpu)
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
            if torch.cuda.is_available() and not cpu:
                torch.cuda.synchronize()
            took = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[name].append(float(took) / STEPS * 1e3)
    return times


def report(times: dict[str, list[float]]) -> None:
    rounds = len(times["plain"])
    world = dist.get_world_size()
    print(f"torch {torch.__version__}, {world} processes, {rounds} rounds of {STEPS} steps")
    for name, values in times.items():
        ratios = [t / b for t, b in zip(values, times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        print(
            f"{name:12} {statistics.median(values):8.2f} ms a step   {middle:.3f} of torch by hand "
            f"[{low:.3f}..{high:.3f}]"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="compute on GPUs, not on the CPU")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc_per_node", str(args.processes), __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)
    torch.set_num_threads(1)
    times = measure(args.width, args.depth, args.rounds, not args.gpu)
    if dist.get_rank() == 0:
        report(times)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
