"""Plot the losses of runs that logged to metrics.jsonl, one curve a run.

python examples/plot_losses.py losses.png runs/one runs/ddp runs/fsdp
"""

from __future__ import annotations

import argparse
import json
import pathlib

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def losses(folder: pathlib.Path, name: str) -> dict[int, float]:
    """Return the values by step; of a step that was repeated after a kill, the last one."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["type"] == "metrics" and name in row["values"]:
            found[row["step"]] = row["values"][name]
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("runs", nargs="+", type=pathlib.Path)
    parser.add_argument("--metric", default="train/loss")
    args = parser.parse_args()
    curves = {folder.name: losses(folder, args.metric) for folder in args.runs}
    first = next(iter(curves.values()))
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(2, 1))
    for number, (name, curve) in enumerate(curves.items()):
        width = 5 - 4 * number / max(1, len(curves) - 1)  # so that equal ones are all seen
        above.plot(curve.keys(), curve.values(), label=name, linewidth=width)
        apart = {step: abs(value - first[step]) for step, value in curve.items() if step in first}
        below.plot(apart.keys(), apart.values(), linewidth=1.5)
        print(f"{name}: {len(curve)} steps, at most {max(apart.values()):.1e} from the first run")
    above.set_ylabel(args.metric)
    above.legend()
    below.set_yscale("symlog", linthresh=1e-7)
    below.set_ylabel("distance to the first")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(args.output, dpi=90)


if __name__ == "__main__":
    main()
