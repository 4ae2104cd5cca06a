"""The page of ``accel report --html`` in a real browser: curves, marks, a phone, the dark.

What is seen is in build/site_screenshots.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from accel_callbacks.addons.journal.report.page import report_page
from accel_callbacks.journal import Journal
from tests.support.browser import DESKTOP, PHONE, chromium, keep, luminance
from tests.support.journals import write_attempt, write_run

HOSTILE = "</title><b>a"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that was killed and resumed on two ranks, beside one that was not."""
    folder = tmp_path_factory.mktemp("runs")
    saves = [
        {"kind": "save", "time": 1000.0 + step, "step": step, "path": f"checkpoints/{step}"}
        for step in (100, 200)
    ]
    curves: dict[str, Any] = {
        "loss": lambda step: 2 / math.sqrt(step) + 0.2 * math.sin(step * 1.7) ** 2,
        "gradient_norm": lambda step: 1 + 0.5 * math.cos(step * 2.3),
        "learning_rate": lambda step: 0.1 * (1 - step / 301),
    }
    first = folder / "a" / "journal" / "a1"
    facts: dict[str, Any] = {"name": HOSTILE, "config": {"lr": 0.1}, "ranks": 2, **curves}
    facts["forward_s"] = lambda rank: 0.4 + 0.3 * rank
    write_attempt(first, 1, range(1, 231), marks=saves, **facts)
    end = {"kind": "end", "time": 1401.0, "step": 300, "status": "success", "error": None}
    write_attempt(first, 2, range(201, 301), time=1300.0, step=200, marks=[end], **facts)
    write_run(folder / "b", range(1, 5001), name="b", config={"lr": 0.2}, **curves)
    write_media(folder / "b")
    file = folder / "page.html"
    page = report_page([Journal.read(folder / name) for name in "ab"])
    file.write_text(page, encoding="utf-8")
    return file


def write_media(project: Path) -> None:
    """Write what the tracker of a run keeps of two pictures and a table."""
    media = project / "metrics-media"
    media.mkdir()
    records: list[dict[str, Any]] = [{"type": "run", "run_id": "a1", "resumed_step": None}]
    for step in (10, 20):
        Image.new("RGB", (28, 28), (step * 5, 0, 0)).save(media / f"digit-{step}.png")
        values = {"digit": [f"metrics-media/digit-{step}.png"]}
        records.append({"type": "images", "step": step, "time": 0.0, "values": values})
        records[-1]["captions"] = {"digit": [HOSTILE]}
    rows = [[HOSTILE, 3], ["seven", 1]]
    records.append({"type": "table", "step": 20, "time": 0.0, "name": "mistakes"})
    records[-1] |= {"columns": ["label", "count"], "rows": rows}
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (project / "metrics.jsonl").write_text(lines, encoding="utf-8")


@pytest.fixture
def open_page(browser: Any, page_file: Path) -> Iterator[Callable[..., Any]]:
    """Open the page; at the end it has written nothing to the console, and asked for no file."""
    contexts, errors = [], []

    def opened(viewport: dict[str, int], scheme: str) -> Any:
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on("console", lambda line: errors.append(line.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        address = page_file.as_uri()
        page.on("request", lambda request: request.url == address or errors.append(request.url))
        page.goto(address, wait_until="load")
        page.locator(".u-over").first.wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def colors(page: Any) -> int:
    """Return how many pixels of the first chart are in the color of the first run."""
    script = """() => {
        const canvas = document.querySelector(".chart canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let i = 0; i < data.length; i += 4)
            count += data[i] === 0x3b && data[i + 1] === 0x82 && data[i + 2] === 0xf6;
        return count;
    }"""
    return int(page.evaluate(script))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_fits_the_screen(
    open_page: Callable[..., Any], viewport: dict[str, int], scheme: str
) -> None:
    page = open_page(viewport, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert (luminance(page) > 127) == (scheme == "light")
    assert page.locator("h1").inner_text().startswith(HOSTILE)
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator("canvas").wait_for()
    assert page.locator(".ranks .slow").first.inner_text() == "rank 1"
    assert page.locator("#sections").get_by_text("config/lr").first.is_visible()
    page.evaluate("scrollTo(0, 0)")
    keep(page, f"report-{viewport['width']}-{scheme}", whole=True)


def test_the_reader_chooses_what_is_drawn(open_page: Callable[..., Any]) -> None:
    page = open_page(DESKTOP, "light")
    key = page.locator("#key").inner_text()
    assert key.split() == ["▲", "checkpoint", "✕", "kill", "↻", "resume"]
    over = page.locator(".u-over").first
    box = over.bounding_box()
    chart = page.locator(".chart").first
    # The axis ends at step 5,000, and the first run was killed after step 230.
    page.mouse.move(box["x"] + box["width"] * 229 / 4999, box["y"] + box["height"] / 2)
    chart.get_by_text("kill at step 230").wait_for()
    assert "b 0." in chart.locator(".readout").inner_text()
    assert colors(page) > 20
    page.select_option("#axis", "time")
    page.mouse.move(0, 0)
    chart.get_by_text("83.3 min").wait_for()
    for control in ("#log", "#clip"):
        page.check(control)
    page.locator("#smoothing").fill("0.9")
    page.get_by_label(HOSTILE).uncheck()
    chart.locator(".readout").get_by_text(HOSTILE).wait_for(state="detached")
    assert colors(page) == 0


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_pictures_and_tables_are_seen(
    open_page: Callable[..., Any], viewport: dict[str, int]
) -> None:
    page = open_page(viewport, "light")
    pictures = page.locator(".pictures img")
    assert [picture.get_attribute("alt") for picture in pictures.all()] == [
        f"digit, step {step}: {HOSTILE}" for step in (20, 10)
    ]
    for picture in pictures.all():
        picture.scroll_into_view_if_needed()
        assert picture.evaluate("image => image.complete && image.naturalWidth") == 28
        assert picture.bounding_box()["width"] > 20
    assert page.get_by_role("cell", name=HOSTILE, exact=True).first.is_visible()
    assert page.get_by_role("cell", name="seven").is_visible()
    keep(page, f"report-media-{viewport['width']}")
