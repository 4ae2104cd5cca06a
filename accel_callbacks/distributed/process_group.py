"""Joining the default group: backend, rendezvous, attempt id."""

from __future__ import annotations

import importlib
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from accel_callbacks.errors import nearest

__all__ = ["GroupOptions", "agree_on_attempt", "backend_for", "join_group", "store_outlives"]

_FIRST_LOOK, _LONGEST_PAUSE = 0.005, 0.2  # seconds
_SCHEMES = ("env", "tcp", "file")
# Where this process has met others, and how often: facts of the process, as its group is.
_met: dict[tuple[str, ...], tuple[dist.distributed_c10d.Store, int]] = {}


def store_outlives(meet_at: str, env: Mapping[str, str]) -> bool:
    """Whether the elastic launcher may start processes again that meet at the same store.

    Args:
        meet_at: the URL at which the processes meet.
        env: the variables of this process.

    Example:
        >>> from accel_callbacks.distributed.process_group import store_outlives
        >>> store_outlives("env://", {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        True
        >>> store_outlives("env://", {"TORCHELASTIC_USE_AGENT_STORE": "False"})
        False
    """
    if meet_at.startswith("file://"):
        return "TORCHELASTIC_RUN_ID" in env
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_attempt(
    store: dist.distributed_c10d.Store, rank: int, world: int, timeout: timedelta
) -> str:
    """A name that the processes of this attempt agree on, whatever is left of earlier ones.

    The launcher's count of restarts is none: each machine counts its own, and a machine that comes
    or goes is not counted. So rank 0 makes up a name, the others answer, and each goes on only
    where its own answer is confirmed: what an earlier attempt left confirms somebody else's.

    Args:
        store: at which the processes meet.
        rank: of this process.
        world: number of processes.
        timeout: how long to wait for the others.

    Raises:
        RuntimeError: processes did not come.

    Example:
        >>> from datetime import timedelta
        >>> import torch.distributed as dist
        >>> from accel_callbacks.distributed.process_group import agree_on_attempt
        >>> len(agree_on_attempt(dist.HashStore(), 0, 1, timedelta(seconds=1)))
        32
    """
    if rank == 0:
        return _lead(store, world, timeout)
    return _follow(store, rank, timeout)


def _lead(store: dist.distributed_c10d.Store, world: int, timeout: timedelta) -> str:
    attempt = uuid.uuid4().hex
    store.set("attempt", attempt)
    answers = {rank: f"{attempt}/{rank}" for rank in range(1, world)}
    try:
        if answers:
            store.wait(list(answers.values()), timeout)
    except dist.DistStoreError as error:
        missing = [rank for rank, answer in answers.items() if not store.check([answer])]
        raise RuntimeError(
            f"ranks {missing} of {world} did not come within {timeout}: see their own output."
        ) from error
    confirmed = [store.get(answer).decode() for answer in answers.values()]
    store.set(f"{attempt}/confirmed", json.dumps(confirmed))
    return attempt


def _follow(store: dist.distributed_c10d.Store, rank: int, timeout: timedelta) -> str:
    own = uuid.uuid4().hex
    answered = ""
    pause, deadline = _FIRST_LOOK, time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        attempt = store.get("attempt").decode() if store.check(["attempt"]) else ""
        if attempt and attempt != answered:
            store.set(f"{attempt}/{rank}", own)
            answered = attempt
        if attempt and store.check([f"{attempt}/confirmed"]):
            confirmed = json.loads(store.get(f"{attempt}/confirmed"))
            if own in confirmed:
                return attempt
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    raise RuntimeError(
        f"rank 0 did not confirm that rank {rank} takes part within {timeout}: see its output."
    )


