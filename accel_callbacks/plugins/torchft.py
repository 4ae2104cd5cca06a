"""Options of training on replicas that come and go."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from accel_callbacks.plugins.base import KwargsHandler

__all__ = ["TorchFTKwargs"]


@dataclass(frozen=True)
class TorchFTKwargs(KwargsHandler):
    """Train on replicas that may be lost and come back, with a lighthouse of torchft.

    Each replica is a launch of its own with one process. What is not given is read from the
    variables that torchft's own examples use.

    Args:
        lighthouse: its host and port; else ``TORCHFT_LIGHTHOUSE``.
        replicas: number of replicas that must be there for a new training to begin; else
            ``NUM_REPLICA_GROUPS``.
        min_replicas: number without which training waits later on.
        replica: name of this one, by which they are ordered; else ``REPLICA_GROUP_ID``, else the
            name of the machine.
        address: of this machine, at which the other replicas reach it.
        token: a secret that all replicas share, needed where ``address`` is no loopback address;
            else ``ACCEL_REPLICA_TOKEN``.
        timeout: seconds that a replica is waited for in the middle of a window, or for its state.
        wait: seconds that the lighthouse, or enough replicas, are waited for.

    Raises:
        ValueError: there is no lighthouse, or a number is out of its range.

    Example:
        >>> from accel_callbacks import TorchFTKwargs
        >>> TorchFTKwargs(lighthouse="127.0.0.1:29510", replicas=3).min_replicas
        1
    """

    role: ClassVar[str] = "replicas that come and go"
    strategy: ClassVar[str] = "TorchFT"

    lighthouse: str | None = None
    replicas: int | None = None
    min_replicas: int = 1
    replica: str | None = None
    address: str = "127.0.0.1"
    token: str | None = None
    timeout: float = 60.0
    wait: float = 1800.0

    def __post_init__(self) -> None:
        read = {
            "lighthouse": "TORCHFT_LIGHTHOUSE",
            "replica": "REPLICA_GROUP_ID",
            "token": "ACCEL_REPLICA_TOKEN",
        }
        for option, variable in read.items():
            if getattr(self, option) is None:
                object.__setattr__(self, option, os.environ.get(variable))
        if self.replicas is None:
            text = os.environ.get("NUM_REPLICA_GROUPS", "1")
            if not text.isdigit():
                raise ValueError(f"NUM_REPLICA_GROUPS={text!r} is no number of replicas.")
            object.__setattr__(self, "replicas", int(text))
        if not self.lighthouse:
            raise ValueError(
                "TorchFTKwargs needs a lighthouse: start one with `torchft_lighthouse "
                "--min_replicas 1 --bind 127.0.0.1:29510`, and give its host and port as "
                "lighthouse= or in TORCHFT_LIGHTHOUSE."
            )
        for option in ("replicas", "min_replicas", "timeout", "wait"):
            if getattr(self, option) <= 0:
                raise ValueError(f"{option}={getattr(self, option)!r} must be above 0.")
