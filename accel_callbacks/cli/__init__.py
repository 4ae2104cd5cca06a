"""The ``accel`` command: one file a subcommand, named in `registry.COMMANDS`."""

from __future__ import annotations

__all__: list[str] = []
