"""What ``accel launch`` is about to do, worked out before anything starts: no torch, no writes."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from accel_callbacks.cli.options import CommandError

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class LaunchPlan:
    """The torchrun arguments and the variables that the children get on top of this environment."""

    torchrun: tuple[str, ...]
    script: str
    script_args: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def escaped_args(self) -> list[str]:
        """Arguments of the script such that torchrun's ``$`` macros hand them on unchanged."""
        return [word.replace("$", "$$") for word in self.script_args]

    def as_shell(self) -> str:
        """Write the plan as lines that do the same when pasted in a shell."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        command = shlex.join(["torchrun", *self.torchrun, self.script, *self.escaped_args])
        return "\n".join([*exports, command])


def build_plan(
    args: Namespace, environ: Mapping[str, str], cores: int, count_devices: Callable[[], int]
) -> LaunchPlan:
    """Check the options and turn them into a plan; `CommandError` when they do not fit."""
    _check_program(args)
    local = _processes_here(args, count_devices)
    return LaunchPlan(
        torchrun=(
            *("--nnodes", str(args.num_machines), "--nproc-per-node", str(local)),
            *_rendezvous(args),
            *_passed_on(args),
        ),
        script=args.program[0],
        script_args=tuple(args.program[1:]),
        env=_child_environment(args, environ, cores, local),
    )


def _check_program(args: Namespace) -> None:
    """Fail now, with one message, rather than once a process."""
    if args.module and args.no_python:
        raise CommandError("-m and --no_python exclude each other: give one of them")
    name: str = args.program[0]
    if args.module:
        found, wanted = _module_exists(name), "a module that Python can import from here"
    elif args.no_python:
        found, wanted = shutil.which(name) is not None, "an executable file or command"
    else:
        found, wanted = Path(name).exists(), f"a file (looked from {os.getcwd()})"
    if not found:
        raise CommandError(f"{name!r} is not {wanted}; nothing was started")


def _module_exists(name: str) -> bool:
    """Look for the top-level package only: finding a submodule would import its parents."""
    top = name.partition(".")[0]
    # `python -m` looks in the working directory first; this console script's path lacks it.
    if PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None:
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except ValueError:
        return False


def _processes_here(args: Namespace, count_devices: Callable[[], int]) -> int:
    """Number of processes on this machine; --num_processes counts those of all machines."""
    if args.num_processes is None:
        return 1 if args.cpu else max(1, count_devices())
    local, rest = divmod(int(args.num_processes), int(args.num_machines))
    if rest or not local:
        raise CommandError(
            f"--num_processes {args.num_processes} is the total over all machines and must be "
            f"a multiple of --num_machines {args.num_machines}"
        )
    return local


def _rendezvous(args: Namespace) -> tuple[str, ...]:
    """One machine meets itself on a free port; several meet at the address of the first."""
    if not 0 <= args.machine_rank < args.num_machines:
        raise CommandError(
            f"--machine_rank {args.machine_rank} must be from 0 to {args.num_machines - 1} "
            f"(--num_machines {args.num_machines})"
        )
    address, port = args.main_process_ip, args.main_process_port
    if args.num_machines == 1 and (port == 0 or (address is None and port is None)):
        # A name server that does not know this machine's own name must not matter here.
        return ("--standalone", "--local-addr", "127.0.0.1")
    if args.num_machines > 1 and (address is None or port == 0):
        raise CommandError(
            "several machines need --main_process_ip and --main_process_port of the first one, "
            "the same on every machine, and their own --machine_rank"
        )
    return (
        *("--rdzv-backend", "static", "--node-rank", str(args.machine_rank)),
        *("--master-addr", address or "127.0.0.1"),
        *("--master-port", str(port or DEFAULT_PORT)),
    )


def _passed_on(args: Namespace) -> tuple[str, ...]:
    """Return the options that torchrun has too, as it spells them."""
    values = {
        "--max-restarts": args.max_restarts,
        "--monitor-interval": args.monitor_interval,
        "--log-dir": args.log_dir,
        "--tee": args.tee,
        "--redirects": args.redirects,
    }
    words = [word for k, v in values.items() if v is not None for word in (k, str(v))]
    switches = {"--module": args.module, "--no-python": args.no_python}
    return (*words, *(flag for flag, on in switches.items() if on))


def _child_environment(
    args: Namespace, environ: Mapping[str, str], cores: int, local: int
) -> dict[str, str]:
    """Variables for the children: only what was asked for, and safe defaults that are not set."""
    threads = args.num_cpu_threads_per_process
    asked = {
        "ACCEL_MIXED_PRECISION": args.mixed_precision,
        "ACCEL_GRADIENT_ACCUMULATION_STEPS": args.gradient_accumulation_steps,
        "ACCEL_CPU": 1 if args.cpu else None,
        "ACCEL_DEBUG": 1 if args.debug else None,
        "OMP_NUM_THREADS": threads,
    }
    defaults = {
        "OMP_NUM_THREADS": max(1, cores // local),
        # A restarted gloo worker otherwise reads the addresses of the attempt before it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1 if args.max_restarts else None,
    }
    chosen = {name: value for name, value in defaults.items() if name not in environ}
    chosen.update({name: value for name, value in asked.items() if value is not None})
    return {name: str(value) for name, value in chosen.items() if value is not None}
