"""Keep what a benchmark measured in `results/NAME.json`; shared by benchmarks, not a script.

A file has the figures with the command, the date, the machine and the versions that gave them.
`scripts/pictures` draws from these files, and `docs/benchmarks.md` has their tables.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "accelerate", "lightning", "transformers")
Samples = Mapping[str, Sequence[float]]  # of each contender, one a round


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--write``."""
    parser.add_argument("--write", action="store_true", help="keep the figures in results/")


def write(name: str, figures: Mapping[str, Samples]) -> None:
    """Write what was measured.

    Args:
        name: of the file, without its ending.
        figures: what was measured and its unit, such as "microseconds a step", to the samples.
    """
    record = {
        "command": command(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "figures": {title: spread(samples) for title, samples in figures.items()},
    }
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(record, indent=2) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def spread(samples: Samples) -> dict[str, dict[str, float]]:
    """Return the quartiles and the least of each contender's samples."""
    rows = {}
    for contender, values in samples.items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        row = {"low": low, "median": median, "high": high, "least": min(values)}
        rows[contender] = {field: float(f"{value:.4g}") for field, value in row.items()}
        rows[contender]["rounds"] = len(values)
    return rows


def command(words: Sequence[str]) -> str:
    """Return the command that runs; a path of this machine is left out of it."""
    script, *options = words
    shown = [f"benchmarks/{Path(script).name}"]
    shown += ["PATH" if os.sep in option else option for option in options if option != "--write"]
    return shlex.join(["python", *shown])


def machine() -> dict[str, str | int | float]:
    """Return what tells this machine from another, and how busy it was."""
    found: dict[str, str | int | float] = {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
    }
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory_gb"] = round(memory / 1e9)
    if hasattr(os, "getloadavg"):
        found["load"] = round(os.getloadavg()[0], 2)
    return found


def processor() -> str:
    """Return the name of the processor, as Linux has it where this is Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that take part."""
    present = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            present[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return present
