"""What ranks do that hold the shards of one state, as under FSDP and HSDP."""

from __future__ import annotations

import os
import signal
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

import checkpoint_io
from faultkit.interpose import Interposer
from faultkit.states import local_of, state_of, step_of
from faultkit.trouble import Trouble, from_the
from faultkit.victims import RUN, join_group

NUMEL = 20_003  # not a multiple of the ranks


def sharded_state(step: int, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Build the state of a step with DTensors: rows over the last axis, copies over the first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    axes = init_device_mesh("cpu", mesh)
    placements = [*[Replicate()] * (len(mesh) - 1), Shard(0)]

    def spread(tensor: torch.Tensor) -> Any:
        return distribute_tensor(tensor, axes, placements)

    state = state_of(step, NUMEL)
    model, moments = state["model"], state["optimizer"][0]
    model["weight"] = model["tied"] = spread(model["weight"])
    model["bias"], model["half"] = spread(model["bias"]), spread(model["half"])
    moments["exp_avg"] = spread(moments["exp_avg"])
    return state


def save(
    link: Connection, rank: int, size: int, rendezvous: str, url: str, step: int, mesh: Any
) -> None:
    """Save one step together."""
    group = join_group(rank, size, rendezvous)
    save_sharded(url, step, rank, group, mesh)


def save_sharded(url: str, step: int, rank: int, group: Any, mesh: Any) -> None:
    """Save this rank's shards; many files, so that there are many places to fail at."""
    checkpoint_io.save(
        url,
        sharded_state(step, mesh),
        local_state=local_of(step, rank),
        metadata={"run_id": RUN, "step": step},
        group=group,
        max_shard_size=NUMEL,
    )


def save_and_die(
    link: Connection,
    rank: int,
    size: int,
    rendezvous: str,
    url: str,
    step: int,
    mesh: Any,
    bad: int,
    what: str,
    nth: int,
) -> None:
    """Save together; one rank is killed before its n-th call of a name."""
    group = join_group(rank, size, rendezvous)
    die = from_the(what, nth, lambda call: os.kill(os.getpid(), signal.SIGKILL), repeat=True)
    with Interposer(url, before=die if rank == bad else None):
        save_sharded(url, step, rank, group, mesh)


def save_and_fail(
    link: Connection,
    rank: int,
    size: int,
    rendezvous: str,
    url: str,
    step: int,
    mesh: Any,
    bad: int,
    what: str,
    nth: int,
) -> None:
    """Save together; the disk of one rank is full at its n-th call of a name."""
    group = join_group(rank, size, rendezvous)
    trouble = Trouble(url)
    if rank == bad:
        trouble.fail(what, "ENOSPC", nth)
    with trouble.watch():
        save_sharded(url, step, rank, group, mesh)


def load_latest(
    link: Connection, rank: int, size: int, rendezvous: str, url: str, mesh: Any
) -> tuple[tuple[int, int], int]:
    """Load the newest into shards together; return which it is, and how many were damaged."""
    group = join_group(rank, size, rendezvous)
    state = sharded_state(0, mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = checkpoint_io.CheckpointFolder(url)
        found = folder.load_latest(group=group, into={k: state[k] for k in ("model", "optimizer")})
    whole = {
        "model": {name: _full(value) for name, value in state["model"].items()},
        "optimizer": {0: {n: _full(v) for n, v in state["optimizer"][0].items()}},
    }
    damaged = sum("damaged" in str(w.message) or "passed" in str(w.message) for w in caught)
    return step_of({**found.state, **whole}), damaged


def _full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
