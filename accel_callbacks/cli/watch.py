"""``accel watch``: show in a terminal how a run goes on."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.terminal_text import printable

if TYPE_CHECKING:
    import numpy as np
    from rich.console import RenderableType

    from accel_callbacks.addons.journal import Journal

_RECENT = 50  # rows over which speed and ranks are told
_WIDTH = 40  # of the curve of the loss
_MARKS = 6
_BLOCKS = "▁▂▃▄▅▆▇█"
_EVERY = 1.0  # seconds between looks
_TEXTS = ("command", "reason", "error", "path", "status")
_OVER = {"ended", "failed", "interrupted", "killed"}
_STYLES = {"running": "green", "ended": "blue", "failed": "red", "killed": "red"}


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel watch``."""
    parser.add_argument(
        "run", metavar="RUN", help="a run's project folder, or its folder in `journal`; path or URL"
    )
    parser.option("--run_id", metavar="ID", help="a run of the folder; default: the newest")
    parser.option("--once", action="store_true", help="print one picture, and end")


def run(args: Namespace) -> int:
    """Draw the run until it has ended."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise CommandError(
            "watch draws with rich: pip install accel-callbacks[ui]", exit_code=1
        ) from None
    from accel_callbacks.addons.journal import JournalError

    console = Console()
    try:
        frames = _frames(args)
        if args.once or not console.is_terminal:
            console.print(next(frames))
            return 0
        with Live(console=console, auto_refresh=False) as live:
            for picture in frames:
                live.update(picture, refresh=True)
    except (JournalError, OSError, ImportError) as error:
        raise CommandError(str(error), exit_code=1) from None
    return 0


def _frames(args: Namespace) -> Iterator[RenderableType]:
    """Yield a picture every so often, the last one after the end of the run."""
    from accel_callbacks.addons.journal import Journal
    from accel_callbacks.addons.journal.state import ended, state_of

    journal = Journal.read(args.run, args.run_id)
    state, next_look = "", 0.0
    while True:
        began = time.monotonic()
        if began >= next_look or ended(journal.attempts[-1]) is not None:
            state = state_of(journal)
            # Of a run on another machine, that waits for a renewal of its lease.
            next_look = began + 6 * (time.monotonic() - began)
        yield frame(journal, state)
        if state in _OVER:
            return
        # A long journal takes a while to read, which the run's machine is not to do all the time.
        time.sleep(max(_EVERY, 5 * (time.monotonic() - began)))
        journal = Journal.read(journal.folder)


def frame(journal: Journal, state: str) -> RenderableType:
    """Return the picture of a run.

    Args:
        journal: of the run.
        state: how it is.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from accel_callbacks.addons.journal.rank_means import rank_means

    rows = journal.rows(repeated=False)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for name, text in _facts(journal, rows):
        facts.add_row(name, Text(printable(text)))
    parts: list[RenderableType] = [facts]
    ranks = rank_means(journal, _RECENT)
    if len(ranks) > 1:
        names = ("rank", "step", "s/step", "s waiting for data", "for other ranks")
        listed = Table(*names, box=None, padding=(0, 2))
        for part in ranks:
            seconds = (part.step_s, part.data_s, part.wait_s)
            listed.add_row(str(part.rank), str(part.step), *(f"{mean:.3g}" for mean in seconds))
        parts.append(listed)
    marks = Table.grid(padding=(0, 2))
    for cells in _marks(journal):
        marks.add_row(*(Text(printable(cell)) for cell in cells))
    parts.append(marks)
    title = Text.assemble(
        printable(journal.name or "run"), "  ", (state, _STYLES.get(state, "yellow"))
    )
    return Panel(Group(*parts), title=title, title_align="left", expand=False)


def _facts(journal: Journal, rows: np.ndarray[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and texts: where the run is, how fast, its losses and its goodput."""
    from accel_callbacks.addons.journal.goodput import Goodput

    newest = journal.attempts[-1]
    yield "folder", journal.folder
    tries = "" if len(journal.attempts) == 1 else f", start {len(journal.attempts)}"
    yield "ranks", f"{newest.world_size}{tries}"
    if not len(rows):
        yield "step", "none yet"
        return
    last = rows[-1]
    age = datetime.fromtimestamp(float(last["time"])).strftime("%Y-%m-%d %H:%M:%S")
    yield "step", f"{last['step']}, epoch {last['epoch'] + 1}, at {age}"
    recent = rows[rows["attempt"] == last["attempt"]][-_RECENT:]
    seconds = float(recent["time"][-1] - recent["time"][0])
    if len(recent) > 1 and seconds > 0:
        yield "speed", f"{(len(recent) - 1) / seconds:.3g} steps/s"
    yield "loss", f"{last['loss']:.6g}  {_sparkline(rows)}"
    yield "learning rate", f"{last['learning_rate']:.3g}"
    goodput = Goodput.of(journal)
    yield "goodput", f"{goodput.share:.1%} of {goodput.wall_s:.0f} s"


def _sparkline(rows: np.ndarray[Any, Any]) -> str:
    """Return the losses of the whole run as a line of characters, a space where none is finite."""
    from accel_callbacks.addons.journal.report.curves import curve_of

    curve = curve_of(rows["step"], rows["time"], rows["loss"], _WIDTH)
    if curve is None:
        return ""
    means = [mean for mean in curve["mean"] if mean is not None]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(
        " "
        if mean is None
        else _BLOCKS[int((mean - low) / (high - low or 1.0) * (len(_BLOCKS) - 1))]
        for mean in curve["mean"]
    )


def _marks(journal: Journal) -> list[tuple[str, str, str]]:
    """Return the last marks: step, kind, and what they say."""
    from accel_callbacks.addons.journal.format import ROUTINE

    told = [mark for mark in journal.marks if mark.get("kind") not in ROUTINE][-_MARKS:]
    return [
        (
            str(mark.get("step", "")),
            str(mark.get("kind")),
            next((str(mark[name]) for name in _TEXTS if mark.get(name) is not None), ""),
        )
        for mark in told
    ]
