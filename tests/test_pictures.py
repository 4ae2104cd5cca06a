"""The pictures of the documentation are those that the repository draws, and say what they show."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import torch

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.callbacks.base import HOOKS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "pictures"))
import bars  # noqa: E402
import diagrams  # noqa: E402
import draw  # noqa: E402
import tables  # noqa: E402
from screen import Screen  # noqa: E402

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")


def test_pictures_are_what_the_repository_draws() -> None:
    """After a new recording or benchmark: python scripts/pictures/draw.py."""
    drawn = {name: picture().svg() for name, picture in draw.PICTURES.items()}
    stored = {name: (draw.FOLDER / f"{name}.svg").read_text("utf-8") for name in drawn}
    assert [name for name in drawn if stored[name] != drawn[name]] == []


def test_the_tables_of_benchmarks_are_those_of_the_results() -> None:
    """After a new result: python scripts/pictures/draw.py."""
    text = tables.PAGE.read_text("utf-8")
    assert tables.page(text) == text
    assert text.count("<!-- end of results -->") == len(list(bars.RESULTS.glob("*.json")))


def test_a_picture_has_two_themes_and_a_title_and_loads_nothing() -> None:
    for path in draw.FOLDER.glob("*.svg"):
        text = path.read_text("utf-8")
        assert ET.fromstring(text).findtext("{http://www.w3.org/2000/svg}title"), path
        assert "prefers-color-scheme" in text.replace(" ", ""), path
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), path


def test_every_picture_is_shown_and_described() -> None:
    """With words for those who do not see it, of a few at least."""
    shown = set()
    for page in PAGES:
        for words, target in IMAGE.findall(page.read_text("utf-8")):
            image = (page.parent / target).resolve()
            assert image.exists(), f"{page}: {target}"
            assert len(words.split()) >= 4, f"{page}: say what {target} shows"
            shown.add(image)
    assert shown == {path for path in draw.FOLDER.iterdir() if path.suffix in (".svg", ".png")}


def test_the_hooks_of_the_picture_fire_in_its_order(tmp_path: Path) -> None:
    seen = []
    recorder = type("Recorder", (), {})()
    for hook in HOOKS:
        setattr(recorder, hook, lambda *_, hook=hook: seen.append(hook))
    checkpoint = Checkpoint(every_n_epochs=1, async_save=False)
    accel = Accelerator(cpu=True, project_dir=str(tmp_path), callbacks=[recorder, checkpoint])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, val = (torch.utils.data.DataLoader(torch.ones(2, 2), batch_size=2) for _ in range(2))
    model, optimizer, train, val = accel.prepare(model, optimizer, train, val)
    with accel.run("hooks") as run:
        for _ in run.epochs(1):
            for batch in train:
                with accel.accumulate(model):
                    loss = model(batch).mean()
                    accel.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accel.log({"loss": loss})
            with accel.evaluate(model):
                for batch in val:
                    model(batch)
    assert seen == [name for _, names in diagrams.HOOKS for name in names]


def test_a_screen_shows_what_a_terminal_would() -> None:
    screen = Screen(8)
    screen.feed("\x1b[1mold\x1b[0m\rne\nthird\x1b[1A\r\x1b[2Ksecond\n\x1b[32mgreen, and wrapped")
    assert screen.text() == "second\ngreen, a\nnd wrapp\ned"
    assert screen.lines()[1] == [("green, a", "good-text")]
