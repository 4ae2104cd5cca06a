"""Let a process that a stand-in for Accelerate has started stand in too."""

from __future__ import annotations

import os
import sys

__all__ = ["start"]


def start() -> None:
    """Run the ``sitecustomize`` that this one hides, and stand in where the variable says so."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here]
    _run_hidden()
    if os.environ.get("ACCEL_AS_ACCELERATE") != "1":
        return
    import importlib.util

    if importlib.util.find_spec("accel_callbacks") is None:  # the parent found it by its own path
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(here))))
    from accel_callbacks.compat import install

    install()


def _run_hidden() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    start()
