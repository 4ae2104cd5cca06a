"""Ranks that hang, die or leave at any place of a script: all others end, and say which it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.bound import OUTLASTING, patience
from tests.support.loss import loss_of
from tests.support.ports import free_port

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "support" / "struck.py"

PLACES = [
    "join",
    "joined",
    "forward",
    "backward",
    "step",
    "save, before the write",
    "save, in the write",
    "save, after the write",
    "background save",
    "load",
    "evaluate",
    "gather",
    "main_process_first",
    "end_training",
]
FAULTS = ["stop", "kill", "exit", "vanish", "raise"]
#: What the other ranks say, at the least.
SENTENCES = {
    "stop": r"{silent}; last seen at struck.py:\d+ in \w+.*; "
    r"this rank was at struck.py:\d+ in \w+, in ",
    "kill": r"{killed}; last seen at struck.py:\d+ in \w+",
    "exit": r"rank {rank}( exited with code 0| has ended|( failed in .*|: )SystemExit: 0)",
    "vanish": r"rank {rank} (exited with code 0|ended without a word)",
    "block": r"rank {rank} has been in one call of a save for \d+ s \(its storage hangs\?\)",
    "raise": r"rank {rank}( failed in .*| (has ended|exited with code 1) with |: )"
    r"ValueError: struck",
}


@dataclass(frozen=True)
class Case:
    """One rank of some that is struck at a place."""

    place: str
    fault: str
    rank: int = 1
    world: int = 2
    run: str = "run"
    timeout: float = 10.0  # a rank that lives tells so ten times in it, on a busy machine too

    def __str__(self) -> str:
        return f"{self.fault} of rank {self.rank} of {self.world} in {self.place}, {self.run}"


class Struck:
    """The processes of a case, their ends and what they printed."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        port = free_port()
        timeout = patience(case.timeout)
        self.processes = [self._start(rank, port, timeout) for rank in range(case.world)]

    def _start(self, rank: int, port: int, timeout: float) -> warm.Popen:
        case = self.case
        words = [case.place, case.fault, str(case.rank), str(self.folder), str(timeout)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "WORLD_SIZE": str(case.world),
            "LOCAL_WORLD_SIZE": str(case.world),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{rank}.txt").open("wb") as out:
            return warm.Popen(
                [sys.executable, str(SCRIPT), *words, case.run],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ends_alone(self) -> bool:
        """False if the struck rank itself never ends; one whose loader worker hangs does."""
        return self.case.fault not in ("stop", "block") or self.case.place == "loader worker"

    def poll(self) -> bool:
        """Return whether all have ended, except a rank that was stopped."""
        codes = [process.poll() for process in self.processes]
        return all(
            code is not None
            for rank, code in enumerate(codes)
            if rank != self.case.rank or self.ends_alone
        )

    def text(self, rank: int) -> str:
        return (self.folder / f"{rank}.txt").read_text(errors="replace")

    def kill(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its loader workers too
            process.wait()


@contextmanager
def started(cases: list[Case], folder: Path) -> Iterator[list[Struck]]:
    found: list[Struck] = []
    try:
        for number, case in enumerate(cases):
            (folder / str(number)).mkdir()
            found.append(Struck(case, folder / str(number)))
        yield found
    finally:
        for one in found:
            one.kill()


def strike(cases: list[Case], folder: Path) -> list[Struck]:
    """Run cases side by side, until all ranks but the struck ones have ended."""
    with started(cases, folder) as found:
        try:
            while not all(one.poll() for one in found):
                time.sleep(0.05)
        except BaseException:  # the limit of the test
            for one in found:
                if not one.poll():
                    print(f"{one.case}: has not ended", *map(one.text, range(one.case.world)))
            raise
        return found


def check(struck: Struck) -> None:
    """Check the exit codes and the sentences of all ranks that were not struck."""
    case = struck.case
    happened = (struck.folder / "struck").exists()
    assert happened, f"{case}: nothing happened\n{struck.text(case.rank)}"
    if case.fault == "delay":
        codes = [process.returncode for process in struck.processes]
        assert not any(codes), f"{case}: {codes}\n{struck.text(0)}\n{struck.text(1)}"
        assert "has not answered" not in struck.text(0) + struck.text(1), case
        return
    if case.place == "loader worker":
        check_worker(struck)
        return
    for rank in range(case.world):
        if rank == case.rank:
            continue
        text = struck.text(rank)
        told = f"{case}: rank {rank}, exit code {struck.processes[rank].returncode}\n{text}"
        assert struck.processes[rank].returncode not in (None, 0), told
        silent, killed = loss_of(case.rank), loss_of(case.rank, "SIGKILL")
        sentence = SENTENCES[case.fault].format(rank=case.rank, silent=silent, killed=killed)
        if case.place == "start":  # before its first heartbeat
            sentence = silent
        # The reason of rank 0 goes with its store, where no collective waits for it.
        if case.place in ("join", "end_training") and case.rank == 0:
            sentence += "|rank 0 exited with code 1"
        # A busy machine: one rank has not connected yet, or rank 0 is the first to give up.
        if case.place == "join":
            sentence += f"|{loss_of(0)}|rank 0 has ended"
        assert re.search(sentence, text, re.DOTALL), told


def check_worker(struck: Struck) -> None:
    """Check a rank whose loader worker hangs: it lives, so the others can tell only where it is."""
    assert all(process.returncode for process in struck.processes), struck.case
    assert "all ranks live, but one did not come within the timeout" in struck.text(0)
    assert "rank 1 was last seen at struck.py" in struck.text(0)
    waited = r"rank 1 has waited \d+ s for a batch .* \(stopped: process \d+\), and ends them"
    assert re.search(waited, struck.text(1)), struck.text(1)
    assert re.search(r"(Remote|LostRank)Error: ", struck.text(1)), struck.text(1)


# Some cases of the next test; delays and blocks are tried here alone.
SHORT = [
    Case("start", "stop", rank=0),
    Case("start", "stop", rank=1),
    Case("join", "stop", rank=0),
    Case("join", "raise"),
    Case("joined", "stop", rank=0),
    Case("joined", "stop", rank=1),
    Case("end_training", "stop", rank=0),
    Case("end_training", "vanish"),
    Case("end_training", "vanish", rank=0, run="plain"),
    Case("loader worker", "stop"),
    Case("backward", "stop"),
    Case("save, after the write", "stop", rank=0),
    Case("save, in the write", "kill"),
    Case("main_process_first", "kill", rank=0),
    Case("gather", "vanish"),
    Case("step", "stop", run="plain"),
    # Ranks compare what they do in the first step, and wait in no collective then.
    Case("first forward", "kill", run="sharded"),
    Case("save, in the write", "delay"),
    Case("background save", "delay", rank=0),
    Case("save, in the write", "block"),
    Case("background save", "block"),
]


@pytest.mark.first
def test_all_others_end_and_say_which_rank_was_struck_and_where(tmp_path):
    for struck in strike(SHORT, tmp_path):
        check(struck)


def test_a_rank_lost_at_the_end_of_a_save_is_not_taken_for_a_failed_save(tmp_path):
    # Rank 2 exchanges nothing with rank 0 there: it waits for those that do, and might until the
    # timeout, which is longer than this test may take.
    timeout = OUTLASTING.total_seconds()
    case = Case("end of a save", "kill", rank=0, world=4, run="warned", timeout=timeout)
    (struck,) = strike([case], tmp_path)
    check(struck)


def each_place(fault: str) -> list[Case]:
    """The first rank and the last one at each place, where worlds and kinds of loops take turns."""
    cases = []
    for turn, place in enumerate(PLACES, start=FAULTS.index(fault)):
        worlds = (3, 2) if turn % 2 else (2, 3)
        runs = ("plain", "run") if turn // 2 % 2 else ("run", "plain")
        for rank, world, run in zip((0, worlds[1] - 1), worlds, runs, strict=True):
            cases.append(Case(place, fault, rank, world, run, timeout=12.0))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_all_others_end_at_each_place(tmp_path, fault):
    cases = each_place(fault)
    for begin in range(0, len(cases), 6):
        folder = tmp_path / str(begin)
        folder.mkdir()
        for struck in strike(cases[begin : begin + 6], folder):
            check(struck)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_all_others_end_where_a_tracker_does_not_start(tmp_path, fault):
    case = Case("tracker start", fault, rank=0, timeout=12.0)
    (struck,) = strike([case], tmp_path)
    if fault in ("exit", "raise"):  # an error of a tracker costs the tracker, not the run
        assert [process.returncode for process in struck.processes] == [0, 0]
    else:
        check(struck)
