"""``accel launch``: start a script on one or more processes and machines."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

from accel_callbacks.cli.parser import CommandError, CommandParser, natural_int
from accel_callbacks.compat.children import child_variables
from accel_callbacks.compat.foreign_settings import fsdp1_notes, megatron_note
from accel_callbacks.launch.environment import changed_environment
from accel_callbacks.launch.machine import DRIVERS, gpu_drivers, has_driver, usable_cores
from accel_callbacks.launch.peer_access import nccl_workarounds
from accel_callbacks.launch.plan import AgentPlan, DirectPlan, Plan, build_plan
from accel_callbacks.launch.program import Program
from accel_callbacks.launch.rendezvous import Host
from accel_callbacks.launch.report import exit_code
from accel_callbacks.launch.resolve import refuse_absent_gpus, refuse_unbuilt, resolve_settings
from accel_callbacks.launch.settings import all_options, find
from accel_callbacks.launch.watchdog import guarded
from accel_callbacks.plugins.option import SettingsError

__all__ = ["configure", "run"]

_TITLES = {
    "Processes": "processes",
    "Machines": "several machines",
    "Training": "defaults of the Accelerator in the script",
    "Running": "starting, watching and logging",
    "Tpu": "TPU",
}

# Options of torchrun that config files do not have; their values are passed on.
TORCHRUN_ONLY: Mapping[str, dict[str, Any]] = {
    "standalone": {"action": "store_true", "help": "rendezvous on this machine only, by c10d"},
    "virtual_local_rank": {"action": "store_true", "help": "each process sees its GPU as number 0"},
    "signals_to_handle": {"metavar": "NAMES", "help": "signals that reach the processes"},
    "shutdown_timeout": {
        "type": natural_int,
        "metavar": "SECONDS",
        "help": "from SIGTERM to SIGKILL; default: 30",
    },
    "event_log_handler": {"metavar": "NAME", "help": "handler of torch's elastic events"},
    "logs_specs": {"metavar": "NAME", "help": "entry point of torchrun.logs_specs"},
    "duplicate_stdout_filters": {"metavar": "A,B", "help": "lines to copy to a file of their own"},
    "duplicate_stderr_filters": {"metavar": "A,B", "help": "the same of standard error"},
}
# On Windows SO_REUSEADDR shares a port that another process listens at.
if sys.platform == "win32":
    _BIND_OPTION = socket.SO_EXCLUSIVEADDRUSE
else:
    _BIND_OPTION = socket.SO_REUSEADDR
_DRIVERS = tuple({start for starts in DRIVERS.values() for start in starts})


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel launch``."""
    parser.usage = "accel launch [options] script.py [arguments of the script]"
    parser.epilog = "In the names of options - may stand for _, as in --num-processes."
    _add_own(parser)
    add_settings(parser)
    # Not REMAINDER: it would drop a `--` right after the script.
    parser.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="script",
        help="script (module with -m, program with --no_python) and its own arguments",
    )


def add_settings(parser: CommandParser) -> None:
    """Add a flag for every setting of a config file."""
    groups: dict[str, Any] = {}
    for option in all_options():
        if not option.flag:
            continue
        title = _TITLES.get(option.group, option.block or option.group.lower())
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flags, keywords = option.argument()
        if option.name in ("tee", "redirects"):
            keywords["type"] = _streams
        if option.name == "nproc_per_node":
            keywords |= {"type": _number_or_word(keywords["type"]), "metavar": "N|auto|cpu|gpu"}
        parser.option(*flags, group=groups[title], **keywords)
        for flag, value in option.shorthands.items():
            if option.choices:
                same = f"the same as {option.flag} {value}"
                parser.option(flag, group=groups[title], action="store_true", help=same)
            else:
                parser.option(
                    flag,
                    group=groups[title],
                    action="store_const",
                    dest=option.dest,
                    const=value,
                    help=f"turns {option.flag} off",
                )


def _add_own(parser: CommandParser) -> None:
    """Add the options that config files do not have."""
    parser.option("--config_file", metavar="FILE", help="default: accel.yaml, or the user's own")
    parser.option("-m", "--module", action="store_true", help="run a module, like python -m")
    parser.option("--no_python", action="store_true", help="run a program that is not Python")
    parser.option(
        "--dry_run", action="store_true", help="print what would run, and stop", default=False
    )
    parser.option("-q", "--quiet", action="store_true", help="no report after a failure")
    parser.option(
        "--use_parallelism_config",
        action="store_true",
        help="for command lines of Accelerate; sizes of axes count with and without it",
    )
    group = parser.add_argument_group("as torchrun has them")
    for name, keywords in TORCHRUN_ONLY.items():
        parser.option(f"--{name}", group=group, **keywords)


def _streams(text: str) -> str:
    """Validate a value of --tee or --redirects."""
    if re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0, 1, 2, 3 or a list such as 0:1,1:3")
    return text


def _number_or_word(number: Callable[[str], int]) -> Callable[[str], int | str]:
    return lambda text: text if text in ("auto", "cpu", "gpu") else number(text)


def given_extras(args: Namespace) -> dict[str, Any]:
    """Return the options of `TORCHRUN_ONLY` that were given."""
    return {name: value for name in TORCHRUN_ONLY if (value := getattr(args, name, None))}


def read_program(args: Namespace) -> Program:
    """Return the program; raise CommandError here, once, rather than in each process."""
    if args.module and args.no_python:
        raise CommandError("-m and --no_python exclude each other: give one of them")
    name: str = args.program[0]
    if args.module:
        kind, wanted = "module", "a module that Python can import here"
        exists = _module_exists(name)
    elif args.no_python:
        kind, wanted = "program", "an executable file or command"
        exists = shutil.which(name) is not None
    else:
        kind, wanted = "script", f"a file (looked from {os.getcwd()})"
        exists = Path(name).exists()
    if not exists:
        raise CommandError(f"{name!r} is not {wanted}; nothing was started")
    return Program(kind, name, tuple(args.program[1:]))


