"""A plugin of pytest for Accelerate's own tests: those on the page of differences may fail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "accelerate-differences.md"
_ROW = re.compile(r"^\| (`test_\S+`(?:, `test_\S+`)*) \| (.+) \|$", re.MULTILINE)


def differences(text: str) -> Iterator[tuple[str, str]]:
    """Yield the patterns of tests in the tables of a page, each with its reason.

    Args:
        text: of the page. A pattern is a file of tests, or ``file::test``; ``*`` is any part.
    """
    for tests, reason in _ROW.findall(text):
        yield from ((test, reason) for test in re.findall("`([^`]+)`", tests))


def _reason(rows: list[tuple[str, str]], file: str, test: str = "") -> str | None:
    name = f"{file}::{test}" if test else file
    return next((reason for pattern, reason in rows if fnmatchcase(name, pattern)), None)


def _rows(config: pytest.Config) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] | None = getattr(config, "_differences", None)
    if rows is None:
        rows = list(differences(PAGE.read_text(encoding="utf-8")))
        config._differences = rows  # type: ignore[attr-defined]
    return rows


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file of which the page names the whole."""
    return True if _reason(_rows(config), collection_path.name) is not None else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that the page names."""
    for item in items:
        reason = _reason(_rows(config), item.path.name, item.nodeid.partition("::")[2])
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many passed, failed, and are on the page."""
    reports = terminalreporter.stats
    count = {key: len(reports.get(key, ())) for key in ("passed", "skipped", "xfailed", "xpassed")}
    wrong = len(reports.get("failed", ())) + len(reports.get("error", ()))
    terminalreporter.write_line(
        f"Accelerate's own tests: {count['passed']} passed, {wrong} failed, "
        f"{count['xfailed']} on the page of differences, {count['skipped']} skipped"
    )
    for report in reports.get("xpassed", ()):
        terminalreporter.write_line(f"passes, and is on the page of differences: {report.nodeid}")
