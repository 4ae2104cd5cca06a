"""Parser of the subcommands: options in two spellings, checked values, suggestions."""

from __future__ import annotations

import argparse
import copy
import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class CommandError(Exception):
    """Raised if a command cannot be carried out; printed without a traceback."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _HelpFormatter(argparse.HelpFormatter):
    """Name each option in one of its two spellings."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        flags = action.option_strings
        shown = copy.copy(action)
        shown.option_strings = [
            flag for flag in flags if "-" not in flag[2:] or _with_underscores(flag) not in flags
        ]
        return super()._format_action_invocation(shown)


def _with_underscores(flag: str) -> str:
    return f"--{flag[2:].replace('-', '_')}"


class CommandParser(argparse.ArgumentParser):
    """Argument parser that accepts ``--a_b`` and ``--a-b``, and suggests similar names."""

    def __init__(self, prog: str, description: str, usage: str | None = None) -> None:
        # No abbreviations: they would change their meaning with every new option.
        super().__init__(
            prog=prog,
            description=description,
            usage=usage,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )
        self._known: list[str] = []

    def option(self, *flags: str, group: Any = None, **settings: Any) -> None:
        """Add an option under all of its flags, spelled with ``_`` and with ``-``."""
        dashed = [f"--{flag[2:].replace('_', '-')}" for flag in flags if flag.startswith("--")]
        names = list(dict.fromkeys([*flags, *dashed]))
        self._known += [*names, *(flag for flag in flags if flag.startswith("--"))]
        settings.setdefault("dest", _destination(flags))
        (group or self).add_argument(*names, **settings)

    def adopt(self, inner: CommandParser) -> None:
        """Suggest the options of a subparser too, whose unknown options this parser reports."""
        self._known += inner._known

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments; exit with code 2, and a suggestion, if one is unknown."""
        args, unknown = self.parse_known_args(list(arguments))
        if unknown:
            flag = unknown[0].split("=")[0]
            hint = _advice_on(flag) or suggestion(flag, self._known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return args


def _destination(flags: Sequence[str]) -> str:
    """Return the attribute name, that of the first long flag."""
    long_flag = next(flag for flag in flags if flag.startswith("--"))
    return long_flag[2:].replace("-", "_")


def _advice_on(flag: str) -> str:
    """Return what serves instead of a flag of earlier versions, or an empty string."""
    from accel_callbacks.errors.removed import REMOVED, advice

    return advice(REMOVED, f"--{flag.lstrip('-').replace('-', '_')}").replace(" It", ". It", 1)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean ...?)"`` with the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    return _int_from(text, 1)


def natural_int(text: str) -> int:
    """Parse an integer of at least 0."""
    return _int_from(text, 0)


def _int_from(text: str, least: int) -> int:
    """Parse an integer of at least ``least``."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return value
