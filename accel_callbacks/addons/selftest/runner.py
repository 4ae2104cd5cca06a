"""Run checks on all ranks together, with the same outcome of each on every rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from accel_callbacks import collectives
from accel_callbacks.addons.selftest.check import Check, Failed, Lab, Skipped
from accel_callbacks.distributed.abort import group_is_aborted
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.errors import RemoteError

__all__ = ["Outcome", "run_checks"]

_OK, _FAILED, _SKIPPED, _NOT_RUN = "ok", "FAILED", "skipped", "not run"


@dataclass(frozen=True)
class Outcome:
    """Outcome of one check, the same on all ranks.

    Args:
        name: of the check.
        status: ``"ok"``, ``"FAILED"``, ``"skipped"`` or ``"not run"``.
        seconds: time that it took on this rank.
        details: what was measured, or the problems and their ranks.
        advice: what to do; empty if it passed.
    """

    name: str
    status: str
    seconds: float
    details: str
    advice: str = ""

    @property
    def failed(self) -> bool:
        """True if the check failed or could not run."""
        return self.status in (_FAILED, _NOT_RUN)


def run_checks(
    checks: Iterable[Check], lab: Lab, begin: Callable[[Check], None] = lambda check: None
) -> Iterator[Outcome]:
    """Run checks one after the other; all ranks must call this.

    An error on one rank fails the check on all. After an error that aborted the process group the
    remaining checks are not run.

    Args:
        checks: in the order to run them.
        lab: options of the checks.
        begin: called before each check.
    """
    aborted_in = ""
    for check in checks:
        if aborted_in:
            yield Outcome(
                check.name, _NOT_RUN, 0.0, f"the process group was aborted in {aborted_in}"
            )
            continue
        begin(check)
        began = time.perf_counter()
        status, details = _run(check, lab)
        seconds = time.perf_counter() - began
        gc.collect()  # free models here, rather than on one of gloo's threads
        yield Outcome(
            check.name, status, seconds, details, check.advice if status == _FAILED else ""
        )
        if group_is_aborted():
            aborted_in = check.name


def _run(check: Check, lab: Lab) -> tuple[str, str]:
    """Run one check; return its status and details, the same on all ranks."""
    status, text = _OK, ""
    try:
        with shared_failure(f"the check {check.name!r}"):
            try:
                text = check.run(lab)
            except Failed as problem:
                status, text = _FAILED, str(problem)
            except Skipped as reason:
                status, text = _SKIPPED, str(reason)
        return _agree(status, text)
    except Exception as error:  # a broken installation can raise anything
        return _FAILED, _describe(error)


def _agree(status: str, text: str) -> tuple[str, str]:
    """All-gather the status of each rank: failed if one failed, or else skipped if one was."""
    everyone = collectives.all_objects((status, text))
    for kind in (_FAILED, _SKIPPED):
        problems = {rank: details for rank, (how, details) in enumerate(everyone) if how == kind}
        if problems:
            return kind, _by_rank(problems) if kind == _FAILED else next(iter(problems.values()))
    return _OK, everyone[0][1]


def _by_rank(problems: dict[int, str]) -> str:
    """Join the problems, each once, with the ranks that have it."""
    ranks: dict[str, list[str]] = {}
    for rank, problem in problems.items():
        ranks.setdefault(problem, []).append(str(rank))
    shown = [f"rank {', '.join(who)}: {problem}" for problem, who in list(ranks.items())[:3]]
    return "; ".join(shown)


def _describe(error: Exception) -> str:
    """Return the rank on which an error was raised, its type and its text."""
    rank = collectives.rank()
    if isinstance(error, RemoteError):
        lines = [line for line in str(error).splitlines() if line and not line.startswith(" ")]
        return f"rank {error.rank}: {lines[-1][:300]}" if lines else f"rank {error.rank}"
    lines = str(error).splitlines() or [""]
    return f"rank {rank}: {type(error).__name__}: {lines[0][:300]}"
