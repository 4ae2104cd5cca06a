"""``accel compat check``: list the names of Accelerate that sources use, and what each is here."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_callbacks.cli.main import pipe_may_close
from accel_callbacks.cli.migrate import source_files
from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.compat.check import (
    ALONE,
    NameUse,
    UnreadableError,
    lone_calls,
    name_uses,
    status_of,
)
from accel_callbacks.terminal_text import listed, printable

_TITLES = {
    "unknown": "not here: the import fails",
    "not provided": "can be imported, and raise when they are used",
    "alone": "called on one process, and wait here for all",
    "lenient": "here, with Accelerate's arguments",
    "here": "here",
}
_Row = dict[str, Any]  # the name, its status, the reason and the places
_LACKING = ("unknown", "not provided", "alone")
_PLACES = 3  # that are shown of a name


def configure(parser: CommandParser) -> None:
    """Add the action of ``accel compat``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "list the names of Accelerate that sources use, and what each is here"
    check: CommandParser = actions.add_parser("check", help=text, description=f"{text}.")
    check.add_argument(
        "places", nargs="+", metavar="PLACE", help="scripts, folders, or packages by their name"
    )
    check.option("--lacking", action="store_true", help="leave out what is here")
    check.option("--json", action="store_true", help="print JSON")
    parser.adopt(check)


def run(args: Namespace) -> int:
    """Print the names; return 1 if one of them lacks here, or a file cannot be read."""
    places: dict[NameUse, list[str]] = defaultdict(list)
    alone: dict[NameUse, list[str]] = defaultdict(list)
    problems = []
    for path in _sources(args.places):
        try:
            text = Path(path).read_text(encoding="utf-8")
            for uses, found in ((places, name_uses(text)), (alone, lone_calls(text))):
                for use in found:
                    uses[NameUse(use.module, use.name, 0)].append(f"{path}:{use.line}")
        except (OSError, UnicodeDecodeError, UnreadableError) as error:
            problems.append(f"{path}: {error}")
    rows: list[_Row] = []
    for use, lines in sorted(places.items()):
        status, reason = status_of(use.module, use.name)
        rows.append({"name": use.dotted, "status": status, "reason": reason, "places": lines})
    for use, lines in sorted(alone.items()):
        rows.append({"name": use.dotted, "status": "alone", "reason": ALONE, "places": lines})
    lacks = any(row["status"] in _LACKING for row in rows)
    shown = [row for row in rows if not args.lacking or row["status"] in _LACKING]
    with pipe_may_close():
        print(json.dumps(shown, indent=1) if args.json else "\n".join(_lines(shown)))
    for problem in problems:
        print(printable(f"accel compat check: {problem}"), file=sys.stderr)
    return 1 if lacks or problems else 0


def _lines(rows: Sequence[_Row]) -> Iterator[str]:
    """Yield the names by what they are, those that lack first."""
    if not rows:
        yield "nothing of accelerate lacks"
    for status, title in _TITLES.items():
        group = [row for row in rows if row["status"] == status]
        if group:
            yield f"{title}:"
        for row in group:
            yield printable(f"  {row['name']}  ({listed(row['places'], _PLACES)})")
            if row["reason"]:
                yield f"    {row['reason']}"


def _sources(places: Sequence[str]) -> list[str]:
    """Return the Python files of scripts, folders and installed packages.

    Raises:
        CommandError: a place is none of them.
    """
    roots = [place if os.path.exists(place) else _package(place) for place in places]
    return source_files(roots)


def _package(name: str) -> str:
    """Return the file or folder of an installed package, which is not imported."""
    spec = None
    if all(part.isidentifier() for part in name.split(".")):
        spec = importlib.util.find_spec(name.partition(".")[0])
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    place = locations[0] if locations else getattr(spec, "origin", None)
    if place is None:
        raise CommandError(f"{name!r} is no file, no folder and no installed package")
    return os.path.join(place, *name.split(".")[1:])
