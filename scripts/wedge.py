"""Kill scripts for Accelerate at random moments, and compare what they end with; see ``wedge``."""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
JOBS = {
    "Trainer": ["wedge_trainer.py"],
    "SFTTrainer": ["wedge_trainer.py", "sft"],
    "loop": ["wedge_loop.py", "seedable"],
    "loop, default order": ["wedge_loop.py"],
}
OWN, OTHER = "this library", "Accelerate"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "ACCEL_AS_ACCELERATE"},
    **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"},
}
_LIMIT = 300.0  # seconds for one start
_SETTLED = 30.0  # seconds in which what a kill has left, and a script that is done, must end


class Outcome(NamedTuple):
    """What became of a script that was killed again and again.

    Attributes:
        weights: the digest of what it ended with.
        kills: how many hit it.
        dead: last lines of the starts that ended with an error before they trained.
    """

    weights: str
    kills: int
    dead: list[str]


def words(library: str, processes: int, job: str, folder: Path) -> list[str]:
    """Return the command of a job."""
    script, *options = JOBS[job]
    command = [str(ROOT / "scripts" / script), str(folder), *options]
    if library == OWN and processes == 1:
        return [sys.executable, "-m", "accel_callbacks.as_accelerate", *command]
    if library == OWN:
        launch = ["launch", "--as_accelerate", "--cpu", f"--num_processes={processes}"]
        return [sys.executable, "-m", "accel_callbacks.cli", *launch, *command]
    if processes == 1:
        return [sys.executable, *command]
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, "-m", *torchrun, *command]


def descendants(pid: int) -> list[int]:
    """Return the ids of a process and of all that it has started, the process first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid]
    for parent in tree:
        tree.extend(parents.get(parent, []))
    return tree


def kill(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started by SIGKILL, and wait until they are gone."""
    tree = descendants(process.pid)
    for pid in tree:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    deadline = time.monotonic() + _SETTLED
    while any(Path(f"/proc/{pid}").exists() for pid in tree) and time.monotonic() < deadline:
        time.sleep(0.01)


def start(library: str, processes: int, job: str, folder: Path) -> subprocess.Popen[str]:
    """Start a job; what it says goes to a file of its folder."""
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            words(library, processes, job, folder), env=ENVIRONMENT, cwd=folder, stdout=said,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip


def has_stayed(weights: Path) -> bool:
    """Return whether a script is done, and does not end, as processes over gloo do now and then."""
    return weights.exists() and time.time() - weights.stat().st_mtime > _SETTLED


def unbroken(library: str, processes: int, job: str, folder: Path) -> tuple[str, int]:
    """Return the weights and the number of steps of a run that nothing disturbs."""
    folder.mkdir(parents=True)
    process, deadline = start(library, processes, job, folder), time.monotonic() + _LIMIT
    while process.poll() is None and not has_stayed(folder / "weights"):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if process.poll() is None:
        kill(process)
    if not (folder / "weights").exists():
        sys.exit(f"{job} on {library}:\n{(folder / 'said').read_text()}")
    return (folder / "weights").read_text(), (folder / "progress").stat().st_size


def survived(
    library: str, processes: int, job: str, folder: Path, steps: int, kills: int, seed: int
) -> Outcome:
    """Kill a run at random moments, and start it again until it is done.

    Where a start dies by itself, the newest checkpoint is removed, as somebody would by hand.
    """
    folder.mkdir(parents=True)
    (folder / "run").mkdir()
    chance, hits = random.Random(seed), 0
    dead: list[str] = []
    progress, weights = folder / "progress", folder / "weights"
    progress.touch()
    while True:
        process, before = start(library, processes, job, folder), progress.stat().st_size
        # The rest of the run has room for the kills that are left.
        more = chance.randint(1, max(1, (steps - 4) // kills)) if hits < kills else 10**9
        pause, deadline = chance.uniform(0.0, 0.2), time.monotonic() + _LIMIT
        while process.poll() is None and progress.stat().st_size < before + more:
            if has_stayed(weights):
                kill(process)
            elif time.monotonic() > deadline:
                kill(process)
                dead.append("it hangs")
            time.sleep(0.002)
        if process.poll() is None:
            time.sleep(pause)
            kill(process)
            hits += 1
        elif weights.exists():
            return Outcome(weights.read_text(), hits, dead)
        elif len(dead) > 2 * kills:
            return Outcome("never ends", hits, dead)
        else:
            dead.append(last_line((folder / "said").read_text()))
            remove_newest(folder / "run")


def last_line(said: str) -> str:
    """Return the error that a script has ended with."""
    pattern = re.compile(r"(?:\[rank\d+\]: ?)?(\w[\w.]*Error.*)")
    errors = [match[1] for match in map(pattern.match, said.splitlines()) if match]
    return (errors[0] if errors else said[-200:])[:160]


def remove_newest(folder: Path) -> None:
    """Remove the folder with the highest number at the end of its name."""
    numbered = [path for path in folder.iterdir() if re.search(r"[-_]\d+$", path.name)]
    if numbered:
        newest = max(numbered, key=lambda path: int(re.split("[-_]", path.name)[-1]))
        shutil.rmtree(newest)


def row(library: str, processes: int, job: str, kills: int, seed: int, base: Path) -> list[str]:
    """Return the cells of a job on a library."""
    folder = base / f"{job}-{library}-{processes}".replace(" ", "_")
    wanted, steps = unbroken(library, processes, job, folder / "unbroken")
    outcome = survived(library, processes, job, folder / "killed", steps, kills, seed)
    ends = "equal" if outcome.weights == wanted else "**other weights**"
    if outcome.weights == "never ends":
        ends = "**never ends**"
    cells = [job, str(processes), library, str(outcome.kills), str(len(outcome.dead)), ends]
    print(" | ".join(cells), *sorted(set(outcome.dead)), sep="\n    ", flush=True)
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", default=[*JOBS], metavar="JOB")
    parser.add_argument("--kills", type=int, default=10, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--library", choices=[OWN, OTHER], action="append", dest="libraries")
    parser.add_argument("--processes", type=int, action="append", help="1 and 2 by default")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    args = parser.parse_args()
    if unknown := [name for name in args.jobs if name not in JOBS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(JOBS)}")
    rows: list[Sequence[str]] = []
    with tempfile.TemporaryDirectory() as base:
        for job in args.jobs:
            for processes in args.processes or (1, 2):
                for library in args.libraries or (OTHER, OWN):
                    rows.append(row(library, processes, job, args.kills, args.seed, Path(base)))
    if args.markdown:
        head = ["script", "processes", "on", "kills", "starts that died", "weights"]
        for cells in (head, ["---"] * len(head), *rows):
            print(f"| {' | '.join(cells)} |")
    return int(any(cells[2] == OWN and cells[-1] != "equal" for cells in rows))


if __name__ == "__main__":
    sys.exit(main())
