"""What a process of a replay is to do, as `accel replay` tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel_callbacks.addons.journal import REPLAY

__all__ = ["ReplayRequest"]


@dataclass(frozen=True)
class ReplayRequest:
    """The request of a replay.

    Args:
        folder: scratch folder in place of the project's.
        step: the optimizer step after which the processes end.
        checkpoint: where they begin; from the start of the run if None.
        dump: folder for activations and gradients of the step; none if None.
        modules: glob pattern for the names of modules whose outputs are dumped.
        stop: open the debugger in the step.
        rollbacks: the checkpoints that the run went back to, by the number of its steps then.
        commands: marks of what `accel ctl` had changed, in order.

    Example:
        >>> from accel_callbacks.addons.journal.replay_request import ReplayRequest
        >>> ReplayRequest.requested({}) is None
        True
    """

    folder: str
    step: int
    checkpoint: str | None = None
    dump: str | None = None
    modules: str = "*"
    stop: bool = False
    rollbacks: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def requested(cls, environment: Mapping[str, str]) -> ReplayRequest | None:
        """Return the request for this process, None outside of a replay."""
        path = environment.get(REPLAY)
        return None if path is None else cls(**json.loads(Path(path).read_text("utf-8")))

    def write(self, path: Path) -> None:
        """Write the request into a file."""
        path.write_text(json.dumps(asdict(self)), "utf-8")
