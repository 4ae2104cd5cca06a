"""A check: what it is called, what it shows, what to do where it fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from accel_callbacks.accelerator import Accelerator
from accel_callbacks.config import AcceleratorConfig, resolve_config

__all__ = ["Check", "Expectations", "Failed", "Lab", "Skipped"]


class Failed(Exception):
    """What a check found wrong; raised after its last collective."""


class Skipped(Exception):
    """Why a check has nothing to look at here."""


@dataclass(frozen=True)
class Lab:
    """What checks work with.

    Args:
        patience: seconds that a collective waits for the other processes.
        folder: path or URL for checkpoints, which all processes see; None where there is none.
    """

    patience: float = 60.0
    folder: str | None = None

    def accelerator(self, **options: Any) -> Accelerator:
        """Make an Accelerator in fp32 with no accumulation, unless ``options`` say otherwise."""
        defaults = {"mixed_precision": "no", "gradient_accumulation_steps": 1}
        timeout = timedelta(seconds=self.patience)
        return Accelerator(**{**defaults, "timeout": timeout, **options})

    @property
    def config(self) -> AcceleratorConfig:
        """What was configured, whether or not this machine can do it."""
        return resolve_config({}, os.environ)

    def configured(self) -> Accelerator:
        """Make an Accelerator with what was configured."""
        return Accelerator(timeout=timedelta(seconds=self.patience))


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Args:
        name: one or two words.
        run: does it; returns what was seen, raises :class:`Failed` or :class:`Skipped`.
        advice: what to do where it fails.
    """

    name: str
    run: Callable[[Lab], str]
    advice: str


@dataclass
class Expectations:
    """Collects what is wrong, so that all processes come to the end of a check together."""

    problems: list[str] = field(default_factory=list)

    def that(self, holds: bool, problem: str) -> None:
        """Note a problem."""
        if not holds:
            self.problems.append(problem)

    def equal(self, name: str, got: Any, wanted: Any) -> None:
        """Compare values, bit by bit."""
        alike = got == wanted
        if isinstance(got, torch.Tensor):
            wanted = torch.as_tensor(wanted, dtype=got.dtype, device=got.device)
            alike = got.shape == wanted.shape and torch.equal(got, wanted)
        self.that(bool(alike), f"{name} gave {_short(got)} in place of {_short(wanted)}")

    def close(self, name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
        """Compare values up to rounding."""
        difference = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
        self.that(difference <= tolerance, f"{name} differ by {difference:.2g} of their size")

    def done(self) -> None:
        """Fail if something was wrong."""
        if self.problems:
            raise Failed("; ".join(self.problems[:3]))


def _short(value: Any) -> str:
    """A value in a few words."""
    plain = value.flatten()[:4].tolist() if isinstance(value, torch.Tensor) else value
    text = repr(plain)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How many."""
        return time.perf_counter() - self._begin
