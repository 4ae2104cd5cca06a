"""Choose the number of processes and the rendezvous, from the settings and SLURM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from accel_callbacks.launch.resolve import Resolved
from accel_callbacks.launch.settings import LaunchSettings
from accel_callbacks.launch.slurm import SlurmPlace
from accel_callbacks.plugins.option import SettingsError, shown

DEFAULT_PORT = 29500
_PLACES = ("num_machines", "nnodes", "machine_rank", "main_process_ip", "rdzv_endpoint")


@dataclass(frozen=True)
class Host:
    """This machine: its environment, cores, accelerators and free ports."""

    environment: Mapping[str, str]
    cores: int
    count_devices: Callable[[], int]
    free_port: Callable[[], int]


@dataclass(frozen=True)
class Rendezvous:
    """Number of machines and of local processes, and torchrun's options for the rendezvous."""

    least: int
    most: int
    local: int
    words: tuple[str, ...]
    first_rank: int | None = None  # of this machine; None if the rendezvous assigns ranks
    address: str = "127.0.0.1"
    port: int | None = None
    any_port: bool = False  # nobody has asked for this one


def has_explicit_place(resolved: Resolved) -> bool:
    """Return whether the command line gives the machines or the rank of this one."""
    return any(resolved.origins.get(name) == "command line" for name in _PLACES)


def fill_from_slurm(resolved: Resolved, place: SlurmPlace | None) -> LaunchSettings:
    """Take machines, rank and address from the SLURM step unless the command line gives them.

    The rank in a config file is ignored: the file is the same on all machines.

    Raises:
        SettingsError: the config file has another number of machines than the step.
    """
    settings = resolved.settings
    if place is None or not place.in_step:
        return settings
    machines = len(place.hosts)
    counted = settings.nnodes is None and resolved.given("num_machines")
    if counted and settings.num_machines != machines:
        origin = resolved.origins["num_machines"]
        if origin == "command line":
            return settings
        raise SettingsError(
            f"num_machines: {settings.num_machines} ({origin}), but this SLURM step runs on "
            f"{machines} machines: pass --num_machines {machines}, or remove it from the file"
        )
    if machines == 1:
        return settings
    typed = {name for name, origin in resolved.origins.items() if origin == "command line"}
    changes: dict[str, Any] = {
        "num_machines": settings.num_machines if settings.nnodes else machines,
        "machine_rank": settings.machine_rank if "machine_rank" in typed else place.machine_rank,
        "main_process_ip": settings.main_process_ip or place.hosts[0],
        "main_process_port": settings.main_process_port or place.port,
    }
    return replace(settings, **changes)


def plan_rendezvous(
    settings: LaunchSettings, extras: Mapping[str, Any], host: Host, knows_rank: bool = False
) -> Rendezvous:
    """Choose the rendezvous; `knows_rank`: the rank of this machine was given, or SLURM has it.

    Raises:
        SettingsError: the settings do not fit together.
    """
    least, most = _machines(settings)
    local = _processes_here(settings, most, host)
    if not 0 <= settings.machine_rank < most:
        raise SettingsError(
            f"--machine_rank {settings.machine_rank} must be from 0 to {most - 1} "
            f"(--num_machines {most})"
        )
    if extras.get("standalone") and most > 1:
        raise SettingsError(f"--standalone is for one machine, not {most}: leave one of them out")
    if extras.get("standalone"):
        return Rendezvous(1, 1, local, ("--standalone", "--local-addr", "127.0.0.1"), 0)
    if least == most and _is_static(settings, most):
        return _static(settings, most, local, host)
    return _dynamic(settings, least, most, local, knows_rank)


def _is_static(settings: LaunchSettings, machines: int) -> bool:
    """Return whether to use the static rendezvous, in which all ranks are known from the start.

    A restart needs another backend: the static one shares one store among all attempts, in which
    gloo would read the addresses of the previous attempt.
    """
    if settings.max_restarts > 0 and machines > 1 and settings.rdzv_backend == "static":
        raise SettingsError(
            "--max_restarts does not go with --rdzv_backend static on several machines: torch's "
            "static rendezvous cannot be repeated. Pass --rdzv_backend c10d"
        )
    if settings.max_restarts > 0:
        return False
    return settings.rdzv_backend in (None, "static")


def _machines(settings: LaunchSettings) -> tuple[int, int]:
    """Return the smallest and largest number of machines."""
    if settings.nnodes is None:
        return settings.num_machines, settings.num_machines
    least, _, most = settings.nnodes.partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most) < 10**6):
        raise SettingsError(f"--nnodes {settings.nnodes!r} is neither N nor LEAST:MOST, as 1:2")
    return int(least), int(most)


