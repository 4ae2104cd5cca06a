"""Tables of `docs/benchmarks.md`, from `benchmarks/results`: each stands between two comments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bars import processor, read, versions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
_BLOCK = re.compile(r"(<!-- results of (\w+) -->\n).*?(<!-- end of results -->)", re.S)
NAMES = {
    "plain": "plain torch",
    "ours": "this library",
    "ours_with_callbacks": "this library, with a callback",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "trainer": "Lightning Trainer",
    "bare": "the method called by hand",
    "ours_nobody": "this library, a hook that no callback has",
    "ours: save_state": "this library, `save_state`",
    "ours: background": "this library, `save_state(async_save=True)`",
    "DCP": "torch DCP",
    "DCP async_save": "torch DCP, `async_save`",
    "torch.save": "`torch.save`",
}


def table(name: str) -> str:
    """Return the figures of a benchmark as a table, with where they come from."""
    record = read(name)
    titles = list(record["figures"])
    # In order of appearance: a figure may leave contenders out.
    contenders = dict.fromkeys(name for rows in record["figures"].values() for name in rows)
    lines = ["", f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for contender in contenders:
        cells = [cell(record["figures"][title].get(contender)) for title in titles]
        lines.append(f"| {NAMES.get(contender, contender)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", source(record), ""])


def cell(row: dict[str, float] | None) -> str:
    """Return the median with the middle half of the rounds, where that was kept."""
    if row is None:
        return ""
    if "low" not in row:
        return f"{row['median']:.3g}"
    return f"{row['median']:.3g} ({row['low']:.3g} to {row['high']:.3g})"


def source(record: dict[str, Any]) -> str:
    """Return a sentence with the command, the machine, the day and the versions."""
    machine = record["machine"]
    packages = versions(record, *(name for name in record["versions"] if name != "python"))
    return (
        f"`{record['command']}`, {record['date']}, on {machine['cores']} cores of "
        f"{processor(record)} ({machine['memory_gb']} GB, {machine['system']}, load "
        f"{machine['load']}), Python {record['versions']['python']}, {packages}."
    )


def page(text: str) -> str:
    """Return the page with its tables made anew."""
    return _BLOCK.sub(lambda block: f"{block[1]}{table(block[2])}{block[3]}", text)