@dataclass(frozen=True)
class GroupOptions:
    """How to join the process group; None where the device or the launcher decides.

    Args:
        backend: of torch.distributed, ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``, say.
        init_method: URL to meet at, ``"env://"``, ``"tcp://host:port"`` or ``"file:///path"``.
        timeout: how long a collective waits.

    Raises:
        ValueError: a backend or a kind of URL that does not exist.

    Example:
        >>> from accel_callbacks.distributed.process_group import GroupOptions
        >>> GroupOptions(backend="glo")
        Traceback (most recent call last):
        ValueError: backend='glo' is unknown to this torch. Did you mean 'gloo'?
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            for name in _backends_of(self.backend).values():
                _check_backend(name, self.backend)
        if self.init_method is not None:
            scheme = self.init_method.partition("://")[0]
            if "://" not in self.init_method or scheme not in _SCHEMES:
                raise ValueError(
                    f"init_method={self.init_method!r} is unknown; use env://, tcp://host:port or "
                    f"file:///path.{nearest(scheme, _SCHEMES)}"
                )


def _check_backend(name: str, given: str) -> None:
    known = [backend for backend in dist.Backend.backend_list if backend != "undefined"]
    if name not in known:
        raise ValueError(f"backend={given!r} is unknown to this torch.{nearest(name, known)}")
    available = getattr(dist, f"is_{name}_available", None)
    if available is not None and not available():
        raise ValueError(
            f"backend={given!r}: this torch was built without {name}. Leave backend= out to get "
            "the one that fits the device."
        )


def _backends_of(backend: str) -> dict[str, str]:
    """Device type to backend; one name without a device serves all, under ``""``."""
    entries = (entry.rpartition(":") for entry in backend.lower().split(","))
    return {kind: name for kind, _, name in entries}


def backend_for(device: torch.device, backend: str) -> str | None:
    """The part of a backend string that serves a device, None if none does.

    Example:
        >>> import torch
        >>> from accel_callbacks.distributed.process_group import backend_for
        >>> backend_for(torch.device("cpu"), "cpu:gloo,cuda:nccl")
        'gloo'
    """
    parts = _backends_of(backend)
    serving = parts.get(device.type, parts.get(""))
    return None if serving == "nccl" and device.type != "cuda" else serving


def join_group(
    device: torch.device, rank: int, world: int, options: GroupOptions, env: Mapping[str, str]
) -> str:
    """Join the default process group, and return its backend string.

    Raises:
        RuntimeError: the address to meet at is missing.
        ValueError: the backend cannot serve the device.
    """
    meet_at = options.init_method or "env://"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing and meet_at.startswith("env://"):
        raise RuntimeError(
            f"{' and '.join(missing)} not set for {world} processes: start the script with "
            "`accel launch --num_processes N` or `torchrun`."
        )
    backend = options.backend or _default_backend(device)
    if backend_for(device, backend) is None:
        raise ValueError(
            f"backend={backend!r} does not serve {device.type} tensors, and this process computes "
            f"on {device}. Leave backend= out, or use {_default_backend(device)!r}."
        )
    # It binds the default group when it is imported, and would keep the connections of ours.
    importlib.import_module("torch.distributed.nn.functional")
    timeout = options.timeout or dist.distributed_c10d.default_pg_timeout
    store = _meeting_place(meet_at, rank, world, timeout, env)
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=options.timeout,
    )
    return backend


def _meeting_place(
    meet_at: str, rank: int, world: int, timeout: timedelta, env: Mapping[str, str]
) -> dist.distributed_c10d.Store:
    """The store of the next group; what it keeps is read by the processes of this group only."""
    address = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    place = (meet_at, *address, str(rank), str(world))
    if place not in _met:
        store = next(rendezvous(meet_at, rank, world))[0]
        if store_outlives(meet_at, env):
            # A restarted worker must not read the addresses that the attempt before left behind.
            attempt = agree_on_attempt(
                dist.distributed_c10d.PrefixStore("accel_callbacks", store), rank, world, timeout
            )
            store = dist.distributed_c10d.PrefixStore(f"accel_callbacks/{attempt}", store)
        _met[place] = store, 0
    # The server is kept: another one at the same port might come up after its first client.
    store, joined = _met[place]
    _met[place] = store, joined + 1
    return dist.distributed_c10d.PrefixStore(f"accel_callbacks/group{joined}", store)


def _default_backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    # Both, so that objects and CPU tensors never travel through device memory.
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
