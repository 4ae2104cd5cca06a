"""Script of ``accel test``: run the checks, print a table and write a JSON report."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict

from accel_callbacks.addons.selftest.check import Check, Lab
from accel_callbacks.addons.selftest.checks import CHECKS
from accel_callbacks.addons.selftest.runner import Outcome, run_checks
from accel_callbacks.distributed.topology import destroy_topology, process_rank
from checkpoint_io.local_files import replace

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks on this process; return 0 even if some fail, which the report contains.

    Args:
        words: command line; by default that of this process.

    Example:
        >>> from accel_callbacks.addons.selftest.__main__ import main
        >>> main(["--checks", "determinism", "--quiet"])
        0
    """
    args = _parse(words)
    rank, world, local_rank, local_world = process_rank()
    chosen = [CHECKS[name] for name in args.checks.split(",")] if args.checks else CHECKS.values()
    # A temporary folder of one machine is of no use to several.
    folder = args.folder or (args.scratch if world == local_world else None)
    report = _Report(args.report if local_rank == 0 else None, loud=rank == 0 and not args.quiet)
    # Its models have no sequences.
    warnings.filterwarnings("ignore", message=".* from outside of accel.maybe_context_parallel")
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
    """Table on the screen, line by line, and JSON for the launching process.

    Args:
        path: the JSON file, if this process writes one.
        loud: this process prints the table.
    """

    def __init__(self, path: str | None, loud: bool) -> None:
        self._path, self._loud = path, loud
        self._outcomes: list[Outcome] = []

    def begin(self, check: Check) -> None:
        """Write which check starts: it may end the process."""
        self._write({"name": check.name, "advice": check.advice})

    def end(self, outcome: Outcome) -> None:
        """Print the line of a check."""
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
            return  # under srun other machines get the same path, without its folder
        text = json.dumps({"checks": [asdict(o) for o in self._outcomes], "under_way": under_way})
        temporary = f"{self._path}.part"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        replace(temporary, self._path)


def _line(outcome: Outcome) -> str:
    """Return the line of a check, and a second one with advice if it failed."""
    time = f"{outcome.seconds:.1f} s"
    text = f"{outcome.status:<8} {outcome.name:<13} {time:>7}  {outcome.details}"
    return f"{text}\n         what to do: {outcome.advice}" if outcome.advice else text


def _verdict(outcomes: Sequence[Outcome]) -> str:
    """Return the last line."""
    failed = [outcome.name for outcome in outcomes if outcome.failed]
    if failed:
        return f"{len(failed)} of {len(outcomes)} checks do not hold: {', '.join(failed)}"
    skipped = sum(outcome.status == "skipped" for outcome in outcomes)
    some = f", {skipped} skipped" if skipped else ""
    return f"{len(outcomes) - skipped} checks hold{some}"


if __name__ == "__main__":
    if "--quiet" in sys.argv:
        os.dup2(2, 1)  # libraries print too, and standard output is for JSON
    sys.exit(main())
