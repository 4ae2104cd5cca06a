"""``accel completions``: completions for a shell, by argcomplete."""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from importlib import import_module
from typing import Any

from accel_callbacks.cli.parser import CommandError, CommandParser, is_dashed
from accel_callbacks.cli.registry import COMMANDS
from accel_callbacks.plugins.option import Option

__all__ = ["complete", "configure", "run"]

_SHELLS = ("bash", "zsh", "fish", "powershell")
_REST = (argparse.PARSER, argparse.REMAINDER)


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel completions``."""
    parser.add_argument("shell", choices=_SHELLS, help="the shell to print completions for")


def run(args: Namespace) -> int:
    """Print the script for a shell."""
    try:
        shellcode = import_module("argcomplete.shell_integration").shellcode
    except ImportError as error:
        raise CommandError(
            f"completions need argcomplete ({error}): pip install accel-callbacks[completions]", 1
        ) from None
    print(shellcode(["accel"], shell=args.shell), end="")
    return 0


def complete() -> None:
    """Answer the shell, which has started ``accel`` with the line in variables, and exit."""
    try:
        base: Any = import_module("argcomplete.finders").CompletionFinder
    except ImportError:
        raise SystemExit(1) from None

    class Finder(base):  # type: ignore[misc]
        def _get_option_completions(self, parser: Any, cword_prefix: str) -> list[str]:
            # What follows the user's script are the script's own options.
            if any(getattr(action, "nargs", None) in _REST for action in self.visited_positionals):
                return []
            options: list[str] = super()._get_option_completions(parser, cword_prefix)
            # Both spellings of an option are accepted, and one is offered.
            dashed = "-" in cword_prefix[2:]
            return [flag for flag in options if dashed or not is_dashed(flag, options)]

    Finder()(parser_of(os.environ["COMP_LINE"]), always_complete_options=False)


def parser_of(line: str) -> CommandParser:
    """Return a parser of all subcommands, with the options of the one that the line names."""
    parser = CommandParser("accel", "")
    parser.option("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers()
    named = line.split()[1:2]
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        if [name] == named:
            command.load().configure(subparser)
            _offer_values(subparser)
    return parser


def _offer_values(parser: argparse.ArgumentParser) -> None:
    """Offer the values of settings, which parse their values themselves."""
    for action in parser._actions:
        setting = getattr(action.type, "__self__", None)
        if isinstance(setting, Option):
            values = setting.choices or (("true", "false") if setting.kind == "bool" else ())
            action.completer = lambda values=values, **_: values  # type: ignore[attr-defined]
