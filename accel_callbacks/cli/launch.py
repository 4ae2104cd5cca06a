"""``accel launch``: start a script on one or more processes."""

from __future__ import annotations

import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from accel_callbacks.cli.launch_options import configure, given_extras, read_program
from accel_callbacks.cli.parser import CommandError
from accel_callbacks.launch.environment import changed_environment
from accel_callbacks.launch.machine import DRIVERS, usable_cores
from accel_callbacks.launch.option import SettingsError
from accel_callbacks.launch.plan import DirectPlan, Plan, TpuPlan, build_plan
from accel_callbacks.launch.rendezvous import Here
from accel_callbacks.launch.report import exit_code
from accel_callbacks.launch.resolve import refuse_absent_gpus, refuse_unbuilt, resolve_settings
from accel_callbacks.launch.settings import find
from accel_callbacks.launch.watchdog import guarded

__all__ = ["configure", "run"]

_DRIVERS = tuple({start for starts in DRIVERS.values() for start in starts})


def run(args: Namespace) -> int:
    """Launch, wait, and return the exit code of the first process that failed.

    Where ``args.whole_process`` is true, this process is the command ``accel launch`` and nothing
    else: a single process of the run then takes its place and nothing is returned.
    """
    try:
        plan = _plan(args, os.environ)
        if args.dry_run:
            print(plan.as_shell())
            return 0
        return _start(plan, getattr(args, "whole_process", False))
    except SettingsError as error:
        raise CommandError(str(error)) from None


def _plan(args: Namespace, environment: Mapping[str, str]) -> Plan:
    """What a command line leads to, here and in this environment."""
    program = read_program(args)
    script = program.name if program.kind == "script" else None
    typed = {**vars(args), "nproc_per_node": _processes_here(args.nproc_per_node)}
    resolved = resolve_settings(typed, args.config_file, script, environment)
    refuse_unbuilt(resolved)
    for path, reason in resolved.idle().items():
        one = find(path)
        if resolved.origins.get(path) == "command line" and resolved.value(path) != one.default:
            print(f"accel launch: {one.flag} has no effect: {reason}", file=sys.stderr)
    here = Here(environment, usable_cores(), _count_devices, _free_port)
    words = getattr(args, "words", [])
    plan = build_plan(resolved, program, here, given_extras(args), words, args.quiet)
    if not args.dry_run and not (isinstance(plan, DirectPlan) and plan.elsewhere):
        refuse_absent_gpus(resolved)
    return plan


def _processes_here(asked: int | str | None) -> int | None:
    """The number, for which torchrun takes words too."""
    if not isinstance(asked, str):
        return asked
    devices = 0 if asked == "cpu" else _count_devices()
    if asked == "gpu" and not devices:
        raise CommandError("--nproc_per_node gpu: this machine shows no GPU; name a number")
    return devices or usable_cores()


def _start(plan: Plan, whole_process: bool) -> int:
    if isinstance(plan, DirectPlan):
        _check_port(plan.env)
        return _replace_this_process(plan) if whole_process else _run_below(plan)
    with guarded() as marks, changed_environment({**plan.env, **marks}):
        if isinstance(plan, TpuPlan):
            return _run_on_tpu(plan)
        from accel_callbacks.launch.agent import run_agent

        return run_agent(plan)


def _replace_this_process(plan: DirectPlan) -> NoReturn:
    """Nothing is left to watch: signals, exit code and traceback are those of the script."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(plan.command[0], plan.command, {**os.environ, **plan.env})
    except OSError as error:
        raise CommandError(f"cannot run {plan.command[0]!r}: {error.strerror}") from None


def _run_below(plan: DirectPlan) -> int:
    """The same as a child, for whoever calls this from a Python program."""
    from subprocess import Popen

    with guarded() as marks:
        try:
            child = Popen(plan.command, env={**os.environ, **plan.env, **marks})
        except OSError as error:
            raise CommandError(f"cannot run {plan.command[0]!r}: {error.strerror}") from None
        try:
            return exit_code(child.wait())
        except BaseException:
            child.send_signal(signal.SIGTERM)
            child.wait()
            raise


def _run_on_tpu(plan: TpuPlan) -> int:
    from accel_callbacks.launch.tpu import launch_on_tpu

    launch_on_tpu(plan.program.name, plan.program.arguments, plan.function, plan.one)
    return 0


def _check_port(env: Mapping[str, str]) -> None:
    """A port that was asked for and is taken would fail in the script, with a traceback."""
    port = env.get("MASTER_PORT")
    if port is None or env.get("RANK") != "0" or env.get("WORLD_SIZE") != "1":
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise CommandError(
                f"port {port} cannot be used: {error.strerror}. Leave out --main_process_port for "
                "a free one, or end what uses it",
                exit_code=1,
            ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _count_devices() -> int:
    """Accelerators of this machine, 0 without one; torch is asked only where there may be some."""
    if not _may_have_devices(Path("/dev")):
        return 0
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _may_have_devices(devices: Path) -> bool:
    """Whether the kernel shows the file of a driver for accelerators."""
    if sys.platform != "linux":
        return sys.platform != "darwin"  # a Mac has one at most, which is one process too
    try:
        return any(name.startswith(_DRIVERS) for name in os.listdir(devices))
    except OSError:
        return True
