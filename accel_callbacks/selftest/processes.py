"""Checks of the processes: who they are, and whether values get from one to the other."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from typing import Any

import torch

from accel_callbacks import __version__, collectives
from accel_callbacks.config import AcceleratorConfig
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.selftest.check import Expectations, Lab

__all__ = ["collectives_carry_values", "topology_is_whole"]

_MANY = 1 << 20


def topology_is_whole(lab: Lab) -> str:
    """Each rank is there once, on a device of its own, with the same software and settings."""
    here, config = lab.accelerator().topology, lab.config
    everyone = collectives.all_objects(_facts(here, config))
    expect = Expectations()
    ranks = [one["rank"] for one in everyone]
    expect.equal("the list of ranks", ranks, list(range(here.world_size)))
    for name in ("torch", "accel-callbacks", "python", "precision", "accumulation", "kind"):
        values = {str(one[name]) for one in everyone}
        expect.that(len(values) == 1, f"processes differ in {name}: {', '.join(sorted(values))}")
    if here.device.type != "cpu":
        used = Counter((one["host"], one["device"]) for one in everyone)
        shared = [f"{device} of {host}" for (host, device), n in used.items() if n > 1]
        expect.that(not shared, f"processes share {', '.join(shared)}")
    expect.done()
    machines = len({one["host"] for one in everyone})
    backend = f", {here.backend}" if here.backend else ""
    return (
        f"{_count(here.world_size, 'process', 'es')} on {_count(machines, 'machine')}, "
        f"{_device(here.device)}{backend}, precision {config.mixed_precision}"
    )


def _facts(here: Topology, config: AcceleratorConfig) -> dict[str, Any]:
    """What the processes compare."""
    return {
        "rank": here.rank,
        "host": f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}",
        "device": str(here.device),
        "kind": here.device.type,
        "torch": torch.__version__,
        "accel-callbacks": __version__,
        "python": platform.python_version(),
        "precision": config.mixed_precision,
        "accumulation": config.gradient_accumulation_steps,
    }


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number != 1 else ''}"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device.type} ({torch.cuda.get_device_name(device)})"
    return device.type


def collectives_carry_values(lab: Lab) -> str:
    """Every kind of collective gives exactly the values that it must, small and large."""
    accel = lab.accelerator()
    rank, world = accel.process_index, accel.num_processes
    expect = Expectations()
    ranks = torch.arange(float(world), device=accel.device)
    mine = torch.full((2,), float(rank), device=accel.device)
    expect.equal("gather", collectives.gather(mine), ranks.repeat_interleave(2))
    total = world * (world - 1) / 2
    expect.equal("reduce sum", collectives.reduce(mine, "sum"), [total, total])
    expect.equal("reduce mean", collectives.reduce(mine, "mean"), [total / world] * 2)
    expect.equal("broadcast", collectives.broadcast(mine, world - 1), [world - 1.0] * 2)
    padded = collectives.pad_across_processes(torch.ones(rank + 1, device=accel.device))
    expect.equal("pad_across_processes", padded, [1.0] * (rank + 1) + [0.0] * (world - rank - 1))
    objects = collectives.gather_object({"rank": rank})
    expect.equal("gather_object", objects, [{"rank": one} for one in range(world)])
    sent = collectives.broadcast_object(f"from {rank}", 0)
    expect.equal("broadcast_object", sent, "from 0")
    many = torch.arange(_MANY, dtype=torch.int64, device=accel.device) * (rank + 1)
    summed = collectives.reduce(many, "sum")
    first = torch.arange(_MANY, dtype=torch.int64, device=accel.device)
    expect.equal("reduce of 8 MB", summed, first * (world * (world + 1) // 2))
    accel.wait_for_everyone()
    expect.done()
    return "gather, reduce, broadcast, pad, objects, 8 MB"