def _processes_here(settings: LaunchSettings, machines: int, host: Host) -> int:
    """Return the number of processes on this machine; num_processes is that of all machines."""
    if settings.nproc_per_node is not None:
        return settings.nproc_per_node
    if settings.num_processes is None:
        return _default_processes(settings, host)
    local, rest = divmod(settings.num_processes, machines)
    if rest or not local:
        raise SettingsError(
            f"--num_processes {settings.num_processes} is the total over all machines and must be "
            f"a multiple of --num_machines {machines}"
        )
    if settings.gpu_ids is not None and not settings.use_cpu:
        named = len(settings.gpu_ids.split(","))
        if named < local:
            raise SettingsError(
                f"--gpu_ids {settings.gpu_ids} names {named} GPUs for {local} processes on this "
                "machine: name one for each, or lower --num_processes"
            )
    return local


def _default_processes(settings: LaunchSettings, host: Host) -> int:
    if settings.use_cpu or settings.distributed_type in ("NO", "MULTI_CPU"):
        return 1
    if settings.gpu_ids is not None:
        return len(settings.gpu_ids.split(","))
    return max(1, host.count_devices())


def _static(settings: LaunchSettings, machines: int, local: int, host: Host) -> Rendezvous:
    """Rendezvous of a fixed number of machines that know their rank and the first one's address."""
    address, port = settings.main_process_ip, settings.main_process_port
    if machines > 1 and (address is None or port == 0) and settings.rdzv_endpoint is None:
        raise SettingsError(
            "several machines need --main_process_ip and --main_process_port of the first one, "
            "the same on every machine, and their own --machine_rank"
        )
    if settings.rdzv_endpoint is not None:
        address, _, text = settings.rdzv_endpoint.rpartition(":")
        if not address or not text.isdecimal():
            raise SettingsError(f"--rdzv_endpoint {shown(settings.rdzv_endpoint)} is not HOST:PORT")
        port = int(text)
    any_port = machines == 1 and not port
    if machines == 1:
        # Not c10d's: it waits for a random time of up to 0.3 s first.
        address, port = address or "127.0.0.1", port or host.free_port()
    address, port = address or "127.0.0.1", port or DEFAULT_PORT
    words: tuple[str, ...] = ("--rdzv-backend", "static")
    words += ("--node-rank", str(settings.machine_rank))
    main_machine = ("--master-addr", address, "--master-port", str(port))
    # On one machine, do not depend on a name server that knows its name.
    local_address = settings.local_addr or ("127.0.0.1" if machines == 1 else None)
    words += (*main_machine, *(("--local-addr", local_address) if local_address else ()))
    words += ("--rdzv-conf", settings.rdzv_conf) if settings.rdzv_conf else ()
    first = settings.machine_rank * local
    return Rendezvous(machines, machines, local, words, first, address, port, any_port)


def _dynamic(
    settings: LaunchSettings, least: int, most: int, local: int, knows_rank: bool
) -> Rendezvous:
    """Rendezvous of a varying number of machines that all know the address of one of them."""
    address, port = settings.main_process_ip, settings.main_process_port
    endpoint = settings.rdzv_endpoint
    if endpoint is None and most > 1:
        if address is None:
            raise SettingsError(
                "several machines need --main_process_ip and --main_process_port of the first one, "
                "or --rdzv_endpoint HOST:PORT, the same on every machine"
            )
        endpoint = f"{address}:{port or DEFAULT_PORT}"
    endpoint = endpoint or f"{address or 'localhost'}:{port or 0}"
    backend, conf = settings.rdzv_backend or "c10d", settings.rdzv_conf or ""
    backend = "c10d" if backend == "static" else backend
    if most > 1 and backend == "c10d" and knows_rank and "is_host" not in conf:
        # By default torch compares host names with the address, which fails on a second network.
        host = f"is_host={str(settings.machine_rank == 0).lower()}"
        conf = f"{conf},{host}" if conf else host
    words = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint]
    words += ["--rdzv-conf", conf] if conf else []
    local_address = settings.local_addr or ("127.0.0.1" if most == 1 else None)
    words += ["--local-addr", local_address] if local_address else []
    first = 0 if most == 1 else None
    return Rendezvous(least, most, local, tuple(words), first, endpoint.rpartition(":")[0])
