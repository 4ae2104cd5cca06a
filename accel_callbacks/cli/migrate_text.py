"""A migration as text: the diff, and what to look at."""

from __future__ import annotations

import difflib
import os
from collections import defaultdict
from collections.abc import Iterator

from accel_callbacks.cli.text import printable
from accel_callbacks.migrating.files import MovedFile
from accel_callbacks.migrating.findings import Finding

_TITLES = {
    "left": "does not run here, and was left as it is",
    "differs": "behaves differently",
    "note": "worth knowing",
}


def diff_lines(file: MovedFile) -> Iterator[str]:
    """Yield a unified diff, as ``patch`` and ``git apply`` read it."""
    before, after = (_lines(t) for t in (file.migration.before, file.migration.after))
    name = os.path.normpath(file.path).replace(os.sep, "/").lstrip("/")
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=2):
        yield line.rstrip("\n") if line.endswith("\n") else f"{line}\n\\ No newline at end of file"


def _lines(text: str) -> list[str]:
    """Cut a text at its line feeds, which stay."""
    return [f"{line}\n" for line in text.split("\n")[:-1]] + [*filter(None, [text.split("\n")[-1]])]


def advice_lines(file: MovedFile) -> Iterator[str]:
    """Yield what to look at, one line for each thing, with the lines where it is."""
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
    """List where something is."""
    if findings[0].cell:
        return ", ".join(dict.fromkeys(finding.place for finding in findings))
    numbers = list(dict.fromkeys(str(finding.line) for finding in findings))
    return f"line{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
