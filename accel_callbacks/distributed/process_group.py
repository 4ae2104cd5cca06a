"""Join the default process group: backend, rendezvous, and a store prefix for each attempt."""

from __future__ import annotations

import importlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from accel_callbacks import collectives
from accel_callbacks.collectives import BoundedStore
from accel_callbacks.distributed.abort import watch_ranks
from accel_callbacks.distributed.heartbeat import Heartbeat, stop_heartbeat
from accel_callbacks.distributed.tcp_store import TCPStore, serve_store, uses_libuv
from accel_callbacks.errors import nearest

__all__ = [
    "GroupOptions",
    "agree_on_attempt",
    "backend_for",
    "connect",
    "join_group",
    "store_outlives",
]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.2  # seconds between polls of the store
_UP = "accel_callbacks/up"  # key that rank 0 sets in the store that it serves
_CONNECTING = ("gloo", "unable to find interface", "unable to find address")  # in gloo's errors
_SCHEMES = ("env", "tcp", "file")
_JOIN = "joining the process group"
_LONGER = 1.25  # times the timeout, by which torch's own calls end if the store answers
T = TypeVar("T")
# Stores by rendezvous address, and the number of groups made over each. Global, because the
# default group is global to the process too.
_stores: dict[tuple[str, ...], tuple[dist.distributed_c10d.Store, int]] = {}


@dataclass(frozen=True)
class GroupOptions:
    """Options of the process group; ``None`` leaves the choice to the device or the launcher.

    Args:
        backend: of torch.distributed, for example ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
        init_method: the rendezvous URL, ``"env://"``, ``"tcp://host:port"`` or
            ``"file:///path"``.
        timeout: how long a collective waits.

    Raises:
        ValueError: the backend or the scheme of the URL does not exist.

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


def _check_backend(name: str, backend: str) -> None:
    known = [entry for entry in dist.Backend.backend_list if entry != "undefined"]
    if name not in known:
        raise ValueError(f"backend={backend!r} is unknown to this torch.{nearest(name, known)}")
    available = getattr(dist, f"is_{name}_available", None)
    if available is not None and not available():
        raise ValueError(
            f"backend={backend!r}: this torch was built without {name}. Leave backend= out to get "
            "the one that fits the device."
        )


def join_group(
    device: torch.device, rank: int, world: int, options: GroupOptions, env: Mapping[str, str]
) -> str:
    """Join the default process group, and return its backend string.

    Raises:
        RuntimeError: the rendezvous address is missing.
        ValueError: the backend cannot serve the device.
    """
    url = options.init_method or "env://"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing and url.startswith("env://"):
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
    # Imported before our group exists: the module keeps a reference to the default group of the
    # time of its import (a default argument), which would keep our connections open after
    # destroy_process_group().
    importlib.import_module("torch.distributed.nn.functional")
    timeout = options.timeout or dist.distributed_c10d.default_pg_timeout
    store = _rendezvous(url, rank, world, timeout, env)
    connect(backend, store, rank, world, options.timeout, env)
    return backend


def _rendezvous(
    url: str, rank: int, world: int, timeout: timedelta, env: Mapping[str, str]
) -> dist.distributed_c10d.Store:
    """Return a store whose keys only the ranks of the next group share, within the timeout."""
    try:
        store = _call_within(
            lambda: _store_of_next_group(url, rank, world, timeout, env), timeout * _LONGER
        )
    except (TimeoutError, dist.DistError) as error:
        if isinstance(error, dist.DistError) and "time" not in str(error):
            raise
        place = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" if url.startswith("env://") else url
        who = "the launcher" if store_outlives(url, env) else "rank 0"
        raise RuntimeError(
            f"{who}, which serves the rendezvous store at {place}, has not answered within "
            f"{timeout}: see its own output for an error or a hang, or give it longer with "
            "Accelerator(timeout=...)."
        ) from error
    # A store of the launcher, or one that is used again, has another timeout.
    store.set_timeout(timeout)
    return store


def connect(
    backend: str,
    store: dist.distributed_c10d.Store,
    rank: int,
    world: int,
    timeout: timedelta | None,
    env: Mapping[str, str],
) -> None:
    """Make the default group of the ranks that share a store, which watch each other meanwhile.

    Raises:
        LostRankError: a rank has died, or hangs.
        RuntimeError: a rank has not come within the timeout, or cannot be reached.
    """
    limit = timeout or dist.distributed_c10d.default_pg_timeout
    # The heartbeats begin before the group: torch's own error names no rank that did not come.
    bounded = BoundedStore(dist.distributed_c10d.PrefixStore("accel_callbacks", store))
    outlives = store_outlives("env://", env)
    watch = watch_ranks(
        bounded, rank, world, timeout=limit.total_seconds(), serves_store=not outlives
    )
    try:
        _call_within(
            lambda: dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=timeout
            ),
            limit * _LONGER,
            watch,
        )
    except BaseException as error:
        failed = isinstance(error, (RuntimeError, TimeoutError))
        lost = watch.find_lost(error) if failed else None
        absent = watch.absent() if failed and lost is None else []
        # sys.last_value, which the others are told else, is not set yet.
        stop_heartbeat(error if lost is None and not absent else None)
        if lost is not None:
            raise watch.error_of(lost, _JOIN) from error
        if absent:
            raise RuntimeError(
                f"ranks {absent} of {world} did not come within {limit}: see their own output for "
                "an error or a hang, or give them longer with Accelerator(timeout=...)."
            ) from error
        if not any(sign in str(error).lower() for sign in _CONNECTING):
            raise
        raise RuntimeError(_interface_advice(str(error), env)) from error
    collectives.adopt_store(bounded)
    watch.follow_group()


def _call_within(operation: Callable[[], T], limit: timedelta, watch: Heartbeat | None = None) -> T:
    """Return the result of a call that may wait for another rank without a limit of its own.

    torch's client of a store waits for ever for a host that is stopped, so it waits on a thread.

    Raises:
        TimeoutError: it has not returned within the limit, or the watch has lost a rank.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(operation())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="accel-join", daemon=True).start()
    deadline = time.monotonic() + limit.total_seconds()
    while not wait([result], _LONGEST_PAUSE).done:
        lost = watch is not None and watch.lost is not None
        if lost or time.monotonic() > deadline:
            raise TimeoutError(f"{_JOIN} has not ended within {limit}: see the output of all ranks")
    return result.result()


