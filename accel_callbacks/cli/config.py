"""``accel config``: write a config file, bring one up to date, show what is in effect."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.launch.config_file import (
    default_path,
    expanded,
    find_config,
    read_config,
    write_config,
)
from accel_callbacks.launch.option import SettingsError

ACTIONS = {
    "default": "write what fits this machine, without questions; the same as --default",
    "update": "write a file again with the keys of this version",
    "show": "show every setting and where its value comes from",
}


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel config`` and its actions."""
    parser.usage = "accel config [default | update | show] [options]"
    parser.option("--config_file", metavar="FILE", help="the file to write, update or show")
    parser.option(
        "--default", action="store_true", help="write what fits this machine, without questions"
    )
    _add_writing(parser, {})
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, text in ACTIONS.items():
        action: CommandParser = actions.add_parser(name, help=text, description=f"{text}.")
        # Without a default of its own, what stands before the action is kept.
        action.option("--config_file", metavar="FILE", default=argparse.SUPPRESS)
        if name == "default":
            _add_writing(action, {"default": argparse.SUPPRESS})
        if name == "show":
            action.option(
                "--script", metavar="FILE", help="search for accel.yaml from here upwards"
            )
            action.option("--json", action="store_true", help="print JSON")
        parser.adopt(action)


def _add_writing(parser: CommandParser, more: Mapping[str, Any]) -> None:
    """Options of writing a new file."""
    parser.option("--force", action="store_true", help="replace a file that is there", **more)
    parser.option("--mixed_precision", metavar="TYPE", help="type to compute in", **more)


def run(args: Namespace) -> int:
    """Do what was asked; a file is written whole or not at all."""
    action = args.action or ("default" if args.default else "ask")
    try:
        return _ACTIONS[action](args)
    except SettingsError as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        print("\naccel config: stopped; nothing was written", file=sys.stderr)
        return 130


def _default(args: Namespace) -> int:
    """Write what fits this machine."""
    from accel_callbacks.cli import config_questions
    from accel_callbacks.launch.machine import look_around

    machine = look_around(os.environ)
    values = config_questions.defaults(machine, args.mixed_precision)
    path = expanded(args.config_file or default_path(os.environ))
    if os.path.lexists(path) and not args.force:
        raise CommandError(f"{path} is there already: --force replaces it", exit_code=1)
    return _write(path, values)


def _ask(args: Namespace) -> int:
    """Ask what matters here, then write."""
    from accel_callbacks.cli import config_questions
    from accel_callbacks.launch.machine import look_around

    if sys.stdin is None or not sys.stdin.isatty():
        raise CommandError(
            "asks questions, and standard input is no terminal: `accel config --default` asks none"
        )
    machine = look_around(os.environ)
    print("\n".join(["This machine:", *(f"  {line}" for line in machine.lines())]))
    try:
        values = config_questions.answers(machine, args.mixed_precision)
        path = expanded(args.config_file or config_questions.place(os.environ))
        known = os.path.lexists(path) and not args.force
        if known and not config_questions.yes_or_no(f"{path} is there already. Replace it?"):
            raise CommandError("nothing was written; --config_file names another", exit_code=1)
    except EOFError:
        raise CommandError("the input ended; nothing was written", exit_code=1) from None
    return _write(path, values)


def _write(path: Path, values: Mapping[str, Any]) -> int:
    """Check what is to be written as a launch would, write it, and say how to launch."""
    from accel_callbacks.launching.reading import values_of

    values_of(values, str(path))
    written = write_config(path, values)
    print(f"wrote {path}")
    print("\n".join(["launch with:", *(f"  {line}" for line in _commands(written, values))]))
    return 0


def _commands(path: Path, values: Mapping[str, Any]) -> list[str]:
    """The command for this machine, and for the others if there are some."""
    found = find_config(None, os.environ)
    option = [] if found and os.path.samefile(found, path) else ["--config_file", str(path)]
    command = shlex.join(["accel", "launch", *option, "train.py"])
    others = range(1, min(values.get("num_machines", 1), 4))
    own = [command] if not others else [f"{command}  # here, machine {values['machine_rank']}"]
    if others:
        own.append(
            shlex.join(["accel", "launch", *option, "--machine_rank", "N", "train.py"])
            + "  # on each other machine, with the same file and its own N"
        )
    return own


def _update(args: Namespace) -> int:
    """Rename old keys and drop those that no version reads, in place."""
    from accel_callbacks.launching.reading import values_of

    path = Path(args.config_file) if args.config_file else find_config(None, os.environ)
    if path is None:
        raise CommandError("found no config file to update: name it with --config_file")
    before = read_config(path)
    values, gone = values_of(before, str(path))
    after = _nested(values)
    for key in sorted(set(before) - set(after)):
        print(f"removed {key}: {gone.get(key, 'nothing is given there, or it has a new name')}")
    for key in sorted(set(after) - set(before)):
        print(f"added {key}: {after[key]}")
    write_config(path, after)
    print(f"wrote {path}; comments are not kept")
    return 0


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by path as a file holds them."""
    found: dict[str, Any] = {}
    for path, value in values.items():
        block, _, name = path.rpartition(".")
        plain = list(value) if isinstance(value, tuple) else value
        (found.setdefault(block, {}) if block else found)[name] = plain
    return found


def _show(args: Namespace) -> int:
    from accel_callbacks.cli import config_show

    return config_show.run(args.config_file, args.script, args.json, os.environ)


_ACTIONS: Mapping[str, Callable[[Namespace], int]] = {
    "ask": _ask,
    "default": _default,
    "update": _update,
    "show": _show,
}
