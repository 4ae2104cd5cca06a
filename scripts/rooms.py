"""Draw the rooms of the packages from the imports of their files, and list those that run back up.

    python scripts/rooms.py            # what runs back up
    python scripts/rooms.py --write    # docs/images/rooms.svg too

A room is a folder of accel_callbacks, or a few files of its root; checkpoint_io and loggers are one
each. Rows are read from left to right and from the top: a room imports those that follow it.
Counted are imports at import time, between files that are not the door of a package.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import layout_figures as layout

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
ROWS = (
    ("testing", "cli", "compat"),
    ("accelerator", "addons"),
    ("loop", "tracking", "precision", "callbacks"),
    ("checkpoint", "engines", "launch"),
    ("options", "strategy", "models", "data", "parts"),
    ("plugins", "distributed", "collectives", "errors"),
    ("loggers", "checkpoint_io"),
)
#: Files of the root, by the room that they are drawn as.
ROOT_FILES = {
    **dict.fromkeys(("options", "engine_options"), "options"),
    **dict.fromkeys(("optimizer", "scheduler", "gradients", "memory"), "parts"),
    **dict.fromkeys(("logging", "placeholder"), "parts"),
    **dict.fromkeys(("host_copy", "terminal_text"), "errors"),
    **dict.fromkeys(("_lazy", "launch_memory"), "errors"),
    **dict.fromkeys(("recurrence",), "errors"),
    **dict.fromkeys(("state", "local_sgd", "journal", "offload", "tuning"), "accelerator"),
    **dict.fromkeys(("as_accelerate", "utils"), "compat"),
}
#: Why a room imports one above it. A pair that is not here fails `test_architecture.py`.
REASONS = {
    ("compat", "cli"): "`accelerate.commands` are ours by other names",
    ("addons", "accelerator"): "the checks of `accel test` train by it",
    ("checkpoint", "loop"): "a training state holds the loop's place, and a project names its run",
    ("checkpoint", "callbacks"): "the states of callbacks are found by their names",
    ("checkpoint", "tracking"): "a training state holds what trackers resume from",
    ("models", "engines"): "estimates and loads ask engines for their shards",
    ("models", "precision"): "fp8 is a precision, and changes the layers of models",
    ("parts", "loop"): "prepared optimizers and schedulers follow the loop's window",
    ("parts", "callbacks"): "a prepared optimizer fires the hooks around its step",
    ("parts", "precision"): "a prepared optimizer steps through the precision",
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
.size { font-size: 11px; fill: #59636e }
.room { fill: #eef3f8; stroke: #8fa5bd }
.up { stroke: #c4442b; fill: none; stroke-width: 1.5; opacity: .8 }
.head { fill: #c4442b }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .size { fill: #9198a1 } .room { fill: #1d2733; stroke: #4d6178 }
  .up { stroke: #ff8a73 } .head { fill: #ff8a73 }
}
"""
WIDTH, ROW_HEIGHT, ROOM_WIDTH, ROOM_HEIGHT = 780, 84, 140, 46


def room_of(module: layout.Module) -> str | None:
    """Return the room of a file, None for the door of a package."""
    package, _, rest = module.name.partition(".")
    if module.is_package:
        return None
    if package != "accel_callbacks":
        return package
    name = rest.partition(".")[0]
    return ROOT_FILES.get(name, name)


def arrows(modules: Mapping[str, layout.Module]) -> Counter[tuple[str, str]]:
    """Return how often files of a room import those of another."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, targets in layout.import_graph(modules, (layout.IMPORT_TIME,)).items():
        for target in targets:
            pair = (room_of(modules[name]), room_of(modules[target]))
            if None not in pair and pair[0] != pair[1]:
                counts[pair] += 1  # type: ignore[index]
    return counts


def arrows_up(counts: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Return those of them that lead to a room before."""
    place = {room: number for number, room in enumerate(room for row in ROWS for room in row)}
    return Counter({pair: n for pair, n in counts.items() if place[pair[0]] > place[pair[1]]})


def draw(sizes: Counter[str], up: Counter[tuple[str, str]]) -> str:
    """Return the picture: a box a room with its lines of code, and a curve for each of `up`."""
    centres = {}
    for row_number, row in enumerate(ROWS):
        for number, room in enumerate(row):
            x = WIDTH * (number + 1) // (len(row) + 1)
            centres[room] = (x, 40 + row_number * ROW_HEIGHT)
    height = 40 + (len(ROWS) - 1) * ROW_HEIGHT + ROOM_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>The rooms of the packages; red: imports that run back up</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    half_width, half_height = ROOM_WIDTH // 2, ROOM_HEIGHT // 2
    for room, (x, y) in centres.items():
        parts += [
            f'<rect class="room" x="{x - half_width}" y="{y - half_height}" '
            f'width="{ROOM_WIDTH}" height="{ROOM_HEIGHT}" rx="6"/>',
            f'<text x="{x}" y="{y - 3}">{room}</text>',
            f'<text class="size" x="{x}" y="{y + 14}">{sizes[room]:,} lines of code</text>',
        ]
    for start, end in sorted(up):
        (x, y), (to_x, to_y) = centres[start], centres[end]
        if y == to_y:  # beside: over the boxes
            points = f"M{x} {y - half_height}Q{(x + to_x) // 2} {y - 48} {to_x} {y - half_height}"
        else:
            lower, upper = y - half_height, to_y + half_height
            middle = (lower + upper) // 2
            points = f"M{x} {lower}C{x} {middle} {to_x} {middle} {to_x} {upper}"
        parts.append(f'<path class="up" marker-end="url(#head)" d="{points}"/>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    modules = layout.read_modules(ROOT)
    up = arrows_up(arrows(modules))
    for (start, end), count in sorted(up.items()):
        print(f"{start} -> {end}: {count}, {REASONS.get((start, end), 'without a reason')}")
    print(f"{up.total()} imports run back up, in {len(up)} pairs of rooms")
    if "--write" in sys.argv[1:]:
        sizes: Counter[str] = Counter()
        for module in modules.values():
            if (room := room_of(module)) is not None:
                sizes[room] += layout.code_and_comment_lines(module)[0]
        PICTURE.write_text(draw(sizes, up), "utf-8")


if __name__ == "__main__":
    main()
