"""The options of ``accel launch``: the table of settings, and what only a launch has."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from accel_callbacks.cli.parser import CommandError, CommandParser, natural_int
from accel_callbacks.launch.plan import Program
from accel_callbacks.launch.settings import all_options

_TITLES = {
    "Processes": "processes",
    "Machines": "several machines",
    "Training": "defaults of the Accelerator in the script",
    "Running": "starting, watching and logging",
    "Tpu": "TPU",
}

# What torchrun has and no config file needs. Values reach it as they are.
TORCHRUN_ONLY: Mapping[str, dict[str, Any]] = {
    "standalone": {"action": "store_true", "help": "meet on this machine only, by c10d"},
    "run_path": {"action": "store_true", "help": "run the script inside of a forked launcher"},
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


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel launch``."""
    parser.usage = "accel launch [options] script.py [arguments of the script]"
    _add_own(parser)
    add_settings(parser)
    # Not REMAINDER: that would lose a `--` which stands right after the script.
    parser.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="script",
        help="script (module with -m, program with --no_python) and its own arguments",
    )


def add_settings(parser: CommandParser) -> None:
    """Add a flag for every setting that a config file may have."""
    groups: dict[str, Any] = {}
    for one in all_options():
        if not one.flag:
            continue
        title = _TITLES.get(one.group, one.block or one.group.lower())
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flags, keywords = one.argument()
        if one.name in ("tee", "redirects"):
            keywords["type"] = _streams
        if one.name == "nproc_per_node":
            keywords |= {"type": _number_or_word(keywords["type"]), "metavar": "N|auto|cpu|gpu"}
        parser.option(*flags, group=groups[title], **keywords)
        for flag, value in one.shorthands.items():
            parser.option(
                flag,
                group=groups[title],
                action="store_const",
                dest=one.dest,
                const=value,
                help=f"turns {one.flag} off"
                if value is False
                else f"the same as {one.flag} {value}",
            )


def _add_own(parser: CommandParser) -> None:
    """Add what is asked of one launch, and of no config file."""
    parser.option("--config_file", metavar="FILE", help="default: accel.yaml, or the user's own")
    parser.option("-m", "--module", action="store_true", help="run a module, like python -m")
    parser.option("--no_python", action="store_true", help="run a program that is not Python")
    parser.option(
        "--dry_run", action="store_true", help="print what would run, and stop", default=False
    )
    parser.option("-q", "--quiet", action="store_true", help="no report after a failure")
    group = parser.add_argument_group("as torchrun has them")
    for name, keywords in TORCHRUN_ONLY.items():
        parser.option(f"--{name}", group=group, **keywords)


def _streams(text: str) -> str:
    """Check a --tee or --redirects value."""
    if re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0, 1, 2, 3 or a list such as 0:1,1:3")
    return text


def _number_or_word(number: Callable[[str], int]) -> Callable[[str], int | str]:
    return lambda text: text if text in ("auto", "cpu", "gpu") else number(text)


def given_extras(args: Namespace) -> dict[str, Any]:
    """The options of `TORCHRUN_ONLY` that were given."""
    return {name: value for name in TORCHRUN_ONLY if (value := getattr(args, name, None))}


def read_program(args: Namespace) -> Program:
    """The program; `CommandError` now, once, rather than in each process."""
    if args.module and args.no_python:
        raise CommandError("-m and --no_python exclude each other: give one of them")
    name: str = args.program[0]
    if args.module:
        kind, found, wanted = "module", _module_exists(name), "a module that Python can import here"
    elif args.no_python:
        kind, found, wanted = "program", bool(shutil.which(name)), "an executable file or command"
    else:
        kind, found = "script", Path(name).exists()
        wanted = f"a file (looked from {os.getcwd()})"
    if not found:
        raise CommandError(f"{name!r} is not {wanted}; nothing was started")
    return Program(kind, name, tuple(args.program[1:]))


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
