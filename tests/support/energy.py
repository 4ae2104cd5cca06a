"""A stand-in for codecarbon that reads one kWh when it starts, and one more when it stops."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest


class BaseOutput:
    """What codecarbon's handlers derive from."""

    def out(self, total: Any, delta: Any) -> None: ...
    def live_out(self, total: Any, delta: Any) -> None: ...


def modules(stop: Callable[[], None] = lambda: None) -> tuple[dict[str, Any], list[Any]]:
    """Return the modules of the stand-in, and the list of the trackers that will be made."""
    trackers: list[Any] = []

    class OfflineEmissionsTracker:
        def __init__(self, **options: Any) -> None:
            self.options, self.stopped, self.kwh = options, 0, 0.0
            trackers.append(self)

        def start(self) -> None:
            self._read("live_out")

        def stop(self) -> None:
            stop()
            self.stopped += 1
            self._read("out")

        def _read(self, method: str) -> None:
            self.kwh += 1.0
            total = types.SimpleNamespace(energy_consumed=self.kwh, emissions=self.kwh / 2)
            for handler in self.options["output_handlers"]:
                getattr(handler, method)(total, total)

    package, output = types.ModuleType("codecarbon"), types.ModuleType("codecarbon.output")
    vars(package)["OfflineEmissionsTracker"] = OfflineEmissionsTracker
    vars(output)["BaseOutput"] = BaseOutput
    return {"codecarbon": package, "codecarbon.output": output}, trackers


def stand_in(monkeypatch: pytest.MonkeyPatch, stop: Callable[[], None] = lambda: None) -> list[Any]:
    """Import the stand-in in place of codecarbon; returns the trackers that are made."""
    stand_ins, trackers = modules(stop)
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    return trackers
