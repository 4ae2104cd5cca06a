"""``accel report``: print what runs have done with their time, or write a page about them."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.terminal_text import printable, size_of, table
from checkpoint_io.local_files import replace

if TYPE_CHECKING:
    from accel_callbacks.addons.journal import Attempt, Journal


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel report``."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run's project folder, or its folder in `journal`; path or URL",
    )
    parser.option("--run_id", metavar="ID", help="a run of the folder; default: the newest")
    parser.option("--json", action="store_true", help="print JSON, a list for several runs")
    parser.option(
        "--html", metavar="FILE", help="write a page with curves, marks and configs to FILE instead"
    )


def run(args: Namespace) -> int:
    """Print the attempts of each run and its goodput, or write the page."""
    from accel_callbacks.addons.journal import Journal, JournalError

    if args.html is not None and args.json:
        raise CommandError("--html writes a page and prints nothing: leave --json out")
    if args.run_id is not None and len(args.runs) > 1:
        raise CommandError("--run_id is of one RUN: give RUN/journal/ID for each of several runs")
    describe = _as_facts if args.html is not None else _as_json if args.json else _as_text
    reports: list[tuple[Journal, Any]] = []
    problems: list[tuple[str, str]] = []
    for folder in args.runs:
        try:
            journal = Journal.read(folder, args.run_id)
            reports.append((journal, describe(journal)))
        except (JournalError, OSError, ImportError) as error:
            problems.append((folder, str(error)))
    if not reports:
        raise CommandError("\n".join(problem for _, problem in problems), exit_code=1)
    if args.html is not None:
        _write_page(reports, args.html)
    elif args.json:
        facts = [told for _, told in reports]
        facts += [{"folder": folder, "problem": problem} for folder, problem in problems]
        print(json.dumps(facts if len(facts) > 1 else facts[0], indent=2))
    else:
        print("\n\n".join(text for _, text in reports))
    for _, problem in problems:
        print(f"accel report: a run is not shown: {printable(problem)}", file=sys.stderr)
    return 1 if problems else 0


def _as_facts(journal: Journal) -> dict[str, Any]:
    from accel_callbacks.addons.journal.report.page import run_facts

    return run_facts(journal)


def _write_page(reports: Sequence[tuple[Journal, Mapping[str, Any]]], file: str) -> None:
    """Write the page in one step: a browser that has it open never reads half of one."""
    from accel_callbacks.addons.journal.report.page import page_of

    journals, facts = zip(*reports, strict=True)
    # A name from a file system may hold half of a character, which UTF-8 has not.
    page = page_of(journals, facts).encode("utf-8", "replace")
    part = f"{file}.part"
    try:
        with open(part, "wb") as stream:
            stream.write(page)
        replace(part, file)
    except OSError as error:
        if os.path.exists(part):
            os.remove(part)
        raise CommandError(
            f"{file} cannot be written ({error}): give --html a file in a folder that exists and "
            "has room",
            exit_code=1,
        ) from None
    print(f"wrote {printable(file)} ({size_of(len(page))}): open it in a browser")


def _as_text(journal: Journal) -> str:
    """Return the tables of a run."""
    from accel_callbacks.addons.journal import Goodput
    from accel_callbacks.addons.journal.goodput import energy_of

    goodput = Goodput.of(journal)
    parts = [
        f"run {printable(journal.name)} ({printable(journal.folder)})",
        table(("ATTEMPT", "RANKS", "STEPS", "REPEATED", "ENDED"), _attempts(journal)),
        goodput.describe(),
    ]
    energy = energy_of(journal)
    if energy:
        co2 = f", {energy['co2_kg']:.3g} kg of CO2" if "co2_kg" in energy else ""
        parts.append(f"energy {energy['kwh']:.3g} kWh{co2}")
    return "\n\n".join(parts)


def _attempts(journal: Journal) -> list[tuple[str, ...]]:
    """Return a row for each attempt."""
    rows = journal.rows()
    lines: list[tuple[str, ...]] = []
    for attempt in journal.attempts:
        part = rows[rows["attempt"] == attempt.number]
        end = next(attempt.marks_of("end"), None)
        status = _state_of_open(journal, attempt) if end is None else str(end.get("status"))
        steps = f"{part['step'][0]} to {part['step'][-1]}" if len(part) else "none"
        numbers = str(attempt.number), str(attempt.world_size), steps
        lines.append((*numbers, str(int(part["repeated"].sum())), status))
    return lines


def _state_of_open(journal: Journal, attempt: Attempt) -> str:
    """Return how an attempt without an end is."""
    from accel_callbacks.addons.journal.state import state_of

    state = state_of(journal) if attempt is journal.attempts[-1] else "killed"
    return "killed, or still running" if state == "unknown" else state


def _as_json(journal: Journal) -> dict[str, Any]:
    from accel_callbacks.addons.journal import Goodput
    from accel_callbacks.addons.journal.goodput import energy_of

    goodput = Goodput.of(journal)
    names = [name for name in vars(goodput) if name != "rank_s"]
    facts: dict[str, Any] = {"name": journal.name, "folder": journal.folder}
    facts |= {"wall_s": goodput.wall_s, "goodput": goodput.share}
    facts["seconds"] = {name: getattr(goodput, name) for name in names}
    facts |= {f"energy_{name}": value for name, value in energy_of(journal).items()}
    return facts
