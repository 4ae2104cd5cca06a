"""Send signals and notices to small runs at random moments, and compare how the resumed runs end.

    python scripts/notice_proof.py                 12 of them, to runs of one and of two processes
    python scripts/notice_proof.py --notices 40 --seed 1

A run starts up, evaluates, compiles, trains, evaluates and saves, slowly. Each moment is a place
that it comes to. It is started again until it ends; its weights must be those of a run that nobody
has disturbed, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.metadata import Metadata, metadata_server  # noqa: E402

_PACE = 0.02  # seconds at each place
_PATIENCE = 240.0  # seconds for a start of a run


class Outcome(NamedTuple):
    """What became of one signal or notice.

    Attributes:
        kind: a signal to the processes, or a notice to their machine.
        processes: of the run.
        place: where it came.
        code: with which the run ended.
        seconds: from then to the end.
    """

    kind: str
    processes: int
    place: str
    code: int
    seconds: float


class Proof(NamedTuple):
    """What a run showed that was disturbed.

    Attributes:
        outcomes: of the signals and notices.
        steps: optimizer steps that resumed runs took again.
        places: other places that they came to again.
        same: the weights are those of a run that nobody has disturbed.
    """

    outcomes: list[Outcome]
    steps: int
    places: int
    same: bool


def start(folder: Path, processes: int, metadata: Metadata | None) -> subprocess.Popen[bytes]:
    """Start the run."""
    job = [str(ROOT / "tests" / "support" / "left.py"), str(folder), str(_PACE)]
    launch = ["-m", "accel_callbacks.cli", "launch", "--cpu", f"--num_processes={processes}"]
    command = [sys.executable, *(launch if processes > 1 else ()), *job]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if metadata is not None:
        environment["ACCEL_METADATA_ADDRESS"] = metadata.address
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def places(folder: Path) -> list[tuple[str, int]]:
    """Return the places that rank 0 came to, in all starts."""
    path = folder / "places-0"
    text = path.read_text() if path.exists() else ""
    return [tuple(json.loads(line)) for line in text.splitlines() if line.endswith("]")]


def wait_for(
    folder: Path, place: tuple[str, int], before: int, process: subprocess.Popen[bytes]
) -> bool:
    """Wait until the run comes to a place in this start; return False if it ended before.

    Args:
        folder: of the run.
        place: the place.
        before: places of the starts before.
        process: the run, or its launcher.
    """
    deadline = time.monotonic() + _PATIENCE
    while place not in places(folder)[before:]:
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def send(folder: Path, processes: int, metadata: Metadata | None, chance: random.Random) -> str:
    """Send a notice, or a signal to one process or all; return what was sent."""
    if metadata is not None:
        metadata.announce()
        return "notice"
    ranks = chance.choice([[rank] for rank in range(processes)] + [list(range(processes))])
    for rank in ranks:
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGTERM)
    return "SIGTERM" if processes == 1 else f"SIGTERM to {' and '.join(map(str, ranks))}"


def prove(processes: int, count: int, chance: random.Random, *, notices: bool = False) -> Proof:
    """Disturb one run up to ``count`` times, and compare it with one that is not."""
    with tempfile.TemporaryDirectory() as folder, metadata_server() as metadata:
        whole, disturbed = Path(folder) / "whole", Path(folder) / "disturbed"
        for path in (whole, disturbed):
            path.mkdir()
        asked = metadata if notices else None
        if start(whole, processes, None).wait(_PATIENCE):
            raise SystemExit((whole / "log").read_text()[-4000:])
        route, outcomes = places(whole), list[Outcome]()
        while True:
            metadata.answers["/computeMetadata/v1/instance/preempted"] = (200, b"FALSE")
            before = len(places(disturbed))
            process = start(disturbed, processes, asked)
            # One of each part of the whole run, so that a resumed run comes to it too.
            part = slice(*(len(route) * (len(outcomes) + end) // count for end in (0, 1)))
            if len(outcomes) < count and wait_for(
                disturbed, chance.choice(route[part]), before, process
            ):
                kind = send(disturbed, processes, asked, chance)
                began, came = time.monotonic(), places(disturbed)
                code = process.wait(_PATIENCE)
                if (disturbed / "weights-0").exists():
                    break  # it came too late
                place = " ".join(map(str, came[-1]))
                seconds = time.monotonic() - began
                outcomes.append(Outcome(kind, processes, place, code, seconds))
                if code not in (75, 143):
                    raise SystemExit((disturbed / "log").read_text()[-4000:])
                continue
            if process.wait(_PATIENCE):
                raise SystemExit((disturbed / "log").read_text()[-4000:])
            break
        again = Counter(places(disturbed)) - Counter(places(whole))
        steps = sum(times for (place, _), times in again.items() if place == "step")
        ranks = [f"weights-{rank}" for rank in range(processes)]
        same = all((whole / name).read_text() == (disturbed / name).read_text() for name in ranks)
        return Proof(outcomes, steps, sum(again.values()) - steps, same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--notices", type=int, default=12, help="signals and notices in all")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chance, cases = random.Random(args.seed), [(1, False), (2, False), (1, True), (2, True)]
    print("| sent | processes | at | exit code | seconds to the end |")
    print("| --- | --- | --- | --- | --- |")
    total = steps = others = differing = 0
    for number, (processes, notices) in enumerate(cases):
        count = (number + 1) * args.notices // len(cases) - number * args.notices // len(cases)
        if not count:
            continue
        proof = prove(processes, count, chance, notices=notices)
        for outcome in proof.outcomes:
            cells = (*outcome[:4], f"{outcome.seconds:.1f}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if not proof.same:
            print(f"| {processes} processes | other weights | | | |", flush=True)
        total, differing = total + len(proof.outcomes), differing + (not proof.same)
        steps, others = steps + proof.steps, others + proof.places
    print(
        f"{total} signals and notices: {steps} optimizer steps repeated, {others} places of starts "
        f"and evaluations; {differing} of {len(cases)} runs with other weights than undisturbed"
    )
    return int(bool(steps or differing))


if __name__ == "__main__":
    sys.exit(main())
