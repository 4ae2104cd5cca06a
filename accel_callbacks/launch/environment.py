"""The environment variables of launched processes; the only place that writes ``os.environ``."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from accel_callbacks.launch.rendezvous import Host
from accel_callbacks.launch.resolve import Resolved

__all__ = [
    "OWN_STORES",
    "RECORDER_PREFIX",
    "changed_environment",
    "child_environment",
    "exports",
    "loopback_variables",
    "rank_variables",
    "recorder_variables",
]

_VISIBLE_DEVICES = {
    "MULTI_XPU": "ZE_AFFINITY_MASK",
    "MULTI_NPU": "ASCEND_RT_VISIBLE_DEVICES",
    "MULTI_MLU": "MLU_VISIBLE_DEVICES",
    "MULTI_SDAA": "SDAA_VISIBLE_DEVICES",
    "MULTI_MUSA": "MUSA_VISIBLE_DEVICES",
    "MULTI_HPU": "HABANA_VISIBLE_MODULES",
}

#: Keeps torch from sharing one store among all attempts; ours makes one for each.
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

#: Each rank's dump of the flight recorder has this name, and its rank behind it.
RECORDER_PREFIX = "flight_recorder_rank_"
_RENAMED_IN = (2, 10)  # the torch in which the recorder's variables have their newer names


def rank_variables(
    rank: int, world: int, local: int, local_world: int, address: str, port: int | None
) -> dict[str, str]:
    """Return the variables that torch's launcher sets for a process."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": local_world,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def child_environment(resolved: Resolved, host: Host, cores: int) -> dict[str, str]:
    """Return variables for the processes: settings that were given, and a default thread count."""
    settings = resolved.settings
    env = {}
    if sys.platform == "win32" and "USE_LIBUV" not in host.environment:
        env["USE_LIBUV"] = "0"  # torch is built without it there, and asks for it before 2.8 or so
    if settings.num_cpu_threads_per_process is not None:
        env["OMP_NUM_THREADS"] = str(settings.num_cpu_threads_per_process)
    elif "OMP_NUM_THREADS" not in host.environment:
        env["OMP_NUM_THREADS"] = str(max(1, cores))
    if settings.gpu_ids is not None and not settings.use_cpu:
        env[_VISIBLE_DEVICES.get(settings.distributed_type or "", "CUDA_VISIBLE_DEVICES")] = (
            settings.gpu_ids.replace(" ", "")
        )
    return {**env, **resolved.variables()}


def loopback_variables() -> dict[str, str]:
    """Return the variables by which gloo and NCCL listen on loopback, for runs on one machine.

    Without them they listen at the address of the host name, or of the first network card; gloo
    fails where the name resolves to no local address. Empty if no interface is named ``lo``.
    """
    if not hasattr(socket, "if_nameindex") or "lo" not in dict(socket.if_nameindex()).values():
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def recorder_variables(log_dir: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which torch's flight recorder writes its dumps into a folder.

    Args:
        log_dir: the folder.
        environment: of this process; what it has of them, under either name, is kept.
    """
    prefix = os.path.join(os.path.abspath(log_dir), RECORDER_PREFIX)
    wanted = [
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",) * 2, "1"),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix),
    ]
    older = _torch_version() < _RENAMED_IN
    return {
        names[older]: value
        for names, value in wanted
        if not any(name in environment for name in names)
    }


def _torch_version() -> tuple[int, int]:
    try:
        major, minor, *_ = version("torch").split(".")
        return int(major), int(minor)
    except (PackageNotFoundError, ValueError):
        return _RENAMED_IN


def exports(env: Mapping[str, str]) -> list[str]:
    """Return the shell commands that set the variables."""
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]


@contextmanager
def changed_environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes started in the block; restore the whole environment after it.

    Changes that others make in the block, as torch's launcher does, are undone too.
    """
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        changed = {name: value for name, value in before.items() if os.environ.get(name) != value}
        os.environ.update(changed)
