"""Launch a function on several processes from a notebook or a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

from accel_callbacks.distributed.topology import destroy_topology, is_initialized
from accel_callbacks.launch.environment import changed_environment
from accel_callbacks.launch.fork_probe import ForkSupport, probe_forks
from accel_callbacks.launch.functions import FunctionLaunch, run_function
from accel_callbacks.launch.machine import usable_cores
from accel_callbacks.options import resolve_config

__all__ = ["debug_launcher", "notebook_launcher"]

_PORT = 29500
_FORK_ANYWAY = "OBJC_DISABLE_INITIALIZE_FORK_SAFETY"


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: int | str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> list[Any]:
    """Run a function on several processes from a notebook; return the result of each.

    The processes are forks of this one, so they have the functions, classes and data of the
    notebook. Create the Accelerator inside of the function. A single process is not forked: the
    function is called in this process. On macOS, where forks are not safe, several processes are
    spawned, which takes a function of a module; Windows has a single process only. On a TPU it is
    one process too, which computes on all devices, whatever ``num_processes`` says.

    Args:
        function: called on each process.
        args: its arguments.
        num_processes: processes on this machine; by default one per GPU, or one without a GPU.
        mixed_precision: default of each Accelerator: ``"no"``, ``"fp16"``, ``"bf16"`` or
            ``"fp8"``; None for ``ACCEL_MIXED_PRECISION``, or else ``"no"``.
        use_port: port of the rendezvous; by default a free one on one machine, 29500 on several; 0
            for a free one too.
        master_addr: address of the first machine.
        node_rank: 0 on the first machine, 1 on the next. Run the cell on each of them.
        num_nodes: number of machines, each with ``num_processes``.
        rdzv_backend: ``"static"``, or ``"c10d"`` on one machine.
        rdzv_endpoint: ``host:port`` in place of ``master_addr`` and ``use_port``.
        rdzv_conf: for calls of Accelerate; without effect.
        rdzv_id: likewise.
        max_restarts: how often all processes are restarted after a failure; on one machine.
        monitor_interval: likewise without effect: the end of a process is seen at once.
        log_line_prefix_template: label of each line that Python writes in a process, such as
            ``"[${rank}] "``.

    Returns:
        The results of the processes on this machine, by rank. Tensors are on the CPU.

    Raises:
        RemoteError: a process failed; its traceback is in the text, and all processes have ended.
        RuntimeError: CUDA was already used in this process, or an Accelerator created; or the port
            is taken; or this system cannot start several.
        ValueError: an option has an invalid value.

    Example:
        >>> from accel_callbacks import Accelerator, notebook_launcher
        >>> def train(factor):
        ...     accel = Accelerator(cpu=True)
        ...     return factor * accel.process_index
        >>> notebook_launcher(train, args=(10,), num_processes=2)
        [0, 10]
    """
    _check_call("notebook_launcher", function, args)
    _check_numbers(1, num_processes=num_processes, num_nodes=num_nodes)
    _check_numbers(0, node_rank=node_rank, max_restarts=max_restarts)
    prefix = log_line_prefix_template or ""
    if not isinstance(prefix, str):
        raise TypeError(f"log_line_prefix_template={prefix!r} must be a string, or None.")
    host, port = _host_and_port(rdzv_endpoint, master_addr, use_port, num_nodes)
    _check_machines(num_nodes, node_rank, rdzv_backend, max_restarts)
    environment = _precision_variable(mixed_precision)
    from accel_callbacks.engines.xla.device import has_xla  # few notebooks have a TPU

    on_cpu = resolve_config({}, os.environ).cpu
    if has_xla(os.environ) and not on_cpu:
        if num_nodes > 1:
            raise ValueError(f"num_nodes={num_nodes}: on a TPU, one machine trains; leave it out.")
        return [_call_here(environment, function, args)]  # which computes on all devices
    is_plain = num_nodes == 1 and not max_restarts and not prefix
    if num_processes is None and sys.platform == "darwin":
        num_processes = 1  # it has one GPU at most
    if num_processes == 1 and is_plain:
        return [_call_here(environment, function, args)]
    method = _start_method("notebook_launcher", function, args)
    support = _probe(method, devices=not on_cpu, threads=_threads_of_each(num_processes or 1))
    if num_processes is None:
        # This process may count devices if it has used one.
        count = torch.accelerator.device_count() if support.spoiled else support.devices
        num_processes = max(1, count)
    if num_processes == 1 and is_plain:
        return [_call_here(environment, function, args)]
    _check_uninitialized("notebook_launcher")
    _check_devices(num_processes, support)
    launch = FunctionLaunch(
        launcher="notebook_launcher",
        processes=num_processes,
        start_method=method,
        machines=num_nodes,
        node_rank=node_rank,
        host=host,
        port=port,
        environment=environment,
        threads=_threads_of_each(num_processes) if support.threaded else 1,
        max_restarts=max_restarts,
        prefix=prefix,
        on_cpu=not support.devices,
    )
    return run_function(launch, function, args)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> list[Any]:
    """Run a function on several CPU processes; return the result of each.

    For tests, and for trying on a laptop what will run on GPUs; GPUs are not used.

    Args:
        function: called on each process; it creates its own Accelerator.
        args: its arguments.
        num_processes: number of processes.

    Returns:
        The results of the processes, by rank.

    Raises:
        RemoteError: a process failed; its traceback is in the text, and all processes have ended.
        RuntimeError: an Accelerator was already created in this process.

    Example:
        >>> from accel_callbacks import Accelerator, debug_launcher
        >>> def world():
        ...     return Accelerator().num_processes
        >>> debug_launcher(world)
        [2, 2]
    """
    _check_call("debug_launcher", function, args)
    _check_numbers(1, num_processes=num_processes)
    _check_uninitialized("debug_launcher")
    method = _start_method("debug_launcher", function, args)
    threads = _threads_of_each(num_processes)
    launch = FunctionLaunch(
        launcher="debug_launcher",
        processes=num_processes,
        start_method=method,
        environment={"ACCEL_CPU": "1", "ACCEL_MIXED_PRECISION": "no"},
        threads=threads if _probe(method, devices=False, threads=threads).threaded else 1,
        on_cpu=True,
    )
    return run_function(launch, function, args)


def _check_call(launcher: str, function: Any, args: Any) -> None:
    """Raise TypeError for a function that is not callable, or arguments that are no sequence."""
    if not callable(function):
        raise TypeError(
            f"{launcher} takes the function itself, not a {type(function).__name__}: write "
            f"{launcher}(train, args=(...)), not {launcher}(train(...))."
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(f"args={args!r} must be a tuple: write args=({args!r},) for one argument.")


def _start_method(launcher: str, function: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return ``"fork"``, or ``"spawn"`` on macOS.

    Objective-C ends a fork that uses what another thread of its parent was initializing.

    Raises:
        RuntimeError: this system can neither fork nor spawn the function.
    """
    if sys.platform == "win32":
        raise RuntimeError(
            f"{launcher} needs a system that can fork processes, which this one cannot: save the "
            "code to a file and start it with `accel launch`."
        )
    if sys.platform != "darwin" or os.environ.get(_FORK_ANYWAY) == "YES":
        return "fork"
    is_typed = function.__module__ == "__main__" and not hasattr(
        sys.modules["__main__"], "__file__"
    )
    try:
        ForkingPickler.dumps((function, args))
        can_spawn = not is_typed  # in a notebook, where a new process does not find it
    except Exception:  # each type has its own reason why it cannot be pickled
        can_spawn = False
    if not can_spawn:
        raise RuntimeError(
            f"{launcher} starts new processes on macOS, as forks are not safe there. They need a "
            "function that they can import, and arguments that can be pickled: save the function "
            f"to a .py file and import it from there. Or accept forks: set {_FORK_ANYWAY}=YES "
            "before this process starts."
        )
    return "spawn"


