"""Milliseconds that imports add to `import torch`, each in a fresh interpreter.

    python benchmarks/import_time.py

All contenders are measured with compiled bytecode: pip compiles what it installs, and a first
round, which does not count, does it for a package that is imported from its source tree.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys

import results

SNIPPETS = {
    "import accel_callbacks": "import accel_callbacks",
    "from accel_callbacks import Accelerator": "from accel_callbacks import Accelerator",
    "... and all built-in callbacks": (
        "from accel_callbacks import Accelerator\n"
        "from accel_callbacks.callbacks import Checkpoint, EarlyStopping, ProgressBar"
    ),
    "import checkpoint_io": "import checkpoint_io",
    "import loggers": "import loggers",
    "import accelerate": "import accelerate",
    "from lightning.fabric import Fabric": "from lightning.fabric import Fabric",
}
TIMED = """
import time, torch
started = time.perf_counter()
{snippet}
print((time.perf_counter() - started) * 1e3)
"""


def milliseconds(snippet: str) -> float | None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(snippet=snippet)],
        env=environment,
        capture_output=True,
        text=True,
    )
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    results.add_option(parser)
    options = parser.parse_args()
    rounds = options.rounds
    times: dict[str, list[float]] = {name: [] for name in SNIPPETS}
    for current in range(rounds + 1):
        for name in random.sample(list(SNIPPETS), len(SNIPPETS)):
            value = milliseconds(SNIPPETS[name])
            if value is not None and current > 0:
                times[name].append(value)
    print(f"milliseconds after `import torch`, {rounds} fresh interpreters each")
    for name, values in times.items():
        if values:
            print(f"{name:42} median {statistics.median(values):7.1f}  min {min(values):7.1f}")
        else:
            print(f"{name:42} not installed")
    if options.write:
        measured = {name: values for name, values in times.items() if values}
        results.write("import_time", {"milliseconds after `import torch`": measured})


if __name__ == "__main__":
    main()
