"""Run the commands that pictures of terminals show, and keep what the terminal had.

    python scripts/pictures/record.py [kill progress checkpoints files]
    python scripts/pictures/record.py losses "one process=runs/one" "DDP on two=runs/ddp"
    python scripts/pictures/record.py cut-layouts "one process=runs/one" "TP on two=runs/tp"
    python scripts/pictures/record.py offload

Each runs in an empty folder, on a terminal of 76 columns. Nothing of the output is made up or
altered. Lines that are left out are replaced by dots. Losses are
those of runs that are over, from their metrics.jsonl.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from fcntl import ioctl
from pathlib import Path
from typing import Any

from screen import Screen, Span
from terminal import PROMPT, RECORDINGS

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 76
Lines = list[list[Span]]


def run(
    command: str, folder: str, until: str | None = None, columns: int = COLUMNS
) -> tuple[Lines, Lines]:
    """Return what a terminal shows of a command: at its end, and when it was killed.

    Args:
        command: for the shell.
        folder: to run it in.
        until: a pattern; what the command runs is killed as soon as the terminal has it.
        columns: of the terminal.
    """
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["COLUMNS"] = str(columns)
    process = subprocess.Popen(
        ["sh", "-c", f"{command}\ntrue"], cwd=folder, env=environment, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    screen, then = Screen(columns), []
    while True:
        try:
            output = os.read(ours, 65536)
        except OSError:  # Linux says so that the last writer has closed the terminal
            break
        screen.feed(output.decode(errors="replace").replace("\r\n", "\n"))
        if until is not None and re.search(until, screen.text()):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            until, then = None, shown(screen)
    process.wait()
    os.close(ours)
    return shown(screen), then


def shown(screen: Screen) -> Lines:
    """Return the lines of a screen up to the last that is not empty."""
    lines = screen.lines()
    while lines and not lines[-1]:
        lines.pop()
    return lines


def prompt(command: str) -> list[Span]:
    return [(PROMPT[0], PROMPT[1]), (command, "text bold")]


def session(folder: str, *commands: str, columns: int = COLUMNS) -> Lines:
    """Return the lines of commands one after the other."""
    lines: Lines = []
    for command in commands:
        lines += [prompt(command), *run(command, folder, columns=columns)[0]]
    return lines


def kill(folder: str) -> tuple[str, Lines]:
    """Record a run that is never disturbed, and one that is killed and started again."""
    train = "python digits.py --project_dir"
    command = f"{train} killed    # kill -9 from another terminal"
    killed, _ = run(command, folder, until=r"epoch 5/8 \S+ [23]\d/45")
    lines = session(folder, f"{train} whole 2>&1 | grep ^test")
    lines += [prompt(command), [("...", "muted")], *killed[-2:]]
    lines += session(
        folder,
        f"{train} killed 2>&1 | grep -E 'resumed|^test'",
        "sha256sum */model/model.safetensors | cut -c 1-32,65-",
    )
    title = "One run to its end, another killed with kill -9 and started again: the same SHA-256"
    return title, lines


def progress(folder: str) -> tuple[str, Lines]:
    """Record the bar in the middle of an epoch."""
    command = "python digits.py"
    _, lines = run(command, folder, until=r"epoch 3/8 \S+ [23]\d/45")
    return "The progress bar of a run on a terminal", [prompt(command), *lines]


def checkpoints(folder: str) -> tuple[str, Lines]:
    """Record what `accel ckpt ls` lists."""
    run("python digits.py --epochs 2 --project_dir runs/digits", folder)
    title = "accel ckpt ls: the checkpoints of a run, with their steps, sizes and scores"
    return title, session(folder, "accel ckpt ls runs/digits/checkpoints", columns=90)


def files(folder: str) -> tuple[str, Lines]:
    """Record the files of a checkpoint of two processes."""
    train = "digits.py --epochs 1 --project_dir runs/digits"
    run(f"accel launch --cpu --num_processes 2 {train}", folder)
    list_files = "cd runs/digits/checkpoints/step-*20 && wc -c *"
    return "The files of a checkpoint that two processes saved", session(folder, list_files)


RECORDERS = {
    "kill": kill,
    "progress": progress,
    "checkpoints": checkpoints,
    "files": files,
}


def keep(recording: str, record: dict[str, Any]) -> None:
    """Write a recording with its day."""
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), **record}, indent=1, ensure_ascii=False)
    (RECORDINGS / f"{recording}.json").write_text(text + "\n", "utf-8")


def keep_losses(recording: str, runs: list[str]) -> None:
    """Keep the losses of runs, each given as ``name=folder``."""
    sys.path.insert(0, str(ROOT / "examples"))
    from plot_losses import losses

    curves = {}
    for words in runs:
        name, _, folder = words.partition("=")
        curves[name] = [
            float(f"{loss:.9g}") for loss in losses(Path(folder), "train/loss").values()
        ]
    keep(recording, {"runs": curves})


def keep_offload() -> None:
    """Keep when blocks computed and what was read, as `examples/plot_offload.py` measures them."""
    sys.path.insert(0, str(ROOT / "examples"))
    from plot_offload import measure

    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (computed, read, seconds) in measure(folder).items():
            step = max(len(read) // 200, 1)  # of the samples, as many as the picture shows
            runs[name] = {
                "seconds": round(seconds, 4),
                "computed": [[round(edge, 4) for edge in span] for span in computed],
                "read": [[round(at, 4), round(count, 2)] for at, count in read[::step]],
            }
    keep("offload", {"runs": runs})


def main() -> None:
    RECORDINGS.mkdir(exist_ok=True)
    if sys.argv[1:2] in (["losses"], ["cut-layouts"]):
        keep_losses(sys.argv[1], sys.argv[2:])
        return
    if sys.argv[1:] == ["offload"]:
        keep_offload()
        return
    for name in sys.argv[1:] or RECORDERS:
        folder = Path(tempfile.gettempdir(), "demo")  # short, since messages name it
        folder.mkdir()
        try:
            shutil.copy(ROOT / "examples" / "digits.py", folder)
            title, lines = RECORDERS[name](str(folder))
        finally:
            shutil.rmtree(folder)
        keep(name, {"title": title, "lines": lines})
        print("\n".join("".join(words for words, _ in line) for line in lines))


if __name__ == "__main__":
    main()
