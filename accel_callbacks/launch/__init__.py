"""Launch processes: settings, config files, the plan, and the launchers that carry it out."""

from __future__ import annotations

__all__: list[str] = []
