"""What a launch is made of: its settings, where they come from, and this machine."""

from __future__ import annotations

__all__: list[str] = []
