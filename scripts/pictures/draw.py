"""Draw the pictures of the documentation, in light and in dark, and the tables of benchmarks.

    python scripts/pictures/draw.py            # write docs/images/*.svg and docs/benchmarks.md
    python scripts/pictures/draw.py --check    # say which differ from what would be written

Bars come from `benchmarks/results`, terminals from `record.py`, diagrams from `diagrams.py`. The
rooms of the packages are drawn by `scripts/rooms.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bars
import curves
import diagrams
import tables
from svg import Picture
from terminal import terminal

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES: dict[str, Callable[[], Picture]] = {
    "step-cost": bars.step_cost,
    "save-stall": bars.save_stall,
    "import-time": bars.import_time,
    "layouts": diagrams.layouts,
    "losses": partial(curves.losses, "losses", "The loss of one GPT-2 in all layouts"),
    "cut-layouts": partial(
        curves.losses, "cut-layouts", "The loss of one GPT-2 whose layers or sequences are cut"
    ),
    "offload": curves.offload,
    "window": diagrams.window,
    "hooks": diagrams.hooks,
    "order": diagrams.order,
    "checkpoint-folder": diagrams.files,
    "kill-and-resume": partial(terminal, "kill"),
    "progress": partial(terminal, "progress"),
    "ckpt-ls": partial(terminal, "checkpoints"),
}


def main() -> None:
    differing = []
    files = {FOLDER / f"{name}.svg": draw().svg() for name, draw in PICTURES.items()}
    files[tables.PAGE] = tables.page(tables.PAGE.read_text("utf-8"))
    for path, text in files.items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text, "utf-8")
        elif not path.exists() or path.read_text("utf-8") != text:
            differing.append(path.name)
    if differing:
        sys.exit(f"Not up to date: {', '.join(differing)}. Run scripts/pictures/draw.py.")


if __name__ == "__main__":
    main()
