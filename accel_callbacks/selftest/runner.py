"""Runs checks on all processes together, and gives each the same verdict everywhere."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import group_is_aborted
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.errors import RemoteError
from accel_callbacks.selftest.check import Check, Failed, Lab, Skipped, Stopwatch

__all__ = ["Outcome", "run_checks"]

_OK, _FAILED, _SKIPPED, _NOT_RUN = "ok", "FAILED", "skipped", "not run"


@dataclass(frozen=True)
class Outcome:
    """How one check went, the same on all processes.

    Args:
        name: of the check.
        status: ``"ok"``, ``"FAILED"``, ``"skipped"`` or ``"not run"``.
        seconds: how long it took on this process.
        details: what was seen, or what is wrong and on which ranks.
        advice: what to do; empty if it holds.
    """

    name: str
    status: str
    seconds: float
    details: str
    advice: str = ""

    @property
    def failed(self) -> bool:
        """Whether it shows that something is wrong."""
        return self.status in (_FAILED, _NOT_RUN)


def run_checks(
    checks: Iterable[Check], lab: Lab, begin: Callable[[Check], None] = lambda check: None
) -> Iterator[Outcome]:
    """Run checks one after the other; all processes call this.

    An error on one process is one on all. After an error that broke the processes' connections
    the rest is not run.

    Args:
        checks: in this order.
        lab: what they work with.
        begin: called before each.

    Example:
        >>> from accel_callbacks.selftest.check import Check, Lab
        >>> from accel_callbacks.selftest.runner import run_checks
        >>> check = Check("sums", lambda lab: str(1 + 1), "buy another computer")
        >>> [(one.status, one.details) for one in run_checks([check], Lab())]
        [('ok', '2')]
    """
    broken = ""
    for check in checks:
        if broken:
            yield Outcome(check.name, _NOT_RUN, 0.0, f"the processes parted in {broken}")
            continue
        begin(check)
        watch = Stopwatch()
        status, details = _run(check, lab)
        gc.collect()  # of models that gloo's threads must not free
        yield Outcome(
            check.name, status, watch.seconds, details, check.advice if status == _FAILED else ""
        )
        if group_is_aborted():
            broken = check.name


def _run(check: Check, lab: Lab) -> tuple[str, str]:
    """Run one check here, and hear how it went elsewhere."""
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
    except Exception as error:  # whatever an installation has in store
        return _FAILED, _of_error(error)


def _agree(status: str, text: str) -> tuple[str, str]:
    """Tell all processes of what one found."""
    everyone = collectives.all_objects((status, text))
    for kind in (_FAILED, _SKIPPED):
        found = {rank: told for rank, (how, told) in enumerate(everyone) if how == kind}
        if found:
            return kind, _by_rank(found) if kind == _FAILED else next(iter(found.values()))
    return _OK, everyone[0][1]


def _by_rank(found: dict[int, str]) -> str:
    """Problems with the ranks that have them, each only once."""
    ranks: dict[str, list[str]] = {}
    for rank, problem in found.items():
        ranks.setdefault(problem, []).append(str(rank))
    shown = [f"rank {', '.join(who)}: {problem}" for problem, who in list(ranks.items())[:3]]
    return "; ".join(shown)


def _of_error(error: Exception) -> str:
    """The kind and the text of an error, and the rank where it began."""
    here = collectives.rank()
    if isinstance(error, RemoteError):
        lines = [line for line in str(error).splitlines() if line and not line.startswith(" ")]
        return f"rank {error.rank}: {lines[-1][:300]}" if lines else f"rank {error.rank}"
    lines = str(error).splitlines() or [""]
    return f"rank {here}: {type(error).__name__}: {lines[0][:300]}"
