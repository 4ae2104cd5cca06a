"""The inputs of a model's first training steps, compared between the ranks."""

from __future__ import annotations

import zlib
from typing import Any

from accel_callbacks import collectives
from accel_callbacks.data.stream_checks import checksum

__all__ = ["InputChecksums"]

_STEPS = 2


class InputChecksums:
    """A checksum of what a model is called with in each of its first training steps.

    Equal inputs are compared, and not the random generators: noise on weights and layers left out
    by chance are right only if all ranks draw the same.

    Args:
        name: of the model's class.
        data_rank: rank among those that read different data.

    Attributes:
        differ: the ranks had different inputs.
    """

    def __init__(self, name: str, data_rank: int) -> None:
        self._name = name
        self._data_rank = data_rank
        self._current: int | None = None
        self._steps: list[int] = []
        self._posted: collectives.Posted | None = None
        self.differ = False

    def note(self, inputs: Any) -> None:
        """Add the inputs of one forward to those of the step."""
        leaves = checksum(inputs) if len(self._steps) < _STEPS else 0
        if leaves:
            self._current = zlib.crc32(leaves.to_bytes(4, "little"), self._current or 0)

    def end_step(self) -> bool:
        """End a step; return whether all data ranks had the same inputs, and others each step."""
        if self._posted is not None:
            posted, self._posted = self._posted.values(), None
            sums = dict(value.split(":") for value in posted or [])  # by data rank
            self.differ = len(set(sums.values())) > 1
            return len(sums) > 1 and not self.differ
        if self._current is not None:
            self._steps.append(self._current)
            self._current = None
            # Inputs that stay the same, such as a whole small dataset, are meant.
            if len(set(self._steps)) == _STEPS:
                steps = ",".join(map(str, self._steps))
                self._posted = collectives.Posted(
                    f"inputs of {self._name}", f"{self._data_rank}:{steps}"
                )
        return False
