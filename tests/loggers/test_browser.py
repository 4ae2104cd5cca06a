"""TensorBoard as a person sees it: the page of the digits example, in a headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "google-chrome", "chromium-browser", "google-chrome-stable")

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def browser() -> str:
    """A Chromium: on PATH, or the one of playwright."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    cached = sorted(Path.home().glob(".cache/ms-playwright/chromium-*/chrome-linux*/chrome"))
    if found is None and not cached:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH, and playwright has none")
    return found or str(cached[-1])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of the example."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    options = ["--epochs", "2", "--cpu", "--log_with", "tensorboard", "--project_dir", str(folder)]
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), *options]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "tensorboard"


@pytest.fixture(scope="module")
def server(run_folder: Path) -> Iterator[str]:
    """The address of a TensorBoard that serves the folder."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run_folder)]
    with subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            while "." not in _json(f"{url}/data/plugin/scalars/tags"):
                assert process.poll() is None, "TensorBoard died"
                time.sleep(0.3)
            yield url
        finally:
            process.terminate()


def _json(url: str) -> Any:
    """What an address answers, or an empty dict while nobody answers."""
    try:
        with urllib.request.urlopen(url) as answer:
            return json.load(answer)
    except OSError:
        return {}


def test_the_endpoints_have_the_curves(server: str) -> None:
    tags = _json(f"{server}/data/plugin/scalars/tags")["."]
    assert {"train/loss", "val/loss", "val/accuracy", "lr"} <= tags.keys()
    for tag, count in (("train/loss", 90), ("val/loss", 2)):
        points = _json(f"{server}/data/plugin/scalars/scalars?run=.&tag={tag.replace('/', '%2F')}")
        steps, values = [point[1] for point in points], [point[2] for point in points]
        assert len(steps) == count
        assert steps == sorted(set(steps))
        assert values[-1] < values[0]


def test_the_page_shows_the_curves(server: str, browser: str, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    command = [
        browser, "--headless=new", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}",
        "--disable-gpu", "--disable-3d-apis",  # curves are then drawn as SVG, into the page
        "--window-size=1400,1000", "--virtual-time-budget=30000",
        "--run-all-compositor-stages-before-draw", "--dump-dom", f"--screenshot={picture}",
        f"{server}/?tagFilter=loss#timeseries",
    ]  # fmt: skip
    for _ in range(3):  # a machine under load may draw too late for the browser's clock
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        cards = _cards(done.stdout)
        if {"train/loss", "val/loss"} <= cards.keys() and _is_drawn(cards["train/loss"]):
            break
    assert {"train/loss", "val/loss"} <= cards.keys()
    assert _is_drawn(cards["train/loss"])
    _check_picture(picture)


def _cards(page: str) -> dict[str, str]:
    """The HTML of each card by the title that it shows."""
    parts = re.split(r"<card-view\b", page)[1:]
    titled = [(re.search(r'title="([\w/]+)"', part), part) for part in parts]
    return {title[1]: part for title, part in titled if title is not None}


def _is_drawn(card: str) -> bool:
    """Whether a card has a line through most of the 90 steps."""
    lines = re.findall(r'<path[^>]* d="(M[^"]*)"', card)
    return any(line.count("L") > 60 for line in lines)


def _check_picture(path: Path) -> None:
    """Not blank: TensorBoard's orange bar, and many shades elsewhere."""
    from PIL import Image

    with Image.open(path) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    assert pixels.shape == (1000, 1400, 3)
    red, green, blue = pixels[20, 600]
    assert red > 200 > green > blue
    assert len(np.unique(pixels[100:].reshape(-1, 3), axis=0)) > 100
