"""Gradients that DistributedDataParallel still waits for, named before other collectives begin."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_callbacks import collectives
from accel_callbacks.collectives.sharded import class_of
from accel_callbacks.distributed.abort import abort_run
from accel_callbacks.distributed.heartbeat import current_heartbeat, remote_failure
from accel_callbacks.engines.rank_agreement import unused_advice
from accel_callbacks.terminal_text import listed

__all__ = ["Reductions", "explain_unfinished"]

_KEY = "reduction"  # "{_KEY}/{rank}" in the store: number of a check, and what is missing there
_POLLING = 0.01, 0.1  # seconds between two looks at the store: at first, and at most
_LONGEST = 10.0  # seconds that a rank waits for others, which reduce what it has not
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_SHOWN = 3


class Reductions:
    """Refuses a collective of a rank whose models still wait for gradients.

    DistributedDataParallel reduces gradients in a fixed order, and stops at the first that has not
    come. Where ranks use different parameters, as experts that are chosen by the data, one reduces
    what another has not: the next collective of that one would be paired with it.
    """

    def __init__(self) -> None:
        # With the default group that each reduces in; its gradients concern no later one.
        self._models: WeakKeyDictionary[DistributedDataParallel, Any] = WeakKeyDictionary()
        self._checks = 0
        collectives.before_collectives("reductions", WeakMethod(self.check))

    def watch(self, model: DistributedDataParallel) -> None:
        """Check the gradients of a model from now on."""
        self._models[model] = dist.group.WORLD

    def check(self, operation: str) -> None:
        """Compare the missing gradients over the ranks, if this rank has some.

        Ranks that all wait for the same ones, as between the backward passes of two losses, go on.

        Args:
            operation: the collective that is about to begin.

        Raises:
            RuntimeError: another rank has gradients that this one has not.
        """
        for model, group in self._models.items():
            if group is not dist.group.WORLD:
                continue
            try:
                model._check_reducer_finalized()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if _UNFINISHED in str(error):
                    self._compare(operation, model, _find_missing(model, error))

    def _compare(self, operation: str, model: DistributedDataParallel, missing: list[str]) -> None:
        self._checks += 1
        ranks, report = range(collectives.world_size()), json.dumps([self._checks, missing])
        keys = [f"{_KEY}/{rank}" for rank in ranks]
        collectives.store().set(keys[collectives.rank()], report)
        patience = min(_LONGEST, 0.5 * collectives.group_timeout().total_seconds())
        deadline, (pause, longest) = time.monotonic() + patience, _POLLING
        while time.monotonic() < deadline:
            reached = [json.loads(text or "[0]") for text in collectives.store().read(keys)]
            absent = [rank for rank in ranks if reached[rank][0] < self._checks]
            if not absent:
                if all(others == missing for _, others in reached):
                    return
                break
            watch = current_heartbeat()
            if watch is not None and watch.find_gone(absent):  # as the collective reports
                return
            remote_failure.raise_in(operation)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        problem = RuntimeError(f"{operation}: {_describe_unfinished(model, missing)}")
        cause = abort_run(problem, operation)
        raise cause from (None if cause is problem else problem)


def explain_unfinished(model: DistributedDataParallel, error: RuntimeError) -> None:
    """Put the names of the gradients that a model waits for into torch's error, in place."""
    if _UNFINISHED in str(error):
        error.args = (
            f"{_describe_unfinished(model, _find_missing(model, error))}\n\ntorch says: {error}",
        )


def _find_missing(model: DistributedDataParallel, error: RuntimeError) -> list[str]:
    """Return the parameters that an error of torch numbers, all trained ones if it does not."""
    names = getattr(model, "reduced_names", None) or [  # of now, for a wrapper of the script's own
        name
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    ]
    match = _INDICES.search(str(error))
    indices = range(len(names)) if match is None else map(int, match[1].split())
    return [names[index] for index in indices if index < len(names)]


def _describe_unfinished(model: DistributedDataParallel, missing: Sequence[str]) -> str:
    names = listed(map(repr, missing), _SHOWN)
    return (
        f"{names} of {class_of(model.module).__name__} got no gradient in the last backward "
        f"of rank {collectives.rank()}{unused_advice('DistributedDataParallel')}"
    )
