"""What the parsers of all subcommands share: both spellings, checked values, suggestions."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class CommandError(Exception):
    """A mistake in what was asked for; its text is shown without a traceback."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CommandParser(argparse.ArgumentParser):
    """An argument parser that takes ``--a_b`` and ``--a-b`` alike and suggests near names."""

    def __init__(self, prog: str, description: str, usage: str | None = None) -> None:
        # Abbreviations would change meaning whenever an option is added.
        super().__init__(prog=prog, description=description, usage=usage, allow_abbrev=False)
        self._known: list[str] = []

    def option(self, *flags: str, group: Any = None, **settings: Any) -> None:
        """Add an option under every flag, with ``_`` and with ``-`` between its words."""
        dashed = [f"--{flag[2:].replace('_', '-')}" for flag in flags if flag.startswith("--")]
        names = list(dict.fromkeys([*flags, *dashed]))
        self._known += [*names, *(flag for flag in flags if flag.startswith("--"))]
        settings.setdefault("dest", _destination(flags))
        (group or self).add_argument(*names, **settings)

    def adopt(self, inner: CommandParser) -> None:
        """Suggest the options of an inner parser too, whose strays end up in this one."""
        self._known += inner._known

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse, or exit with code 2 and the nearest option's name."""
        args, unknown = self.parse_known_args(list(arguments))
        if unknown:
            hint = suggestion(unknown[0].split("=")[0], self._known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return args


def _destination(flags: Sequence[str]) -> str:
    """Name the attribute after the first long flag."""
    long_flag = next(flag for flag in flags if flag.startswith("--"))
    return long_flag[2:].replace("-", "_")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean ...?)"`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def positive_int(text: str) -> int:
    """Read an integer of at least 1."""
    return _int_from(text, 1)


def natural_int(text: str) -> int:
    """Read an integer of at least 0."""
    return _int_from(text, 0)


def _int_from(text: str, least: int) -> int:
    """Read an integer, or say which ones are allowed."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return value
