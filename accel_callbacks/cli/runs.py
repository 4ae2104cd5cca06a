"""``accel runs``: list the runs below a folder, and what differs between them."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from accel_callbacks.cli.parser import CommandError, CommandParser, suggestion
from accel_callbacks.terminal_text import printable, table
from checkpoint_io.local_files import split_path

if TYPE_CHECKING:
    from accel_callbacks.addons.journal.runs import RunSummary

_LONGEST = 24  # characters of a setting in the table
_COLUMNS: dict[str, Callable[[RunSummary], Any]] = {
    "name": lambda run: run.name,
    "run_id": lambda run: run.run_id,
    "state": lambda run: run.state,
    "steps": lambda run: run.steps,
    "goodput": lambda run: run.goodput,
    "best": lambda run: run.best,
    "began": lambda run: run.began,
}


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel runs``."""
    parser.add_argument(
        "folder", metavar="FOLDER", help="a project folder, or one with several; path or URL"
    )
    parser.option(
        "--metric",
        metavar="NAME",
        default="loss",
        help="show its best value: a name that the jsonl tracker wrote; default: the loss",
    )
    parser.option("--highest", action="store_true", help="the highest value is the best")
    parser.option(
        "--sort",
        metavar="COLUMN",
        default="began",
        help=f"sort by {', '.join(_COLUMNS)} or a setting; default: began",
    )
    parser.option("--descending", action="store_true", help="sort from high to low")
    parser.option("--json", action="store_true", help="print JSON, with all settings")


def run(args: Namespace) -> int:
    """Print a line for each run; return 1 if one could not be read."""
    from concurrent.futures import ThreadPoolExecutor

    from accel_callbacks.addons.journal.runs import journal_folders, summary_of

    try:
        folders = journal_folders(args.folder)
    except (OSError, ImportError, ValueError) as error:
        raise CommandError(str(error), exit_code=1) from None
    if not folders:
        raise CommandError(
            f"{args.folder} has no runs: they are in the folder `journal` of each project_dir",
            exit_code=1,
        )
    # At the same time: whether a run on another machine lives takes some seconds to see.
    with ThreadPoolExecutor(max_workers=16) as threads:
        runs = list(
            threads.map(lambda folder: summary_of(folder, args.metric, args.highest), folders)
        )
    readable = [summary for summary in runs if not summary.problem]
    if readable and args.metric != "loss" and all(summary.best is None for summary in readable):
        raise CommandError(_unknown_metric(args.metric, readable), exit_code=1)
    runs = _sort(runs, args.sort, args.descending)
    if args.json:
        print(json.dumps([_as_json(summary) for summary in runs], indent=2, default=str))
    else:
        _print(runs, args.metric)
        for summary in runs:
            if summary.problem:
                print(f"{summary.state}: {printable(summary.problem)}")
            for place, why in summary.unguarded.items():
                text = (
                    f"{summary.run_id} had no lease in {place} ({why}), which kept no other run out"
                )
                print(f"unguarded: {printable(text)}")
    return 1 if any(summary.problem for summary in runs) else 0


def _unknown_metric(metric: str, runs: Sequence[RunSummary]) -> str:
    from accel_callbacks.addons.journal.metrics import metrics_of
    from accel_callbacks.addons.journal.reader import Journal

    names = {name for run in runs for name in metrics_of(Journal.read(run.folder))}
    listed = ", ".join(sorted({"loss", *names}))
    return f"no run has a metric {metric!r}{suggestion(metric, names)}: they have {listed}"


def _sort(runs: Sequence[RunSummary], column: str, descending: bool) -> list[RunSummary]:
    """Sort the runs; those without a value come last."""
    settings = {name for run in runs for name in run.config}
    if column not in _COLUMNS and column not in settings:
        known = [*_COLUMNS, *sorted(settings)]
        raise CommandError(f"no column {column!r}{suggestion(column, known)}: {', '.join(known)}")

    def read(run: RunSummary) -> Any:
        return _COLUMNS[column](run) if column in _COLUMNS else run.config.get(column)

    with_value = [run for run in runs if read(run) is not None]
    try:
        with_value.sort(key=read, reverse=descending)
    except TypeError:  # a setting that is a number here and a text there
        with_value.sort(key=lambda run: str(read(run)), reverse=descending)
    return with_value + [run for run in runs if read(run) is None]


def _print(runs: Sequence[RunSummary], metric: str) -> None:
    from accel_callbacks.addons.journal.runs import differing_settings

    settings = differing_settings(runs)
    projects = {run.project for run in runs}
    names = ["NAME", "RUN", "STATE", "STEPS", "GOODPUT", f"BEST {metric}", *settings]
    rows = []
    for run in runs:
        best = "-" if run.best is None else f"{run.best:.6g} at {run.best_step}"
        cells = [run.name, run.run_id, run.state, str(run.steps), f"{run.goodput:.1%}", best]
        cells += [_shorten(run.config.get(name, "-")) for name in settings]
        if len(projects) > 1:
            cells.insert(1, split_path(run.project or run.folder)[1])
        rows.append(cells)
    if len(projects) > 1:
        names.insert(1, "PROJECT")
    print(table(names, rows))


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _as_json(run: RunSummary) -> dict[str, Any]:
    return {name: value for name, value in vars(run).items() if name != "problem" or value}
