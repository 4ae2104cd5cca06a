"""The script that ``accel test`` launches: runs the checks and leaves a report beside the table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from accel_callbacks.distributed.topology import destroy_topology, process_rank
from accel_callbacks.selftest.check import Check, Lab
from accel_callbacks.selftest.checks import CHECKS
from accel_callbacks.selftest.runner import Outcome, run_checks

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks on this process; 0 also if some fail, because the report says so.

    Args:
        words: of the command line; those of this process where ``None``.

    Example:
        >>> from accel_callbacks.selftest.__main__ import main
        >>> main(["--checks", "determinism", "--quiet"])
        0
    """
    args = _parse(words)
    rank, world, local_rank, local_world = process_rank()
    chosen = [CHECKS[name] for name in args.checks.split(",")] if args.checks else CHECKS.values()
    # a folder of one machine is no use to several
    folder = args.folder or (args.scratch if world == local_world else None)
    report = _Report(args.report if local_rank == 0 else None, loud=rank == 0 and not args.quiet)
    for outcome in run_checks(chosen, Lab(args.patience, folder), report.begin):
        report.end(outcome)
    report.finish()
    destroy_topology()
    return 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="accel test", allow_abbrev=False)
    parser.add_argument("--checks", default="")
    parser.add_argument("--folder")
    parser.add_argument("--scratch")
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--report")
    parser.add_argument("--quiet", action="store_true")
    return parser.parse_args(words)


class _Report:
    """The lines of the table as they come, and the same as JSON for the launching process.

    Args:
        path: the JSON file, None for none.
        loud: whether this process prints.
    """

    def __init__(self, path: str | None, loud: bool) -> None:
        self._path, self._loud = path, loud
        self._outcomes: list[Outcome] = []

    def begin(self, check: Check) -> None:
        """Leave word of what is about to be tried: it may end the process."""
        self._write({"name": check.name, "advice": check.advice})

    def end(self, outcome: Outcome) -> None:
        """Print a line."""
        self._outcomes.append(outcome)
        if self._loud:
            print(_line(outcome), flush=True)

    def finish(self) -> None:
        """Print the verdict."""
        self._write(None)
        if self._loud:
            print(_verdict(self._outcomes), flush=True)

    def _write(self, under_way: dict[str, str] | None) -> None:
        if self._path is None or not os.path.isdir(os.path.dirname(self._path)):
            return  # srun carries the same path to machines that have no such folder
        text = json.dumps({"checks": [asdict(o) for o in self._outcomes], "under_way": under_way})
        temporary = f"{self._path}.part"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, self._path)


def _line(outcome: Outcome) -> str:
    """One line, and a second one where there is something to do."""
    time = f"{outcome.seconds:.1f} s"
    text = f"{outcome.status:<8} {outcome.name:<13} {time:>7}  {outcome.details}"
    return f"{text}\n         what to do: {outcome.advice}" if outcome.advice else text


def _verdict(outcomes: Sequence[Outcome]) -> str:
    """The last line."""
    failed = [one.name for one in outcomes if one.failed]
    if failed:
        return f"{len(failed)} of {len(outcomes)} checks do not hold: {', '.join(failed)}"
    skipped = sum(one.status == "skipped" for one in outcomes)
    some = f", {skipped} skipped" if skipped else ""
    return f"{len(outcomes) - skipped} checks hold{some}"


if __name__ == "__main__":
    sys.exit(main())
