"""The program that the processes of a launch run."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from accel_callbacks.launch import worker

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """The program of each process: a ``script``, ``module`` or ``program`` (other than Python)."""

    kind: str
    name: str
    arguments: tuple[str, ...]

    def command(self, as_accelerate: bool = False) -> list[str]:
        """Return the command that runs the program directly, or on the stand-in for Accelerate."""
        if self.kind == "program":  # its Python processes stand in by their environment
            return [self.name, *self.arguments]
        runner = ["-m", "accel_callbacks.as_accelerate"] if as_accelerate else []
        module = ["-m"] if self.kind == "module" else []
        return [sys.executable, "-u", *runner, *module, self.name, *self.arguments]

    def reporting_command(self) -> list[str]:
        """Return the command that runs the program and reports errors with their rank."""
        if self.kind == "program":
            return self.command()
        return [sys.executable, "-u", worker.__file__, self.kind, self.name, *self.arguments]
