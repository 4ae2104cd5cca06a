"""What there is to complete, read from the parsers of all subcommands; torch is not imported."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from accel_callbacks.cli.parser import CommandParser
from accel_callbacks.cli.registry import COMMANDS, Command
from accel_callbacks.launch.option import Option as Setting

_REST = (argparse.PARSER, argparse.REMAINDER)


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        flags: its spellings, the first one with ``_`` between words.
        help: one line.
        takes: whether a value follows.
        choices: the values, where there are only some.
    """

    flags: tuple[str, ...]
    help: str
    takes: bool
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """What may stand after some words.

    Attributes:
        path: the words, such as ``ckpt ls``; empty for ``accel`` itself.
        options: the options that may stand here.
        words: what may stand here as a word, with a line of help.
        ends: whether the first word that is no option ends it: what follows is a script's own.
    """

    path: str
    options: tuple[Option, ...]
    words: Mapping[str, str]
    ends: bool = False


def places() -> list[Place]:
    """Return every place of the command line, `accel` itself first."""
    top = CommandParser("accel", "")
    top.option("--version", action="store_true", help="print the version")
    words = {name: command.help for name, command in COMMANDS.items()}
    found = [Place("", tuple(_options(top)), words)]
    for name, command in COMMANDS.items():
        found += _places_of(name, _parser(name, command))
    return found


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    """Make the parser of a subcommand; one that cannot be loaded has no options."""
    parser = CommandParser(f"accel {name}", command.help)
    try:
        command.load().configure(parser)
    except ImportError:
        return CommandParser(f"accel {name}", command.help)
    return parser


def _places_of(path: str, parser: argparse.ArgumentParser) -> Iterator[Place]:
    """Yield the place of a parser, and those of the parsers in it."""
    words: dict[str, str] = {}
    inner: dict[str, argparse.ArgumentParser] = {}
    ends = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner |= action.choices
            helps = {a.dest: a.help or "" for a in action._choices_actions}
            words |= {
                name: helps.get(name) or chosen.description or ""
                for name, chosen in action.choices.items()
            }
        elif not action.option_strings:
            words |= dict.fromkeys(map(str, action.choices or ()), "")
            ends = ends or action.nargs in _REST
    yield Place(path, tuple(_options(parser)), words, ends)
    for name, chosen in inner.items():
        yield from _places_of(f"{path} {name}", chosen)


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    """Yield the options of a parser."""
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            yield Option(
                tuple(action.option_strings),
                _first_line(parser, action),
                action.nargs != 0,
                _values(action),
            )


def _values(action: argparse.Action) -> tuple[str, ...]:
    """Return what an option may be, where that is little; a setting checks its choices itself."""
    setting = getattr(action.type, "__self__", None)
    if not isinstance(setting, Setting):
        return tuple(map(str, action.choices or ()))
    return setting.choices or (("true", "false") if setting.kind == "bool" else ())


def _first_line(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return what is said of an option, as one line."""
    try:
        text = parser._get_formatter()._expand_help(action) if action.help else ""
    except (KeyError, TypeError, ValueError):
        text = action.help or ""
    return " ".join(text.split())


def spelled(flags: Iterable[str]) -> list[str]:
    """Return one spelling of each flag: that with ``_`` between its words."""
    found = list(flags)
    return [f for f in found if not ("-" in f[2:] and f"--{f[2:].replace('-', '_')}" in found)]
