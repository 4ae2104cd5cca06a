"""Bars of what benchmarks measured, from `benchmarks/results`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from svg import Picture

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WIDTH, LEFT, RIGHT = 640, 232, 100  # of the picture, of the names, of the figures
ROW, BAR = 36, 20


def read(name: str) -> dict[str, Any]:
    """Return what a benchmark has kept."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def source(record: dict[str, Any]) -> list[str]:
    """Return lines with the machine, the day and the versions of a record."""
    machine = record["machine"]
    return [
        f"{processor(record)}, {machine['cores']} cores, {record['date']}",
        versions(record, "torch", "accelerate", "lightning"),
    ]


def processor(record: dict[str, Any]) -> str:
    """Return the name of the processor without its marks."""
    return re.sub(r"\((?:R|TM)\)| Processor", "", record["machine"]["processor"])


def bars(
    title: str,
    subtitle: str,
    rows: dict[str, dict[str, float]],
    names: dict[str, str],
    form: str,
    record: dict[str, Any],
) -> Picture:
    """Draw a bar a contender: the median, with a line over the middle half of the rounds.

    Args:
        title: in one line.
        subtitle: the unit, and what a short bar means.
        rows: quartiles by contender.
        names: of the contenders that are drawn, in order; those that begin with "this library"
            are drawn in its color.
        form: of a figure, for ``str.format``.
        record: the benchmark's, which says below where the figures come from.
    """
    footer = ["The bar is the median, the line the middle half of the rounds.", *source(record)]
    height = 78 + ROW * len(names) + 12 + 19 * len(footer)
    picture = Picture(WIDTH, height, f"{title}: {subtitle}")
    picture.text(20, 32, title, "text title")
    picture.text(20, 54, subtitle, "muted small")
    scale = (WIDTH - LEFT - RIGHT) / max(rows[name]["high"] for name in names)
    for number, (contender, name) in enumerate(names.items()):
        row = rows[contender]
        y = 72 + number * ROW
        is_ours = name.startswith("this library")
        picture.text(LEFT - 12, y + 15, name, "text bold" if is_ours else "text", "end")
        width = max(row["median"] * scale, 2)
        picture.rect(LEFT, y, width, BAR, "ours" if is_ours else "peer")
        low, high = (LEFT + max(row[edge], 0) * scale for edge in ("low", "high"))
        picture.line([(low, y + BAR / 2), (high, y + BAR / 2)], "spread")
        end = max(LEFT + width, high) + 10
        picture.text(end, y + 15, form.format(row["median"]), "text bold" if is_ours else "text")
    picture.line([(LEFT, 66), (LEFT, 72 + len(names) * ROW - 8)])
    for number, words in enumerate(footer):
        picture.text(20, 84 + ROW * len(names) + 19 * number, words, "muted small")
    return picture


def versions(record: dict[str, Any], *packages: str) -> str:
    """Return names and versions of those packages that were there."""
    installed = record["versions"]
    return ", ".join(f"{name} {installed[name]}" for name in packages if name in installed)


def step_cost() -> Picture:
    """Draw what a wrapped loop adds to a step."""
    record = read("loop_overhead")
    step = record["figures"]["microseconds a step"]["plain"]["median"]
    return bars(
        "What a wrapped loop adds to a training step",
        f"microseconds, on a step of {step:.0f} µs in plain torch; less is better",
        record["figures"]["microseconds added to a step"],
        {
            "ours": "this library",
            "fabric": "Lightning Fabric",
            "accelerate": "Accelerate",
        },
        "{:.0f} µs",
        record,
    )


def save_stall() -> Picture:
    """Draw how long a save holds the step."""
    record = read("checkpoint_background")
    title, rows = next(
        (title, rows) for title, rows in record["figures"].items() if "holds" in title
    )
    size = re.search(r"[\d.]+ GB", title)
    assert size is not None
    return bars(
        "How long a save holds the training step",
        f"seconds, with {size[0]} of weights and Adam's state; less is better",
        rows,
        {
            "ours": "this library, async_save",
            "DCP async_save": "torch DCP, async_save",
            "torch.save": "torch.save",
            "accelerate": "Accelerate, save_state",
        },
        "{:.2f} s",
        record,
    )


def import_time() -> Picture:
    """Draw what an import adds to torch's."""
    record = read("import_time")
    (rows,) = record["figures"].values()
    return bars(
        "What an import adds to import torch",
        "milliseconds, in a fresh interpreter; less is better",
        rows,
        {
            "import accel_callbacks": "this library, import",
            "from accel_callbacks import Accelerator": "this library, Accelerator",
            "import accelerate": "Accelerate, import",
        },
        "{:.3g} ms",
        record,
    )
