"""A check, its tools, and the exceptions by which it fails or is skipped."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from accel_callbacks.accelerator import Accelerator
from accel_callbacks.options import AcceleratorConfig, resolve_config

__all__ = ["Check", "Expectations", "Failed", "Lab", "Skipped"]


class Failed(Exception):
    """Raised by a check that fails, after its last collective."""


class Skipped(Exception):
    """Raised by a check that does not apply here; the text is the reason."""


@dataclass(frozen=True)
class Lab:
    """Options of the checks.

    Args:
        patience: timeout of collectives in seconds.
        folder: path or URL for checkpoints that all ranks can access; None if there is none.
    """

    patience: float = 60.0
    folder: str | None = None

    def accelerator(self, **options: Any) -> Accelerator:
        """Create an Accelerator, by default in fp32 and without accumulation."""
        defaults = {"mixed_precision": "no", "gradient_accumulation_steps": 1}
        timeout = timedelta(seconds=self.patience)
        return Accelerator(**{**defaults, "timeout": timeout, **options})

    @property
    def config(self) -> AcceleratorConfig:
        """Configuration as given, whether or not this machine supports it."""
        return resolve_config({}, os.environ)

    def configured(self) -> Accelerator:
        """Create an Accelerator with the given configuration."""
        return Accelerator(timeout=timedelta(seconds=self.patience))


@dataclass(frozen=True)
class Check:
    """A check, which is one line of the table.

    Args:
        name: one or two words.
        run: performs the check; returns details, or raises :class:`Failed` or :class:`Skipped`.
        advice: what to do if it fails.
    """

    name: str
    run: Callable[[Lab], str]
    advice: str


@dataclass
class Expectations:
    """Collect problems, so that all ranks reach the end of a check instead of leaving early."""

    problems: list[str] = field(default_factory=list)

    def that(self, holds: bool, problem: str) -> None:
        """Add a problem if a condition does not hold."""
        if not holds:
            self.problems.append(problem)

    def equal(self, name: str, got: Any, wanted: Any) -> None:
        """Add a problem if values differ in any bit."""
        equal = got == wanted
        if isinstance(got, torch.Tensor):
            wanted = torch.as_tensor(wanted, dtype=got.dtype, device=got.device)
            equal = got.shape == wanted.shape and torch.equal(got, wanted)
        self.that(bool(equal), f"{name} gave {_short(got)} in place of {_short(wanted)}")

    def close(self, name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
        """Add a problem if values differ by more than rounding."""
        difference = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
        self.that(difference <= tolerance, f"{name} differ by {difference:.2g} of their size")

    def done(self) -> None:
        """Raise Failed if there are problems."""
        if self.problems:
            raise Failed("; ".join(self.problems[:3]))


def _short(value: Any) -> str:
    """Format a value briefly."""
    plain = value.flatten()[:4].tolist() if isinstance(value, torch.Tensor) else value
    text = repr(plain)
    return text if len(text) <= 60 else f"{text[:57]}..."
