"""Chromium for tests that look at a page, and where their screenshots are kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "site_screenshots"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def unavailable(lacking: str) -> NoReturn:
    """Skip, or fail where the browser is asked for."""
    if os.environ.get("ACCEL_REQUIRE_BROWSER") == "1":
        pytest.fail(lacking)
    pytest.skip(lacking)


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium, for as long as the context lasts."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:  # in .venv, with which scripts/test runs all tests
        pytest.skip("there is no playwright here: scripts/docs --check brings it")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        unavailable("there is no chromium: on Debian and Ubuntu, apt-get install chromium")
    with sync_playwright() as context:
        options = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
        browser = context.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


def keep(page: Any, name: str, *, whole: bool = False) -> None:
    """Keep a screenshot of what is seen, or of the whole page."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=whole)


def luminance(page: Any) -> int:
    """Return how light the page's background is, of 255."""
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in color.strip("rgba()").split(",")[:3]) // 3