def _interface_advice(text: str, env: Mapping[str, str]) -> str:
    """Return the error text for ranks that gloo cannot connect."""
    first = next(iter(text.splitlines()), "").rstrip(". ")
    named = env.get("GLOO_SOCKET_IFNAME")
    place = f"the interface {named}" if named else "the address that its host name leads to"
    return (
        f"gloo cannot connect the processes: {first}. This one listens at {place}. Set "
        "GLOO_SOCKET_IFNAME on each machine to the interface by which the others reach it, such "
        "as eth0."
    )


def _default_backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    # gloo too, so that objects and CPU tensors are not copied through device memory.
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def backend_for(device: torch.device, backend: str) -> str | None:
    """Return the backend that serves a device in a backend string, None if none does.

    Example:
        >>> import torch
        >>> from accel_callbacks.distributed.process_group import backend_for
        >>> backend_for(torch.device("cpu"), "cpu:gloo,cuda:nccl")
        'gloo'
    """
    parts = _backends_of(backend)
    serving = parts.get(device.type, parts.get(""))
    return None if serving == "nccl" and device.type != "cuda" else serving


def _backends_of(backend: str) -> dict[str, str]:
    """Map device types to backends; a backend without a device type is under ``""``."""
    entries = (entry.rpartition(":") for entry in backend.lower().split(","))
    return {kind: name for kind, _, name in entries}


def _store_of_next_group(
    url: str, rank: int, world: int, timeout: timedelta, env: Mapping[str, str]
) -> dist.distributed_c10d.Store:
    """Return a store whose keys only the ranks of the next group share."""
    address = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    place = (url, *address, str(rank), str(world))
    if place not in _stores:
        if store_outlives(url, env):
            store = _launchers_store(url, rank, world, env)
            # torchrun keeps one TCPStore for all attempts (--max-restarts). Without a prefix of
            # its own a restarted gloo worker reads the addresses of the previous attempt.
            attempt = agree_on_attempt(
                dist.distributed_c10d.PrefixStore("accel_callbacks", store), rank, world, timeout
            )
            store = dist.distributed_c10d.PrefixStore(f"accel_callbacks/{attempt}", store)
        else:
            store = _store_of_rank_0(url, rank, world, timeout, env)
        _stores[place] = store, 0
    # The store is reused for later groups: were a second server started at the same port, a
    # client could connect to the first one. The prefix counts the groups, equally on all ranks.
    store, joined = _stores[place]
    _stores[place] = store, joined + 1
    return dist.distributed_c10d.PrefixStore(f"accel_callbacks/group{joined}", store)


