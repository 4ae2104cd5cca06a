"""How much longer a wrapped FSDP2 loop takes than the same calls of torch by hand, two processes.

    python benchmarks/sharding.py

It starts its processes itself (--processes), and measures in rounds (process_rounds.py). The units,
their policy and the step are the same: loader, forward, backward, clipping, optimizer, scheduler,
zero_grad. Accelerate takes part where it is installed and shards on this device.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from process_rounds import Loop, measure, plain_loop, report, start_processes, wrapped_loop
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, BATCH = 10, 64


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


def plain(width: int, depth: int) -> Loop:
    model, _, data = parts(width, depth)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10_000)
    return plain_loop(model, optimizer, loader, scheduler)


def wrapped(accelerator, width: int, depth: int) -> Loop:
    model, optimizer, data = parts(width, depth)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10_000)
    loader = DataLoader(data, BATCH, shuffle=True)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    if not all(hasattr(parameter, "device_mesh") for parameter in prepared[0].parameters()):
        raise RuntimeError("it does not shard on this device")
    return wrapped_loop(accelerator, *prepared)


def contenders(width: int, depth: int, cpu: bool) -> dict[str, Loop]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="compute on GPUs, not on the CPU")
    args = parser.parse_args()
    start_processes(args.processes)
    torch.set_num_threads(1)
    loops = contenders(args.width, args.depth, not args.gpu)
    report(measure(loops, args.rounds, STEPS), STEPS, "torch by hand")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
