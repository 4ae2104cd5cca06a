"""The ``accel`` command: one file per subcommand, listed in `registry.COMMANDS`."""

from __future__ import annotations

__all__: list[str] = []
