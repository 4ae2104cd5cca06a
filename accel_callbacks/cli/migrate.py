"""``accel migrate``: show, then apply, the diff that moves code from Accelerate."""

from __future__ import annotations

import difflib
import os
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence

from accel_callbacks.cli.main import pipe_may_close
from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.compat.migrate.notebook import MovedFile, read_and_move
from accel_callbacks.compat.migrate.source import Finding
from accel_callbacks.terminal_text import printable

_TITLES = {
    "left": "does not run here, and was left as it is",
    "differs": "behaves differently",
    "note": "worth knowing",
}
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"}


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel migrate``."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="scripts, notebooks (.ipynb), or folders of them"
    )
    parser.option("--write", action="store_true", help="change the files, after asking")
    parser.option("--yes", action="store_true", help="with --write: do not ask")
    parser.option("--diff", action="store_true", help="print the diff alone, fit for patch")


def run(args: Namespace) -> int:
    """Print the changes; return 1 if code is left that does not run with this package."""
    if args.yes and not args.write:
        raise CommandError("--yes goes with --write")
    moved: list[MovedFile] = []
    problems: list[str] = []
    paths = list(source_files(args.files))
    for line in _passed_over(args.files, paths):
        print(f"accel migrate: {line}", file=sys.stderr)
    for path in paths:
        try:
            moved.append(read_and_move(path))
        except (OSError, ValueError) as error:
            problems.append(_problem(path, error))
    with pipe_may_close():  # before anything is asked or written
        for file in moved:
            for line in [*diff_lines(file), *(() if args.diff else advice_lines(file))]:
                print(line)
    for problem in problems:
        print(f"accel migrate: {problem}", file=sys.stderr)
    changed = [file for file in moved if file.migration.changed]
    if not (args.write and changed):
        _print_next_step(args, changed)
    elif args.yes or _confirmed(changed):
        problems += _write(changed)
    left = any(file.migration.left for file in moved)
    return 1 if problems or left or not paths else 0


def diff_lines(file: MovedFile) -> Iterator[str]:
    """Yield a unified diff for ``patch`` or ``git apply``."""
    before, after = (_lines(t) for t in (file.migration.before, file.migration.after))
    name = os.path.normpath(file.path).replace(os.sep, "/").lstrip("/")
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=2):
        yield line.rstrip("\n") if line.endswith("\n") else f"{line}\n\\ No newline at end of file"


def _lines(text: str) -> list[str]:
    """Split a text into lines that keep their line feed."""
    return [f"{line}\n" for line in text.split("\n")[:-1]] + [*filter(None, [text.split("\n")[-1]])]


def advice_lines(file: MovedFile) -> Iterator[str]:
    """Yield the findings of a file: one line each, with its line numbers."""
    findings = file.migration.findings
    if not findings:
        if file.migration.changed:
            yield f"{file.path}: nothing else to do"
        return
    yield f"{file.path}: to look at (lines as they are now)"
    for kind, title in _TITLES.items():
        groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
        for finding in findings:
            if finding.kind == kind:
                groups[finding.name, finding.text].append(finding)
        if groups:
            yield f"  {title}:"
        for (name, text), places in groups.items():
            yield f"    {_places(places)}: {printable(name)}: {text}"


def _places(findings: list[Finding]) -> str:
    """List the places of one finding."""
    if findings[0].cell:
        return ", ".join(dict.fromkeys(finding.place for finding in findings))
    numbers = list(dict.fromkeys(str(finding.line) for finding in findings))
    return f"line{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def _print_next_step(args: Namespace, changed: Sequence[MovedFile]) -> None:
    """Print how to go on if nothing was written."""
    if not changed:
        print("nothing to change", file=sys.stderr)
    elif not args.diff:
        print("nothing was written: --write does it", file=sys.stderr)


def _write(changed: Sequence[MovedFile]) -> list[str]:
    """Write the files; return the problems."""
    problems = []
    for file in changed:
        try:
            file.write()
            print(f"wrote {file.path}", file=sys.stderr)
        except (OSError, ValueError) as error:
            problems.append(_problem(file.path, error))
            print(f"accel migrate: {problems[-1]}; it is unchanged", file=sys.stderr)
    return problems


def _problem(path: str, error: Exception) -> str:
    """Describe in one line why a file cannot be read or written."""
    return f"{path}: {error.strerror or error if isinstance(error, OSError) else error}"


def _confirmed(changed: Sequence[MovedFile]) -> bool:
    """Ask for confirmation to write."""
    if not sys.stdin.isatty():
        raise CommandError(
            "standard input is no terminal: add --yes to write, or leave --write out"
        )
    print(f"change {len(changed)} file{'s' * (len(changed) > 1)}? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    confirmed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not confirmed:
        print("nothing was written", file=sys.stderr)
    return confirmed


def source_files(places: Sequence[str]) -> Iterator[str]:
    """Yield the given files, and the scripts and notebooks in the given folders."""
    seen: set[str] = set()
    for place in places:
        for path in _inside(place) if os.path.isdir(place) else [place]:
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield path


def _inside(folder: str) -> Iterator[str]:
    """Yield the scripts and notebooks below a folder, except in hidden and installed ones.

    Links are left out: their targets may be outside the folder.
    """
    for root, names in _walk(folder):
        for name in names:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                yield path


def _walk(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder, and in it the scripts, the notebooks and the links to folders."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            f
            for f in folders
            if f not in _SKIPPED
            and not f.startswith(".")
            and not os.path.exists(os.path.join(root, f, "pyvenv.cfg"))
        )
        scripts = [n for n in names if n.endswith((".py", ".ipynb")) and not n.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        yield root, sorted(scripts) + links


def _passed_over(places: Sequence[str], paths: Sequence[str]) -> Iterator[str]:
    """Yield a line for each link in the given folders whose target is not migrated anyway."""
    done = {os.path.realpath(path) for path in paths}
    folders = [place for place in places if os.path.isdir(place)]
    walked = [(root, names) for folder in folders for root, names in _walk(folder)]
    done |= {os.path.realpath(root) for root, _ in walked}
    for link in dict.fromkeys(os.path.join(root, name) for root, names in walked for name in names):
        target = os.path.realpath(link)
        if os.path.islink(link) and target not in done:
            yield printable(f"skipped {link}, a link to {target}: name it to migrate that")
