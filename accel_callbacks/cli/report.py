"""``accel report``: print what a run has done with its time."""

from __future__ import annotations

import json
import math
from argparse import ArgumentTypeError, Namespace
from typing import TYPE_CHECKING, Any

from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.terminal_text import printable, table

if TYPE_CHECKING:
    from accel_callbacks.journal import Goodput, Journal


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel report``."""
    parser.add_argument("run", metavar="RUN", help="the project folder of the run, path or URL")
    parser.option("--run_id", metavar="ID", help="a run of the folder; default: the newest")
    parser.option(
        "--price", type=_price, metavar="X", help="of one rank for an hour, to print the cost"
    )
    parser.option("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    """Print the attempts of the run, and its goodput."""
    from accel_callbacks.journal import Goodput, Journal, JournalError

    try:
        journal = Journal.read(args.run, args.run_id)
        goodput = Goodput.of(journal)
    except (JournalError, OSError, ImportError) as error:
        raise CommandError(str(error), exit_code=1) from None
    if args.json:
        print(json.dumps(_as_json(journal, goodput, args.price), indent=2))
        return 0
    print(f"run {printable(journal.name)} ({printable(journal.folder)})")
    print()
    print(table(("ATTEMPT", "RANKS", "STEPS", "REPEATED", "ENDED"), _attempts(journal)))
    print()
    print(goodput.describe())
    if args.price is not None:
        cost, useful = goodput.cost(args.price), goodput.share
        print(f"\ncost {cost:.2f}, of which {cost * useful:.2f} for steps that count")
    return 0


def _attempts(journal: Journal) -> list[tuple[str, ...]]:
    """Return a row for each attempt."""
    rows = journal.rows()
    lines: list[tuple[str, ...]] = []
    for attempt in journal.attempts:
        part = rows[rows["attempt"] == attempt.number]
        end = next(attempt.marks_of("end"), None)
        status = "killed, or still running" if end is None else str(end.get("status"))
        steps = f"{part['step'][0]} to {part['step'][-1]}" if len(part) else "none"
        numbers = str(attempt.number), str(attempt.world_size), steps
        lines.append((*numbers, str(int(part["repeated"].sum())), status))
    return lines


def _as_json(journal: Journal, goodput: Goodput, price: float | None) -> dict[str, Any]:
    names = [name for name in vars(goodput) if name != "rank_s"]
    facts: dict[str, Any] = {"name": journal.name, "folder": journal.folder}
    facts |= {"wall_s": goodput.wall_s, "goodput": goodput.share}
    facts["seconds"] = {name: getattr(goodput, name) for name in names}
    return facts if price is None else {**facts, "cost": goodput.cost(price)}


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < math.inf:
        raise ArgumentTypeError(f"{text!r} is no price: give a number of at least 0")
    return price
