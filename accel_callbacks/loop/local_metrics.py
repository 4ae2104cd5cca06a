"""Metrics of an evaluation that each rank has computed of its own share of the data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from accel_callbacks import collectives
from checkpoint_io.warning import warn

__all__ = ["LocalMetrics"]

# A loss of training is rank 0's by custom; a duration, or memory that was used, is each rank's own.
_EVALUATION = re.compile(r"(^|[^a-z])(val|valid|validation|eval|evaluation|test|dev)([^a-z]|$)")
_OWN = re.compile(
    r"(^|[^a-z])((time|seconds?|secs?|s|ms|duration|speed|throughput|bytes|[kmg]i?b)$"
    r"|(memory|mem|rank|device|gpu|cpu)([^a-z]|$))"
)


class LocalMetrics:
    """Compares what the ranks log after their first evaluation, and warns if it differs.

    No rank waits: the values are posted when they are logged, and compared at the next evaluation
    or at the end.
    """

    def __init__(self) -> None:
        self._evaluated, self._evaluations = False, 0
        self._posted: collectives.Posted | None = None

    def end_evaluation(self) -> None:
        """Note that a pass over evaluation data has ended."""
        self._evaluated = True
        self._evaluations += 1

    def note(self, values: Mapping[str, Any]) -> None:
        """Post the first metrics of an evaluation."""
        if not self._evaluated or self._posted is not None:
            return
        metrics = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, (float, torch.Tensor))
            and _EVALUATION.search(name.lower())
            and not _OWN.search(name.lower())
        }
        if metrics:
            # Of this evaluation: rank 0 may have logged an earlier one alone.
            name = f"metrics of evaluation {self._evaluations}"
            self._posted = collectives.Posted(name, json.dumps(metrics))

    def compare(self) -> None:
        """Warn of a metric that differs between the ranks, once all have posted theirs."""
        if self._posted is None or collectives.rank() != 0:
            return
        if (values := self._posted.values()) is None:
            return
        self._evaluated, self._posted = False, None
        first, *others = map(json.loads, values)
        for name, value in first.items():
            for rank, metrics in enumerate(others, start=1):
                if name in metrics and repr(metrics[name]) != repr(value):
                    warn(
                        f"{name} was {value:.6g} on rank 0 and {metrics[name]:.6g} on rank {rank}: "
                        "each computed it of its own share of the data, and rank 0's is logged. "
                        "Compute it of `accel.gather_for_metrics((predictions, targets))`, or "
                        'average it with `accel.reduce(value, "mean")`.'
                    )
                    return
