"""``accel test``: launch a self-test of the installation on the configured processes."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_callbacks.cli import launch
from accel_callbacks.cli.parser import CommandError, CommandParser, suggestion

CHECKS = (
    *("processes", "collectives", "determinism", "data", "workers", "precision", "gradients"),
    *("accumulation", "checkpoint"),
)
_HIDDEN = ("program", "module", "no_python", "quiet")


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel test``, and those of ``accel launch``."""
    _add_own(parser)
    launch.configure(parser)
    parser.usage = "accel test [options] [options of accel launch]"
    for action in parser._actions:
        if action.dest in _HIDDEN:
            action.help = argparse.SUPPRESS
        if action.dest == "program":
            action.nargs, action.required = "*", False


def _add_own(parser: CommandParser) -> None:
    """Add the options that ``accel launch`` does not have."""
    parser.option(
        "--checks",
        type=_names,
        metavar="A,B",
        help=f"only these of {', '.join(CHECKS)}",
    )
    parser.option(
        "--folder",
        metavar="PLACE",
        help="where the checkpoint is tried: a path or fsspec URL that all machines see "
        "(default: a temporary folder, on one machine)",
    )
    parser.option(
        "--patience",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long a process waits for the others (default: 60)",
    )
    parser.option("--json", action="store_true", help="print JSON in place of the table")


def _names(text: str) -> list[str]:
    """Parse names of checks."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in CHECKS:
            raise ArgumentTypeError(f"there is no check {name!r}{suggestion(name, CHECKS)}")
    return names


def _seconds(text: str) -> float:
    """Parse a number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 86400:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 86400")
    return value


def run(args: Namespace) -> int:
    """Launch the checks; return 1 if one fails."""
    if args.program or args.module or args.no_python:
        program = args.program[0] if args.program else "-m or --no_python"
        raise CommandError(f"accel test runs its own program, and was given {program!r}")
    with tempfile.TemporaryDirectory(prefix="accel-test-") as scratch:
        report = Path(scratch, "report.json")
        code = launch.run(_launch_options(args, scratch, report))
        if args.dry_run:
            return code
        facts = _read(report)
    return _conclude(facts, code, as_json=args.json)


def _launch_options(args: Namespace, scratch: str, report: Path) -> Namespace:
    """Convert the options to those of ``accel launch -m accel_callbacks.addons.selftest``."""
    arguments = [f"--report={report}", f"--scratch={scratch}", f"--patience={args.patience:g}"]
    arguments += [f"--checks={','.join(args.checks)}"] if args.checks else []
    arguments += [f"--folder={args.folder}"] if args.folder else []
    arguments += ["--quiet"] if args.json else []
    parser = CommandParser(prog="accel test", description="")
    parser.add_help = False
    _add_own(parser)
    _, others = parser.parse_known_args(getattr(args, "words", []))
    program = ["accel_callbacks.addons.selftest", *arguments]
    values = {
        **vars(args),
        "module": True,
        "main_training_function": "main",  # that of a config file is the script's
        "program": program,
        "words": [*others, "-m", *program],
        "whole_process": False,
    }
    return Namespace(**values)


def _read(report: Path) -> dict[str, Any]:
    """Return the report of the processes; empty if there is none."""
    try:
        document = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _conclude(facts: Mapping[str, Any], code: int, as_json: bool) -> int:
    """Print the JSON, or why the table is incomplete; return the exit code."""
    checks = facts.get("checks", [])
    holds = bool(checks) and all(check["status"] in ("ok", "skipped") for check in checks)
    under_way = facts.get("under_way")
    if as_json:
        complete = code == 0 and under_way is None
        print(json.dumps({"holds": holds and complete, "checks": checks, "ended_in": under_way}))
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return code  # stopped by the user
    if not facts or under_way is not None:
        print(f"accel test: {_cut_short(under_way)}", file=sys.stderr)
        return code or 1
    return code or int(not holds)


def _cut_short(under_way: Mapping[str, str] | None) -> str:
    """Describe where the processes ended."""
    if under_way is None:
        return "the processes ended before the first check; their output is above"
    return (
        f"the processes ended in the check {under_way['name']!r}; what to do: {under_way['advice']}"
    )
