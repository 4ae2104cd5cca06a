"""How much longer a wrapped loop takes than the same calls of torch by hand, on two processes.

    python benchmarks/sharding.py
    python benchmarks/sharding.py --tensor_parallel --width 1024

FSDP2, or with --tensor_parallel the layers of a block cut by a plan (torch: parallelize_module).
It starts its processes itself (--processes), and measures in rounds (process_rounds.py). The units,
their policy and the step are the same: loader, forward, backward, clipping, optimizer, scheduler,
zero_grad. Accelerate takes part where it is installed and shards on this device; it cuts layers
of models of transformers only, and takes no part there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from process_rounds import Loop, measure, plain_loop, report, start_processes, wrapped_loop
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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
    if not any(hasattr(parameter, "device_mesh") for parameter in prepared[0].parameters()):
        raise RuntimeError("it does not shard on this device")
    return wrapped_loop(accelerator, *prepared)


def cut(width: int, depth: int, device: str) -> Loop:
    """Return a loop whose layers torch cuts, with the same batches on all processes."""
    model, _, data = parts(width, depth)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.to(device).blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    loader = DataLoader(data, BATCH, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10_000)
    return plain_loop(model, optimizer, loader, scheduler, clip_by_mesh)


def clip_by_mesh(parameters: Iterable[torch.Tensor], most: float) -> None:
    """Clip plain and cut gradients by their norm: torch's own clipping refuses the mixture."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    cut = [one for one in gradients if isinstance(one, DTensor)]
    whole = [one for one in gradients if not isinstance(one, DTensor)]
    norms = [nn.utils.get_total_norm(whole), nn.utils.get_total_norm(cut).full_tensor()]
    factor = (most / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
    for gradient in (*whole, *(one.to_local() for one in cut)):
        gradient.mul_(factor)


def tensor_parallel(width: int, depth: int, cpu: bool) -> dict[str, Loop]:
    from accel_callbacks import Accelerator, ParallelismConfig, TorchTensorParallelConfig

    handler = TorchTensorParallelConfig(plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    mesh = ParallelismConfig(tp_size=int(os.environ["WORLD_SIZE"]), tp_handler=handler)
    own = Accelerator(cpu=cpu, parallelism_config=mesh)
    ours = wrapped(own, width, depth)
    return {"ours": ours, "plain": cut(width, depth, own.device.type)}


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
    parser.add_argument("--tensor_parallel", action="store_true", help="cut layers, not FSDP2")
    parser.add_argument("--gpu", action="store_true", help="compute on GPUs, not on the CPU")
    args = parser.parse_args()
    start_processes(args.processes)
    torch.set_num_threads(1)
    make = tensor_parallel if args.tensor_parallel else contenders
    loops = make(args.width, args.depth, not args.gpu)
    report(measure(loops, args.rounds, STEPS), STEPS, "torch by hand")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
