"""Start `exiting.py` in each of its ways on two processes, and find what is wrong with the end.

``python -m tests.support.exits --times 200`` repeats all of them; names choose some.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.bound import BOUND
from tests.support.ports import free_port

__all__ = ["EXITS", "Exit", "faults_of"]

_PROGRAM = str(Path(__file__).with_name("exiting.py"))
_LIMIT = BOUND.total_seconds()  # each takes about one second
# What no end may print: an abort, an error of a destructor, C++ frames and warnings of torch.
_UNWANTED = re.compile(
    r"terminate called|Fatal Python error|Segmentation fault|Aborted|Exception ignored|"
    r"frame #\d|^\[[WE]\d|leaked|was not called|InterpreterError",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Exit:
    """One way to end.

    Args:
        place: where the training runs.
        ending: how it ends.
        who: the rank that ends it, or ``both``.
        opened: what is open meanwhile.
        codes: the exit code of each process; of a launcher only its own.
        launcher: start it with ``accel launch``.
        silent: nothing may be printed.
    """

    place: str
    ending: str = "last line"
    who: str = "both"
    opened: str = ""
    codes: tuple[int, ...] = (0, 0)
    launcher: bool = False
    silent: bool = False

    @property
    def name(self) -> str:
        """Its name in tests and on the command line."""
        who = "" if self.who == "both" else f"rank {self.who}"
        how = "launched" if self.launcher else ""
        return ", ".join(filter(None, (self.place, self.ending, who, self.opened, how)))


EXITS = {
    one.name: one
    for one in (
        Exit("loop", silent=True),
        Exit("loop", opened="save", silent=True),
        Exit("loop", opened="tracker,workers,cycle", silent=True),
        Exit("loop", opened="tracker,workers,save,uncollected,cycle", silent=True),
        Exit("loop", "destroy", silent=True),
        Exit("loop", launcher=True, codes=(0,), silent=True),
        Exit("run", opened="save,tracker,workers", silent=True),
        Exit("loop", "raise", codes=(1, 1)),
        Exit("loop", "raise", "0", codes=(1, 1)),
        Exit("loop", "raise", "1", "save,tracker,workers", codes=(1, 1)),
        Exit("run", "raise", codes=(1, 1)),
        Exit("run", "raise", "0", "tracker,workers", codes=(1, 1)),
        Exit("run", "raise", "1", "save", codes=(1, 1)),
        Exit("loop", "raise", "1", launcher=True, codes=(1,)),
        Exit("thread", silent=True),
        Exit("thread", opened="save,tracker,workers", silent=True),
        Exit("thread", "raise", "0"),
        Exit("thread", "raise", "1", "save,workers"),
        Exit("daemon", silent=True),
        Exit("daemon", "stay"),  # the rank that ends later may report that the other has ended
        Exit("daemon", "stay", opened="tracker,workers"),
        Exit("daemon", "raise", "1"),
        Exit("loop", "exit 0", silent=True),
        Exit("loop", "exit 3", opened="save,tracker,workers", codes=(3, 3), silent=True),
        Exit("loop", "exit 0", "0", codes=(0, 1)),
        Exit("loop", "exit 3", "1", "workers", codes=(1, 3)),
        Exit("run", "exit 0", opened="tracker", silent=True),
        Exit("run", "exit 3", codes=(3, 3), silent=True),
        Exit("run", "exit 3", "0", "save,workers", codes=(3, 1)),
        Exit("run", "exit 0", "1", codes=(1, 0)),
        Exit("loop", "exit 3", launcher=True, codes=(3,)),
        Exit("loop", "exit 3", "1", launcher=True, codes=(3,)),
        Exit("notebook", codes=(0,), silent=True),
        Exit("notebook", opened="save,tracker,workers", codes=(0,), silent=True),
        Exit("notebook", "raise", "1", codes=(1,)),
        Exit("notebook", "exit 3", "0", codes=(1,)),
        Exit("notebook", "exit 0", "both", "workers", codes=(0,), silent=True),
        Exit("debug", codes=(0,), silent=True),
        Exit("debug", "raise", "0", codes=(1,)),
    )
}


def faults_of(way: Exit, *, fresh: bool = False) -> list[str]:
    """End the program in one way; return what was wrong, nothing if all was well.

    Args:
        way: how to end.
        fresh: in Pythons that are not forked.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [_PROGRAM, way.place, way.ending, way.who, way.opened, folder]
        if way.launcher:
            launch = ["-m", "accel_callbacks.cli", "launch", "--num_processes", "2", "--cpu"]
            starts = [([*launch, *words], {})]
        elif len(way.codes) == 1:
            starts = [(words, {})]
        else:
            starts = [(words, variables) for variables in _two_ranks()]
        ends = _run(starts, fresh)
    faults = []
    for rank, ((code, text), expected) in enumerate(zip(ends, way.codes, strict=True)):
        if code != expected:
            faults.append(f"process {rank} ended with {code}, not {expected}:\n{text}")
        elif found := _UNWANTED.search(text):
            faults.append(f"process {rank} printed {found[0]!r}:\n{text}")
        elif way.silent and text:
            faults.append(f"process {rank} printed:\n{text}")
    return faults


def _two_ranks() -> list[dict[str, str]]:
    port = str(free_port())
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [{**address, **world, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def _run(starts: list[tuple[list[str], dict[str, str]]], fresh: bool) -> list[tuple[Any, str]]:
    """Run Pythons side by side; return the exit code and errors of each, None if it hangs."""
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    common = {**os.environ, "OMP_NUM_THREADS": "1"}
    start: Any = subprocess.Popen
    if not fresh:
        start = warm.Popen
        options.update(warm_children=True, destructors=True)
    processes = [
        start([sys.executable, *words], env={**common, **variables}, text=True, **options)
        for words, variables in starts
    ]
    deadline, ends = time.monotonic() + _LIMIT, list[tuple[Any, str]]()
    try:
        for process in processes:
            try:
                text = process.communicate(timeout=max(deadline - time.monotonic(), 1))[1]
                ends.append((process.returncode, text))
            except subprocess.TimeoutExpired:
                process.kill()
                ends.append((None, process.communicate()[1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ends


def main() -> int:
    """Repeat, and print the counts; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {'; '.join(EXITS)}")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--side_by_side", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="start each Python anew")
    options = parser.parse_args()
    chosen = [EXITS[name] for name in options.names or EXITS]
    wrong: Counter[str] = Counter()
    for way in chosen:
        began = time.monotonic()
        with ThreadPoolExecutor(options.side_by_side) as threads:
            ends = threads.map(partial(faults_of, fresh=options.fresh), [way] * options.times)
            for faults in ends:
                wrong[way.name] += bool(faults)
                if faults:
                    print(*faults, sep="\n", file=sys.stderr, flush=True)
        good = options.times - wrong[way.name]
        took = (time.monotonic() - began) / options.times
        print(f"{good} of {options.times}: {way.name} ({took:.2f} s each)", flush=True)
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
