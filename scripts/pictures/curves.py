"""Curves of what runs of examples logged or measured, as `record.py` has kept them."""

from __future__ import annotations

import math

from svg import Picture
from terminal import read

WIDTH, LEFT, RIGHT = 640, 74, 24
LEAST, MOST = -8, -4  # powers of ten of the lower panel


def losses(name: str, title: str) -> Picture:
    """Draw losses over steps above, and their distances from the first run below.

    Args:
        name: of the recording.
        title: in one line.
    """
    recording = read(name)
    runs = {name: [float(loss) for loss in values] for name, values in recording["runs"].items()}
    first = next(iter(runs.values()))
    worst = max(
        abs(loss - base)
        for values in runs.values()
        for loss, base in zip(values, first, strict=True)
    )
    picture = Picture(
        WIDTH,
        470,
        f"Losses of a GPT-2 over {len(first)} steps in {len(runs)} layouts: one curve; they are "
        f"at most {worst:.0e} apart",
    )
    picture.text(20, 32, title, "text title")
    across = (WIDTH - LEFT - RIGHT) / (len(first) - 1)
    low, high = math.floor(min(first)), math.ceil(max(first))

    def above(loss: float) -> float:
        return 56 + 180 * (high - loss) / (high - low)

    def below(apart: float) -> float:
        power = math.log10(max(apart, 10**LEAST))
        return 284 + 130 * (MOST - power) / (MOST - LEAST)

    for tick in range(low, high + 1):
        picture.line([(LEFT, above(tick)), (WIDTH - RIGHT, above(tick))])
        picture.text(LEFT - 10, above(tick) + 5, str(tick), "muted small", "end")
    for power in range(LEAST + 1, MOST + 1):
        y = below(10.0**power)
        picture.line([(LEFT, y), (WIDTH - RIGHT, y)])
        picture.text(LEFT - 10, y + 5, f"1e{power}", "muted small", "end")
    picture.line([(LEFT, below(0)), (WIDTH - RIGHT, below(0))])
    picture.text(LEFT - 10, below(0) + 5, "0", "muted small", "end")
    for number, (name, values) in enumerate(runs.items()):
        # Each thinner than the one before, so that equal curves are all seen.
        color = f"line-{number} {'wide' if number == 0 else ''}".strip()
        points = [(LEFT + step * across, above(loss)) for step, loss in enumerate(values)]
        picture.line(points, color)
        if number:
            apart = [abs(loss - base) for loss, base in zip(values, first, strict=True)]
            picture.line([(LEFT + n * across, below(d)) for n, d in enumerate(apart)], color)
        y = 72 + number * 20
        picture.line([(372, y - 5), (400, y - 5)], color)
        picture.text(410, y, name, "text small")
    picture.text(20, 270, "distance from one process", "muted small")
    for step in range(0, len(first) + 1, 20):
        x = LEFT + max(step - 1, 0) * across
        picture.text(x, 434, str(max(step, 1)), "muted small", "middle")
    picture.text(WIDTH - RIGHT, 456, "step", "muted small", "end")
    return picture


def offload() -> Picture:
    """Draw the bytes that one forward had read at each moment, over the blocks that computed."""
    runs = read("offload")["runs"]
    seconds = max(run["seconds"] for run in runs.values())
    megabytes = max(count for run in runs.values() for _, count in run["read"])
    times = ", ".join(f"{name}: {run['seconds']:.2f} s" for name, run in runs.items())
    title = f"Bytes read and blocks that compute, over the seconds of one forward; {times}"
    picture = Picture(WIDTH, 440, title)
    picture.text(20, 32, "One forward of a model on disk", "text title")
    picture.rect(346, 20, 26, 14, "warm", radius=2)
    picture.text(380, 32, "a block computes", "text small")
    picture.line([(510, 27), (534, 27)], "line-1")
    picture.text(542, 32, "bytes read", "text small")
    across, high = (WIDTH - LEFT - RIGHT) / (math.ceil(seconds * 20) / 20), 120

    for number, (name, run) in enumerate(runs.items()):
        top = 78 + number * 176
        low = top + high
        picture.text(LEFT, top - 12, f"{name}: {run['seconds']:.2f} s", "text bold")
        for begin, end in run["computed"]:
            left = LEFT + begin * across
            picture.rect(left, top, max((end - begin) * across, 1), high, "warm", radius=0)
        for part in (0, 0.5, 1):
            y = low - part * high
            picture.line([(LEFT, y), (WIDTH - RIGHT, y)])
            label = f"{part * megabytes:.0f} MB" if part else "0"
            picture.text(LEFT - 10, y + 5, label, "muted small", "end")
        points = [(LEFT + at * across, low - high * count / megabytes) for at, count in run["read"]]
        picture.line(points, "line-1")
        end = LEFT + run["seconds"] * across
        picture.line([(end, top - 4), (end, low)], "cut")
    for tick in range(math.ceil(seconds * 20) + 1):
        if tick % 2 == 0:
            picture.text(
                LEFT + tick / 20 * across, 394, f"{tick / 20:.1f}", "muted small", "middle"
            )
    picture.text(WIDTH - RIGHT, 420, "seconds", "muted small", "end")
    return picture
