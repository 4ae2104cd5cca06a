"""Functions on forked copies of this process, under torch's elastic launcher."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_callbacks.launch.environment import changed_environment
from accel_callbacks.launching.in_fork import InFork
from accel_callbacks.launching.kernel import left_as_it_was
from accel_callbacks.launching.last_words import LastWords
from accel_callbacks.launching.parcel import Parcel

__all__ = ["ForkPlan", "run_forked"]


@dataclass(frozen=True)
class ForkPlan:
    """How many processes there are, where they meet, and what they are given.

    Args:
        where: the call that the errors name.
        processes: on this machine.
        machines: that take part.
        backend: by which they find each other.
        endpoint: where; on one machine a free port of its own.
        conf: more options of the rendezvous.
        run_id: the same on all machines.
        environment: variables of the processes.
        threads: with which each computes.
        max_restarts: how often all are started again after a failure.
        monitor_interval: seconds between two looks at them.
        prefix: of each line that they write.
        on_cpu: the processes use no accelerator.

    Example:
        >>> from accel_callbacks.launch.fork import ForkPlan
        >>> ForkPlan(where="debug_launcher", processes=2).endpoint
        'localhost:0'
    """

    where: str
    processes: int
    machines: int = 1
    backend: str = "c10d"
    endpoint: str = "localhost:0"
    conf: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = "none"
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    max_restarts: int = 0
    monitor_interval: float = 0.1
    prefix: str | None = None
    on_cpu: bool = False


def run_forked(plan: ForkPlan, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """Call a function on forked processes; what it returned on each of this machine, by rank.

    Raises:
        RemoteError: a process failed; the traceback is in the text.
        RuntimeError: the processes did not find each other.
        KeyboardInterrupt: a Ctrl-C came; the processes have ended.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    _check_streams(plan)
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="accel-") as folder:
        words = LastWords(Path(tempfile.mkdtemp(dir=folder)))

        def entry() -> Parcel:
            first = InFork(
                words,
                threads=plan.threads,
                redirected=plan.prefix is not None,
                outspoken=plan.max_restarts > 0,
            )
            return first.call(function, args)

        failed: Mapping[int, Any] = {}
        with changed_environment(_environment(plan)), left_as_it_was():
            if plan.on_cpu:
                # DDP imports it, which takes seconds: once here, or each time in each process.
                importlib.import_module("torch._dynamo")
            try:
                found = elastic_launch(_configuration(plan, folder), entry)()
                return [found[rank] for rank in sorted(found)]
            except ChildFailedError as error:
                failed = error.failures
            except (DistError, RendezvousError, RuntimeError) as error:
                problem = _not_met(plan, error)
                raise problem from (None if problem is error else error)
        raise words.of_last_attempt().explain(failed, plan.where)


def _check_streams(plan: ForkPlan) -> None:
    try:
        _ = plan.prefix and (sys.stdout.fileno(), sys.stderr.fileno())
    except (AttributeError, OSError):
        raise RuntimeError(
            f"{plan.where}: log_line_prefix_template needs an output that is a file, which that of "
            "this notebook is not. Leave it out, and let the function print the rank."
        ) from None


def _environment(plan: ForkPlan) -> dict[str, str]:
    chosen = {"OMP_NUM_THREADS": str(plan.threads)}
    if plan.machines == 1 and any(name == "lo" for _, name in socket.if_nameindex()):
        chosen["GLOO_SOCKET_IFNAME"] = "lo"  # the name of this machine may lead nowhere
    return {**chosen, **{k: os.environ[k] for k in chosen if k in os.environ}, **plan.environment}


def _configuration(plan: ForkPlan, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    # Without this torch asks CUDA itself whether it is there, which spoils it for the forks.
    with changed_environment({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        config = LaunchConfig(
            min_nodes=plan.machines,
            max_nodes=plan.machines,
            nproc_per_node=plan.processes,
            logs_specs=DefaultLogsSpecs(folder, tee=Std.ALL if plan.prefix else Std.NONE),
            run_id=plan.run_id,
            rdzv_endpoint=plan.endpoint,
            rdzv_backend=plan.backend,
            rdzv_configs=dict(plan.conf),
            max_restarts=plan.max_restarts,
            monitor_interval=plan.monitor_interval,
            start_method="fork",
            log_line_prefix_template=plan.prefix,
            local_addr="127.0.0.1" if plan.machines == 1 else None,
        )
    if hasattr(config, "numa_options"):
        config.numa_options = None
    return config


def _not_met(plan: ForkPlan, error: Exception) -> Exception:
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if "EADDRINUSE" in str(error):  # torch 2.6 raises it as a mere RuntimeError
        return RuntimeError(
            f"{plan.where}: the port of {plan.endpoint} is taken, perhaps by another run. Give "
            "another use_port=, or none on one machine, to get a free one."
        )
    if not isinstance(error, DistError | RendezvousError):
        return error
    why = str(error).rstrip(".")
    return RuntimeError(
        f"{plan.where}: the processes did not find each other: {why}. On several machines, run "
        "the cell on each, with the same master_addr and use_port, and its own node_rank."
    )