def _module_exists(name: str) -> bool:
    """Return whether the top-level package exists; finding a submodule would import it."""
    top = name.partition(".")[0]
    # `python -m` searches the working directory first, which this console script's path lacks.
    if PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None:
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except ValueError:
        return False


def run(args: Namespace) -> int:
    """Launch, wait, and return the exit code of the process that failed first.

    With ``args.whole_process`` this process is only the command ``accel launch``: a run of a
    single process then replaces it, and this function does not return; on Windows it does.
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
    """Plan the launch of a command line, on this machine."""
    program = read_program(args)
    script = program.name if program.kind == "script" else None
    typed = {**vars(args), "nproc_per_node": _processes_here(args.nproc_per_node)}
    resolved = resolve_settings(typed, args.config_file, script, environment)
    refuse_unbuilt(resolved)
    for path, reason in resolved.idle().items():
        option = find(path)
        if resolved.origins.get(path) == "command line" and resolved.value(path) != option.default:
            print(f"accel launch: {option.flag} has no effect: {reason}", file=sys.stderr)
    for line in (*fsdp1_notes(resolved), *filter(None, [megatron_note(resolved)])):
        print(f"accel launch: {line}", file=sys.stderr)
    host = Host(environment, usable_cores(), _count_devices, _free_port)
    words = getattr(args, "words", [])
    plan = build_plan(resolved, program, host, given_extras(args), words, args.quiet)
    if isinstance(plan, DirectPlan) and plan.elsewhere:
        return plan
    if not args.dry_run:
        refuse_absent_gpus(resolved)
    if resolved.settings.as_accelerate:  # for programs too that start Python themselves
        plan = replace(plan, env={**plan.env, **child_variables({**environment, **plan.env})})
    if isinstance(plan, AgentPlan) and not resolved.settings.use_cpu:
        return _with_workarounds(plan, environment)
    return plan


def _with_workarounds(plan: AgentPlan, environment: Mapping[str, str]) -> AgentPlan:
    """Disable paths of NCCL that the GPUs of this machine claim and do not have."""
    if plan.rendezvous.local < 2 or not has_driver("MULTI_GPU"):
        return plan
    chosen = nccl_workarounds(gpu_drivers(environment), {**environment, **plan.env})
    if chosen:
        shown = " ".join(f"{name}={value}" for name, value in chosen.items())
        print(
            f"accel launch: sets {shown}: with this driver NCCL believes that GeForce RTX 40 cards "
            "reach each other directly, and hangs. A driver from 550.40.07 on needs none of it; a "
            "variable that you set, to 0 too, stays",
            file=sys.stderr,
        )
    return replace(plan, env={**plan.env, **chosen})


def _processes_here(asked: int | str | None) -> int | None:
    """Resolve the words that --nproc_per_node accepts, like torchrun."""
    if not isinstance(asked, str):
        return asked
    devices = 0 if asked == "cpu" else _count_devices()
    if asked == "gpu" and not devices:
        raise CommandError("--nproc_per_node gpu: this machine shows no GPU; name a number")
    return devices or usable_cores()


def _start(plan: Plan, whole_process: bool) -> int:
    if isinstance(plan, DirectPlan):
        _check_port(plan.env)
        # On Windows exec starts another process, and ends this one at once, with code 0.
        replaces = whole_process and sys.platform != "win32"
        return _replace_process(plan) if replaces else _run_child(plan)
    with guarded() as marks, changed_environment({**plan.env, **marks}):
        from accel_callbacks.launch.agent import LaunchError, run_agent

        try:
            return run_agent(plan)
        except LaunchError as error:
            raise CommandError(str(error), exit_code=1) from error


def _replace_process(plan: DirectPlan) -> NoReturn:
    """Exec the program, so that signals, exit code and traceback are those of the script."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(plan.command[0], plan.command, {**os.environ, **plan.env})
    except OSError as error:
        raise CommandError(f"cannot run {plan.command[0]!r}: {error.strerror}") from None


def _run_child(plan: DirectPlan) -> int:
    """Run the program as a child, for a caller in Python, or where no process is replaced."""
    from subprocess import Popen

    with guarded() as marks:
        try:
            child = Popen(plan.command, env={**os.environ, **plan.env, **marks})
        except OSError as error:
            raise CommandError(f"cannot run {plan.command[0]!r}: {error.strerror}") from None
        try:
            return exit_code(child.wait())
        except BaseException as error:
            # The console of Windows sends Ctrl-C to the child too, which then ends in its own way.
            if sys.platform != "win32" or not isinstance(error, KeyboardInterrupt):
                child.terminate()
            child.wait()
            raise


def _check_port(env: Mapping[str, str]) -> None:
    """Raise CommandError if the port is taken, rather than fail in the script."""
    port = env.get("MASTER_PORT")
    if not port or env.get("RANK") != "0" or env.get("WORLD_SIZE") != "1":
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, _BIND_OPTION, 1)
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
    """Return the number of accelerators; import torch only if there may be some."""
    if not _may_have_devices(Path("/dev")):
        return 0
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _may_have_devices(devices: Path) -> bool:
    """Return whether device files of an accelerator's driver exist."""
    if sys.platform != "linux":
        return sys.platform != "darwin"  # a Mac has one at most, which is one process too
    try:
        return any(name.startswith(_DRIVERS) for name in os.listdir(devices))
    except OSError:
        return True