def _probe(method: str, *, devices: bool, threads: int) -> ForkSupport:
    """Probe what forks can use; new processes inherit nothing that could hinder them."""
    if method == "spawn":
        return ForkSupport(threaded=True)
    return probe_forks(devices=devices and sys.platform != "darwin", threads=threads)


def _check_uninitialized(launcher: str) -> None:
    """Raise RuntimeError if forks would inherit an initialized topology or process group."""
    if is_initialized():
        raise RuntimeError(
            f"{launcher}: an Accelerator or PartialState was already made in this process, and its "
            "forks would inherit it. Make it inside of the function, and run "
            "`PartialState().destroy_process_group()` here, or restart the kernel."
        )
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            f"{launcher}: this process is in a process group already. Run "
            "`torch.distributed.destroy_process_group()`, or restart the kernel."
        )


def _threads_of_each(processes: int) -> int:
    """Return OMP_NUM_THREADS, or the share of a process in the cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(threads) if threads.isdigit() else usable_cores() // processes)


def _check_numbers(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be a whole number.")
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")


def _host_and_port(
    endpoint: str, address: str, port: int | str | None, machines: int
) -> tuple[str, int]:
    """Return host and port of the processes; 0 for a free port, which one machine can have."""
    host, colon, own_port = endpoint.rpartition(":")
    if endpoint and not colon:
        raise ValueError(f"rdzv_endpoint={endpoint!r} must be host:port.")
    if port is None and machines > 1:
        port = _PORT
    number = own_port or str(port or 0)
    if not number.isdecimal() or int(number) > 65535:
        raise ValueError(f"use_port={number!r} must be a number up to 65535, such as {_PORT}.")
    if machines > 1 and int(number) == 0:
        raise ValueError(f"use_port={port!r}: machines cannot agree on a free port; name one.")
    return host or address, int(number)


def _check_machines(machines: int, node_rank: int, backend: str, max_restarts: int) -> None:
    if not node_rank < machines:
        raise ValueError(
            f"node_rank={node_rank} must be from 0 to {machines - 1}, as num_nodes={machines}."
        )
    if backend not in ("static", "c10d"):
        raise ValueError(f"rdzv_backend={backend!r} must be 'static' or 'c10d'.")
    if machines > 1 and (backend != "static" or max_restarts):
        raise ValueError(
            "rdzv_backend='c10d' and max_restarts are for one machine: on several, give each its "
            "node_rank= and no restarts, or save the code to a file and start it with "
            "`accel launch`, which restarts all machines."
        )


def _precision_variable(precision: str | None) -> dict[str, str]:
    """Return the variable that is the default of the Accelerator."""
    if precision is None:
        return {}
    name = str(getattr(precision, "value", precision)).lower()
    resolve_config({"mixed_precision": name}, {})  # raises if it is unknown
    return {"ACCEL_MIXED_PRECISION": name}


def _call_here(
    environment: Mapping[str, str], function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """Call the function in this process, and undo its initialization for the next launch."""
    was_initialized = is_initialized()
    with changed_environment(environment):
        try:
            return function(*args)
        finally:
            if not was_initialized:
                destroy_topology()


def _check_devices(processes: int, support: ForkSupport) -> None:
    if support.spoiled:
        built = torch.accelerator.current_accelerator()
        kind = built.type.upper() if built is not None else "an accelerator"
        raise RuntimeError(
            f"notebook_launcher: {kind} was already used in this process, so that its forks cannot "
            "use it. Restart the kernel, and do not use it in other cells: no tensors or models "
            "`.to(...)` it, no `torch.cuda.is_available()`, no Accelerator, and no imports that do "
            "so. For the CPU alone, use debug_launcher."
        )
    if support.devices and processes > support.devices:
        raise ValueError(
            f"num_processes={processes}, but this machine shows {support.devices} devices. Use at "
            "most as many, or debug_launcher for processes on the CPU."
        )
