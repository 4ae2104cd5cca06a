"""States of streams that are another one on each process, apart from those that all share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["stream_problems", "take_own", "with_own"]


def take_own(loaders: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Take out of the states of loaders what is this process's own; a note of it stays.

    Example:
        >>> from accel_callbacks.data.own_state import take_own
        >>> loaders = {"0": {"stream": {"own": {"world": 2}, "position": 4}}, "1": {}}
        >>> take_own(loaders), loaders["0"]
        ({'0': {'own': {'world': 2}, 'position': 4}}, {'stream': {'own': {'world': 2}}})
    """
    streams = {key: state["stream"] for key, state in loaders.items() if "stream" in state}
    own = {key: stream for key, stream in streams.items() if "own" in stream}
    for key, stream in own.items():
        loaders[key]["stream"] = {"own": stream["own"]}
    return own


def with_own(
    loaders: Mapping[str, Mapping[str, Any]], local: Mapping[str, Any] | None, key: str
) -> dict[str, Any]:
    """The state of a loader with this process's own part, if there is one."""
    own = ({} if local is None else local.get("streams", {})).get(key)
    return {**loaders[key], **({} if own is None else {"stream": own})}


def stream_problems(
    prepared: Mapping[str, Any], loaders: Mapping[str, Any], local: Mapping[str, Any] | None
) -> list[str]:
    """Why streams that are continued do not go on exactly.

    Args:
        prepared: the loaders that are there.
        loaders: their saved states.
        local: what this process saved for itself, if it is that process.
    """
    states = {key: with_own(loaders, local, key) for key in prepared}
    problems = {
        key: prepared[key].resume_problem(state)
        for key, state in states.items()
        if state["trained"] and not state["finished"] and state["position"]
    }
    return [problem for problem in problems.values() if problem is not None]
