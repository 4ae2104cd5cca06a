"""``accel migrate``: show, then apply, the diff that moves code from Accelerate."""

from __future__ import annotations

import difflib
import os
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from io import StringIO

from accel_callbacks.cli.main import pipe_may_close
from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.compat.migrate import Finding, ScriptFile, read_script
from accel_callbacks.errors.removed import REMOVED
from accel_callbacks.terminal_text import printable

_TITLES = {
    "left": "does not run here, and was left as it is",
    "differs": "behaves differently",
    "note": "worth knowing",
}
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"}


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel migrate``."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="scripts, or folders of them")
    parser.option("--write", action="store_true", help="change the files")
    parser.option("--diff", action="store_true", help="print the diff alone, fit for patch")


def run(args: Namespace) -> int:
    """Print the changes; return 1 if code is left that does not run with this package."""
    for path in args.files:
        if path.endswith(".ipynb"):
            gone = REMOVED["accel migrate NOTEBOOK"]
            raise CommandError(f"{path}: accel migrate has no support for notebooks. {gone}")
    paths = source_files(args.files)
    files: list[ScriptFile] = []
    problems: list[str] = []
    for path in paths:
        try:
            files.append(read_script(path))
        except (OSError, ValueError) as error:
            problems.append(_problem(path, error))
    with pipe_may_close():  # before anything is written
        for file in files:
            for line in [*diff_lines(file), *(() if args.diff else advice_lines(file))]:
                print(line)
    for problem in problems:
        print(f"accel migrate: {problem}", file=sys.stderr)
    changed = [file for file in files if file.migration.changed]
    if not changed:
        print("nothing to change", file=sys.stderr)
    elif args.write:
        problems += _write(changed)
    elif not args.diff:
        print("nothing was written: --write does it", file=sys.stderr)
    left = any(file.migration.left for file in files)
    return 1 if problems or left or not paths else 0


def diff_lines(file: ScriptFile) -> Iterator[str]:
    """Yield a unified diff for ``patch`` or ``git apply``."""
    before, after = (list(StringIO(t)) for t in (file.migration.before, file.migration.after))
    name = os.path.normpath(file.path).replace(os.sep, "/").lstrip("/")
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=2):
        yield line.rstrip("\n") if line.endswith("\n") else f"{line}\n\\ No newline at end of file"


def advice_lines(file: ScriptFile) -> Iterator[str]:
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
            lines = list(dict.fromkeys(str(place.line) for place in places))
            where = f"line{'s' * (len(lines) > 1)} {', '.join(lines)}"
            yield f"    {where}: {printable(name)}: {text}"


def _write(changed: Sequence[ScriptFile]) -> list[str]:
    """Write the files; return the problems."""
    problems = []
    for file in changed:
        try:
            file.write()
            print(f"wrote {file.path}", file=sys.stderr)
        except OSError as error:
            problems.append(_problem(file.path, error))
            print(f"accel migrate: {problems[-1]}; it is unchanged", file=sys.stderr)
    return problems


def _problem(path: str, error: Exception) -> str:
    """Describe in one line why a file cannot be read or written."""
    return f"{path}: {error.strerror or error if isinstance(error, OSError) else error}"


def source_files(places: Sequence[str]) -> list[str]:
    """Return the given files, each once, with the scripts in the given folders.

    Hidden and installed folders are left out, and so are links in folders.
    """
    paths: dict[str, str] = {}
    for place in places:
        if not os.path.isdir(place):
            paths.setdefault(os.path.realpath(place), place)
            continue
        for root, folders, names in os.walk(place):
            folders[:] = sorted(f for f in folders if not _is_skipped(root, f))
            for name in sorted(n for n in names if n.endswith(".py") and not n.startswith(".")):
                path = os.path.join(root, name)
                if not os.path.islink(path):
                    paths.setdefault(os.path.realpath(path), path)
    return list(paths.values())


def _is_skipped(root: str, folder: str) -> bool:
    """Return whether a folder is hidden, or has what was installed or built."""
    is_environment = os.path.exists(os.path.join(root, folder, "pyvenv.cfg"))
    return folder in _SKIPPED or folder.startswith(".") or is_environment