def _launchers_store(
    url: str, rank: int, world: int, env: Mapping[str, str]
) -> dist.distributed_c10d.Store:
    """Connect to the store of the launcher; not as torch does without libuv (pytorch#196855)."""
    if url.startswith("env://") and not uses_libuv():
        place = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        return TCPStore(*place, world, is_master=False, use_libuv=False)
    store: dist.distributed_c10d.Store = next(rendezvous(url, rank, world))[0]
    return store


def _store_of_rank_0(
    url: str, rank: int, world: int, timeout: timedelta, env: Mapping[str, str]
) -> dist.distributed_c10d.Store:
    """Return the store that rank 0 serves from now on.

    After the script has destroyed a group of its own, rank 0 may still serve the store of that
    group at the same address. A rank that has connected to it loses the connection and tries again.
    """
    if rank == 0:
        # torch's own handler would wait here for all ranks to connect, and not say which do not.
        served: dist.distributed_c10d.Store | None = _serve(url, env)
        if served is None:
            served = next(rendezvous(url, rank, world, timeout=timeout))[0]
        served.set(_UP, "")
        return served
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        store: dist.distributed_c10d.Store = next(rendezvous(url, rank, world, timeout=timeout))[0]
        try:
            store.wait([_UP], timeout)
            return store
        except dist.DistNetworkError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LONGEST_PAUSE)


def _serve(url: str, env: Mapping[str, str]) -> TCPStore | None:
    """Serve the store of a rendezvous at its address, unless it is a file or the launcher's."""
    if url.startswith("file://") or store_outlives(url, env):
        return None
    if url.startswith("tcp://"):
        place = urlsplit(url)
        host, port = place.hostname, place.port
    else:
        host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    if not host or not port:
        return None  # torch says what is missing
    one_machine = "LOCAL_WORLD_SIZE" in env and env["LOCAL_WORLD_SIZE"] == env.get("WORLD_SIZE")
    return serve_store(host, port, one_machine=one_machine)


def store_outlives(url: str, env: Mapping[str, str]) -> bool:
    """Return whether the elastic launcher may restart workers that then reuse the same store.

    Args:
        url: the rendezvous URL.
        env: the environment variables of this process.

    Example:
        >>> from accel_callbacks.distributed.process_group import store_outlives
        >>> store_outlives("env://", {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        True
        >>> store_outlives("env://", {"TORCHELASTIC_USE_AGENT_STORE": "False"})
        False
    """
    if url.startswith("file://"):
        return "TORCHELASTIC_RUN_ID" in env
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_attempt(
    store: dist.distributed_c10d.Store, rank: int, world: int, timeout: timedelta
) -> str:
    """Agree with all ranks on a unique id of this attempt, ignoring keys of earlier attempts.

    The launcher's restart count cannot serve as the id: each machine counts its own restarts, and
    machines that join or leave are not counted. So rank 0 makes up an id, the other ranks answer
    with tokens of their own, and each of them accepts the id only if rank 0 confirms its token.
    Keys that an earlier attempt left behind confirm other tokens.

    Args:
        store: the store of the rendezvous.
        rank: of this process.
        world: number of ranks.
        timeout: how long to wait for the other ranks.

    Raises:
        RuntimeError: some ranks did not join in time.

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
    # Keys: "attempt" holds the newest id; "{id}/{rank}" the token of a rank; "{id}/confirmed" the
    # tokens that rank 0 has seen.
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
    token = uuid.uuid4().hex
    answered = ""
    pause, deadline = _FIRST_PAUSE, time.monotonic() + timeout.total_seconds()
    # Polled, not waited for: the first id that is found may be a stale one, and "attempt" may
    # change while this rank waits for a confirmation that no one will write any more.
    while time.monotonic() < deadline:
        attempt = store.get("attempt").decode() if store.check(["attempt"]) else ""
        if attempt and attempt != answered:
            store.set(f"{attempt}/{rank}", token)
            answered = attempt
        if attempt and store.check([f"{attempt}/confirmed"]):
            confirmed = json.loads(store.get(f"{attempt}/confirmed"))
            if token in confirmed:
                return attempt
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    raise RuntimeError(
        f"rank 0 did not confirm that rank {rank} takes part within {timeout}: see its output."
    )
