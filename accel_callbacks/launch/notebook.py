"""Launch a function on several processes from a notebook or a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

from accel_callbacks.distributed.topology import destroy_topology, is_initialized
from accel_callbacks.errors import nearest
from accel_callbacks.launch.environment import changed_environment
from accel_callbacks.launch.fork import ForkPlan, run_forked
from accel_callbacks.launch.fork_safety import ForkSupport, probe_forks
from accel_callbacks.launch.machine import usable_cores
from accel_callbacks.options import PRECISIONS, resolve_config

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
        num_nodes: number of machines.
        rdzv_backend: ``"static"`` or ``"c10d"``.
        rdzv_endpoint: ``host:port`` of the rendezvous; by default ``master_addr`` and ``use_port``.
        rdzv_conf: more options of the rendezvous.
        rdzv_id: the same on all machines of a run.
        max_restarts: how often all processes are restarted after a failure.
        monitor_interval: seconds between two polls of the processes.
        log_line_prefix_template: prefix of each line that a process writes, such as
            ``"[${rank}] "``.

    Returns:
        The results of the processes on this machine, by rank. Tensors are on the CPU.

    Raises:
        RemoteError: a process failed; its traceback is in the text, and all processes have ended.
        RuntimeError: CUDA was already used in this process, or an Accelerator created; or the
            processes did not find each other; or this system cannot start several.
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
    plan = ForkPlan(
        launcher="notebook_launcher",
        processes=num_processes or 0,
        machines=num_nodes,
        conf=dict(rdzv_conf or {}),
        run_id=str(rdzv_id),
        environment=_accelerator_variables(mixed_precision),
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        prefix=log_line_prefix_template or None,
    )
    _check_plan(plan)
    plan = _with_rendezvous(plan, rdzv_backend, rdzv_endpoint, master_addr, use_port, node_rank)
    from accel_callbacks.engines.xla.device import has_xla  # few notebooks have a TPU

    if has_xla(os.environ) and not _on_cpu():
        if num_nodes > 1:
            raise ValueError(f"num_nodes={num_nodes}: on a TPU, one machine trains; leave it out.")
        return [_call_here(plan, function, args)]  # which computes on all devices
    plain = num_nodes == 1 and not max_restarts and plan.prefix is None
    asked = num_processes or (1 if sys.platform == "darwin" else None)  # it has one GPU at most
    if asked == 1 and plain:
        return [_call_here(plan, function, args)]
    method = _start_method("notebook_launcher", function, args)
    plan = replace(plan, start_method=method)
    counts = sys.platform != "darwin" and not _on_cpu()
    support = _probe(method, devices=counts, threads=_threads_for(asked or 1))
    # This process may count devices if it has used one.
    devices = torch.accelerator.device_count() if support.spoiled else support.devices
    processes = asked or max(1, devices)
    if processes == 1 and plain:
        return [_call_here(plan, function, args)]
    _check_uninitialized("notebook_launcher")
    _check_devices(processes, support)
    threads, on_cpu = _threads_for(processes, support), not support.devices
    plan = replace(plan, processes=processes, threads=threads, on_cpu=on_cpu)
    return run_forked(plan, function, args)


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
    support = _probe(method, devices=False, threads=_threads_for(num_processes))
    plan = ForkPlan(
        launcher="debug_launcher",
        processes=num_processes,
        start_method=method,
        environment={"ACCEL_CPU": "1", "ACCEL_MIXED_PRECISION": "no"},
        threads=_threads_for(num_processes, support),
        on_cpu=True,
    )
    return run_forked(plan, function, args)


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
    if not hasattr(os, "fork"):
        raise RuntimeError(
            f"{launcher} needs a system that can fork processes, which this one cannot: save the "
            "code to a file and start it with `accel launch`."
        )
    if sys.platform != "darwin" or os.environ.get(_FORK_ANYWAY) == "YES":
        return "fork"
    if not _can_spawn(function, args):
        raise RuntimeError(
            f"{launcher} starts new processes on macOS, as forks are not safe there. They need a "
            "function that they can import, and arguments that can be pickled: save the function "
            f"to a .py file and import it from there. Or accept forks: set {_FORK_ANYWAY}=YES "
            "before this process starts."
        )
    return "spawn"


def _can_spawn(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether a new process finds the function, which it does not if typed in a notebook."""
    main = sys.modules.get("__main__")
    if getattr(function, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        return False
    try:
        ForkingPickler.dumps((function, args))
    except Exception:  # each type has its own reason why it cannot be pickled
        return False
    return True


def _probe(method: str, *, devices: bool, threads: int) -> ForkSupport:
    """Probe what forks can use; new processes inherit nothing that could hinder them."""
    if method == "fork":
        return probe_forks(devices=devices, threads=threads)
    return ForkSupport(threaded=True)


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


def _threads_for(processes: int, support: ForkSupport | None = None) -> int:
    """Return OMP_NUM_THREADS or a process's share of the cores; 1 if forks cannot use threads."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    wanted = int(threads) if threads.isdigit() else usable_cores() // processes
    if support is not None and not support.threaded:
        return 1
    return max(1, wanted)


def _check_numbers(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be a whole number.")
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")


def _check_plan(plan: ForkPlan) -> None:
    """Validate values early, as torch's launcher would fail later and not name the option."""
    interval, prefix = plan.monitor_interval, plan.prefix
    if not isinstance(interval, int | float) or not interval > 0:
        raise ValueError(f"monitor_interval={interval!r} must be seconds above 0, such as 0.1.")
    if not isinstance(prefix, str | None):
        raise TypeError(f"log_line_prefix_template={prefix!r} must be a string, or None.")
    if "/" in plan.run_id:
        raise ValueError(f"rdzv_id={plan.run_id!r} must have no '/'.")


def _accelerator_variables(precision: str | None) -> dict[str, str]:
    """Return the variables that set defaults of the Accelerator."""
    if precision is None:
        return {}
    name = str(getattr(precision, "value", precision)).lower()
    if name not in PRECISIONS:
        raise ValueError(
            f"mixed_precision={precision!r} is unknown; use one of {', '.join(PRECISIONS)}."
            + nearest(name, PRECISIONS)
        )
    return {"ACCEL_MIXED_PRECISION": name}


def _with_rendezvous(
    plan: ForkPlan, backend: str, endpoint: str, host: str, port: int | str | None, rank: int
) -> ForkPlan:
    """Add the rendezvous to the plan; one machine without options keeps the plan's free port."""
    if not rank < plan.machines:
        raise ValueError(
            f"node_rank={rank} must be from 0 to {plan.machines - 1}, as num_nodes={plan.machines}."
        )
    number = str(_PORT if port is None else port)
    if not number.isdecimal() or int(number) > 65535:
        raise ValueError(f"use_port={port!r} must be a number up to 65535, such as {_PORT}.")
    free = port is None or int(number) == 0
    if plan.machines == 1 and free and not endpoint and backend in ("static", "c10d"):
        return plan
    if int(number) == 0 and not endpoint:
        raise ValueError(f"use_port={port!r}: machines cannot agree on a free port; name one.")
    conf = {**plan.conf, "rank": rank} if backend == "static" else plan.conf
    return replace(plan, backend=backend, endpoint=endpoint or f"{host}:{number}", conf=conf)


def _call_here(plan: ForkPlan, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call the function in this process, and undo its initialization for the next launch."""
    was_initialized = is_initialized()
    with changed_environment(plan.environment):
        try:
            return function(*args)
        finally:
            if not was_initialized:
                destroy_topology()


def _on_cpu() -> bool:
    return resolve_config({}, os.environ).cpu


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
