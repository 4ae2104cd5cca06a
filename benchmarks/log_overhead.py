"""What `accel.log` of three device scalars costs the training thread, whatever the trackers do.

    python benchmarks/log_overhead.py --rounds 15

Each contender logs `--calls` rows with a little work between them, as a training step does, and
only the calls are timed. Rounds alternate between the contenders; the table has the median of the
rounds' medians, in microseconds, and the ratio to ours with TensorBoard. "sleeps" is a tracker that
sleeps a second in each call. Give `--device cuda` where there is one.

A second table is of a loop that only logs, three floats a row: rows a second until the files are
closed, in the median of the rounds, and the rows that are in them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import results
import torch

Log = Callable[[dict[str, Any], int], None]
Contender = tuple[Log, Callable[[], None]]


def ours(device: str, log_with: Any) -> Contender:
    from accel_callbacks import Accelerator
    from loggers import TrackerConfig

    folder = tempfile.mkdtemp()
    accel = Accelerator(
        cpu=device == "cpu",
        log_with=log_with,
        project_dir=folder,
        tracker_config=TrackerConfig(finish_timeout_s=1.0),
    )
    accel.init_trackers("overhead")
    return accel.log, accel.end_training


def sleeper() -> Any:
    from loggers import Tracker

    class Sleeps(Tracker):
        name = "sleeps"

        def start(self, run: Any) -> None:
            pass

        def log(self, scalars: Any, step: int) -> None:
            time.sleep(1)

        def finish(self, status: Any = "success") -> None:
            pass

    return Sleeps()


def accelerate(device: str) -> Contender:
    from accelerate import Accelerator

    folder = tempfile.mkdtemp()
    accel = Accelerator(cpu=device == "cpu", log_with="tensorboard", project_dir=folder)
    accel.init_trackers("overhead")

    def log(values: dict[str, Any], step: int) -> None:
        # Its TensorBoard tracker drops tensors, so scripts read them first; that waits for them.
        accel.log({name: value.item() for name, value in values.items()}, step=step)

    return log, accel.end_training


CONTENDERS: dict[str, Callable[[str], Contender]] = {
    "ours, no tracker": lambda device: ours(device, None),
    "ours, jsonl": lambda device: ours(device, "jsonl"),
    "ours, a tracker that sleeps": lambda device: ours(device, sleeper()),
    "ours, tensorboard": lambda device: ours(device, "tensorboard"),
    "Accelerate, tensorboard": accelerate,
}


def measure(make: Callable[[str], Contender], device: str, calls: int) -> list[float]:
    """Seconds of each call."""
    log, end = make(device)
    weight = torch.randn(256, 256, device=device)
    batch = torch.randn(64, 256, device=device)
    seconds = []
    for step in range(calls + 20):
        loss = (batch @ weight).square().mean()
        values = {"train/loss": loss, "train/norm": loss.sqrt(), "train/scale": loss + 1}
        begun = time.perf_counter()
        log(values, step)
        seconds.append(time.perf_counter() - begun)
    end()
    return seconds[20:]


def full_speed(log_with: list[str], rows: int) -> tuple[float, dict[str, int]]:
    """Rows a second, and by tracker how many arrived."""
    from loggers import RunInfo, TrackerHub, read_csv, read_jsonl

    with tempfile.TemporaryDirectory() as folder:
        hub = TrackerHub(log_with, run=RunInfo("overhead", folder, "a1"))
        hub.start()
        begun = time.perf_counter()
        for step in range(rows):
            hub.log(
                {"train/loss": step / 7, "train/norm": 1 / (step + 1), "train/scale": 1.0}, step
            )
        hub.finish()
        seconds = time.perf_counter() - begun
        read = {"jsonl": read_jsonl, "csv": read_csv}
        return rows / seconds, {
            name: len(read[name](f"{folder}/metrics.{name}")) for name in log_with
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=100_000, help="of the loop that only logs")
    parser.add_argument("--device", default="cpu")
    results.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    medians: dict[str, list[float]] = {}
    slowest: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, make in CONTENDERS.items():
            with suppress(ImportError):
                seconds = sorted(measure(make, options.device, options.calls))
                medians.setdefault(name, []).append(statistics.median(seconds))
                slowest.setdefault(name, []).append(seconds[int(0.99 * len(seconds))])
    base = statistics.median(medians["ours, tensorboard"])
    print(f"{'accel.log of 3 scalars on ' + options.device:40}{'us':>8}{'p99 us':>10}{'ratio':>8}")
    for name, values in medians.items():
        median = statistics.median(values)
        late = statistics.median(slowest[name])
        print(f"{name:40}{median * 1e6:8.2f}{late * 1e6:10.1f}{median / base:8.2f}")
    if options.write:
        each = {name: [value * 1e6 for value in values] for name, values in medians.items()}
        results.write("log_overhead", {"microseconds of `accel.log` of three scalars": each})
    print(f"\n{f'{options.rows} rows at full speed':40}{'rows/s':>8}   rows that arrived")
    for log_with in (["jsonl"], ["csv"], ["jsonl", "csv"]):
        measured = [full_speed(log_with, options.rows) for _ in range(options.rounds)]
        speed = statistics.median(one for one, _ in measured)
        fewest = {name: min(arrived[name] for _, arrived in measured) for name in log_with}
        print(f"{' and '.join(log_with):40}{speed:8.0f}   {fewest}")


if __name__ == "__main__":
    main()
