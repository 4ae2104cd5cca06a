"""The built site in a real browser: it is found, searched, read on a phone and in the dark.

``scripts/docs --check`` builds the site and runs this. What is seen is in build/site_screenshots.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import DESKTOP, PHONE, chromium, keep, luminance, unavailable

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "docs"
ACCUMULATE = "reference/api/accel_callbacks.Accelerator.html#accel_callbacks.Accelerator.accumulate"
PAGES = (
    *("index.html", "why.html", "how-to/index.html", "how-to/resume.html"),
    *("examples/index.html", "reference/cli.html", ACCUMULATE),
)


class Quiet(SimpleHTTPRequestHandler):
    """Serve the files of the site."""

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not (SITE / "index.html").is_file():
        unavailable("the site is not built: scripts/docs --check builds it and runs these tests")
    handler = functools.partial(Quiet, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Open a page of the site; at the end no page has written an error to the console."""
    contexts, errors = [], []

    def opened(path: str, viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> Any:
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console", lambda line: line.type in ("error", "warning") and errors.append(line.text)
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((address, "data:"))
                or errors.append(f"asks for {request.url}")
            ),
        )
        page.goto(f"{address}/{path}", wait_until="load")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def test_the_landing_page_leads_to_a_guide(open_page: Callable[..., Any]) -> None:
    page = open_page("index.html")
    keep(page, "landing")
    page.locator("header").get_by_role("link", name="How-to guides").click()
    page.locator("article").get_by_role("link", name="Resume a run").first.click()
    assert page.locator("h1").inner_text().startswith("Resume a run")
    keep(page, "guide")


def test_a_search_finds_the_callback(open_page: Callable[..., Any]) -> None:
    page = open_page("search.html?q=Checkpoint")
    results = page.locator("#search-results li a")
    results.nth(5).wait_for()
    keep(page, "search")
    addresses = results.evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert any("api/accel_callbacks.callbacks.Checkpoint.html" in link for link in addresses)


def test_a_method_has_its_place_on_the_page_of_its_class(open_page: Callable[..., Any]) -> None:
    page = open_page(ACCUMULATE)
    signature = page.locator("dt[id='accel_callbacks.Accelerator.accumulate']")
    assert signature.inner_text().startswith("accumulate(")
    box = signature.bounding_box()
    assert 0 <= box["y"] < DESKTOP["height"]
    keep(page, "method")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_nothing_is_wider_than_a_phone(
    open_page: Callable[..., Any], path: str, scheme: str
) -> None:
    page = open_page(path, PHONE, scheme)
    keep(page, f"phone_{scheme}_{path.partition('.html')[0].replace('/', '_')}")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_the_site_is_as_dark_as_the_reader_wants(open_page: Callable[..., Any]) -> None:
    assert luminance(open_page("index.html")) > 200
    page = open_page("how-to/resume.html", scheme="dark")
    keep(page, "dark")
    assert luminance(page) < 60
    page.locator("header .theme-switch-button:visible").first.click()
    page.locator("header button[data-mode=light]:visible").click()
    assert luminance(page) > 200


def test_a_page_that_is_not_there_leads_back(open_page: Callable[..., Any]) -> None:
    page = open_page("404.html")
    keep(page, "not_there")
    page.locator("header").get_by_role("link", name="Tutorials").click()
    assert page.locator("h1").inner_text().startswith("Tutorials")
