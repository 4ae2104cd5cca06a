"""Launch a function on several processes from a notebook or a test."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
import torch.distributed as dist

from accel_callbacks.distributed.topology import destroy_topology, is_initialized
from accel_callbacks.launch.environment import changed_environment
from accel_callbacks.launch.functions import FunctionLaunch, quiet_forks, run_function
from accel_callbacks.options import resolve_config

__all__ = ["debug_launcher", "notebook_launcher"]

_PORT = 29500


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
    if node_rank >= num_nodes:
        raise ValueError(f"node_rank={node_rank} must be below num_nodes={num_nodes}.")
    if num_nodes > 1 and (rdzv_backend != "static" or max_restarts):
        raise ValueError(
            "rdzv_backend='c10d' and max_restarts are for one machine: on several, give each its "
            "node_rank= and no restarts, or use `accel launch`, which restarts all machines."
        )
    host, port = _host_and_port(rdzv_endpoint, master_addr, use_port, num_nodes)
    environment = _precision_variable(mixed_precision)
    prefix = log_line_prefix_template or ""
    is_plain = num_nodes == 1 and not max_restarts and not prefix
    on_cpu = resolve_config({}, os.environ).cpu or sys.platform == "darwin"
    from accel_callbacks.engines.xla.device import has_xla  # few notebooks have a TPU

    if not on_cpu and has_xla(os.environ):
        if num_nodes > 1:
            raise ValueError(f"num_nodes={num_nodes}: on a TPU, one machine trains; leave it out.")
        num_processes, is_plain = 1, True  # which computes on all devices
    if num_processes == 1 and is_plain:
        return [_call_here(environment, function, args)]
    method = _start_method("notebook_launcher", function)
    devices = 0 if on_cpu else _count_usable_devices(num_processes)
    num_processes = num_processes or max(1, devices)
    if num_processes == 1 and is_plain:
        return [_call_here(environment, function, args)]
    _check_uninitialized("notebook_launcher")
    if not devices:
        _import_once(method)
    launch = FunctionLaunch(
        launcher="notebook_launcher",
        processes=num_processes,
        start_method=method,
        machines=num_nodes,
        node_rank=node_rank,
        host=host,
        port=port,
        environment=environment,
        max_restarts=max_restarts,
        prefix=prefix,
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
    method = _start_method("debug_launcher", function)
    _import_once(method)
    environment = {"ACCEL_CPU": "1", "ACCEL_MIXED_PRECISION": "no"}
    launch = FunctionLaunch("debug_launcher", num_processes, method, environment=environment)
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


def _start_method(launcher: str, function: Callable[..., Any]) -> str:
    """Return ``"fork"``, or ``"spawn"`` on macOS, which ends forks that use Objective-C.

    Raises:
        RuntimeError: this system can neither fork nor spawn the function.
    """
    in_notebook = not hasattr(sys.modules["__main__"], "__file__")
    is_local = "<locals>" in getattr(function, "__qualname__", "")
    cannot_import = is_local or (in_notebook and function.__module__ == "__main__")
    if sys.platform == "win32" or (sys.platform == "darwin" and cannot_import):
        raise RuntimeError(
            f"{launcher} cannot fork processes on this system, and new ones do not have this "
            "function: save the code to a file and start it with `accel launch`. On macOS, a "
            "function that is imported from a module works too."
        )
    return "spawn" if sys.platform == "darwin" else "fork"


def _import_once(method: str) -> None:
    """Import before the forks what DDP imports, which takes seconds; not if it may use a device."""
    if method == "fork":
        with changed_environment({}):  # it sets variables
            importlib.import_module("torch._dynamo")


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
    host, _, own_port = endpoint.rpartition(":")
    number = own_port or str(port or (_PORT if port is None and machines > 1 else 0))
    if not number.isdecimal() or int(number) > 65535:
        raise ValueError(f"use_port={number!r} must be a number up to 65535, such as {_PORT}.")
    if machines > 1 and int(number) == 0:
        raise ValueError(f"use_port={port!r}: machines cannot agree on a free port; name one.")
    return host or address, int(number)


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


def _count_usable_devices(processes: int | None) -> int:
    """Return the number of accelerators, counted in a fork.

    To count them here can alone make CUDA unusable in forks.

    Args:
        processes: that are to use them, if that was said.

    Raises:
        RuntimeError: forks cannot use them.
        ValueError: there are fewer than processes.
    """
    context = multiprocessing.get_context("fork")
    try:
        with quiet_forks(), ProcessPoolExecutor(1, context) as pool:
            devices, are_spoiled = pool.submit(_count_devices).result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a fork of this process that counted GPUs died: check their driver (nvidia-smi), then "
            "restart the kernel. debug_launcher needs no GPU."
        ) from None
    if are_spoiled and processes is None and torch.accelerator.device_count() == 1:
        return 1  # for which no fork is needed
    if are_spoiled:
        raise RuntimeError(
            "notebook_launcher: the GPU was already used in this process, so that its forks cannot "
            "use it. Restart the kernel, and do not use it in other cells: no tensors or models "
            "`.to(...)` it, no `torch.cuda.is_available()`, no Accelerator, and no imports that do "
            "so. For the CPU alone, use debug_launcher."
        )
    if devices and processes is not None and processes > devices:
        raise ValueError(
            f"num_processes={processes}, but this machine shows {devices} devices. Use at most as "
            "many, or debug_launcher for processes on the CPU."
        )
    return devices


def _count_devices() -> tuple[int, bool]:
    """In the fork: count usable accelerators; also return whether the parent has spoiled them."""
    for module in (torch.cuda, torch.xpu):
        if module._is_in_bad_fork():
            return 0, True
    usable = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    # Torch does not notice every initialization of CUDA; the driver then counts more than is usable
    return usable, torch.cuda.device_count() > usable
