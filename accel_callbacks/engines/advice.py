"""Advice for errors of torch that do not say what a script can do about them."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["Advice", "advise"]

#: A regular expression for a text of torch, and the sentence for it with ``{names}`` of facts.
Advice = Mapping[str, str]

_ADVISED = "_accel_advised"  # attribute of an error whose text has its sentence


def advise(error: BaseException, advice: Advice, **facts: str) -> bool:
    """Put the sentence for an error of torch before its text, in place; return whether it has one.

    For an error that somebody else raises: its class and its traceback stay.

    Args:
        error: the error; a second call does not change it.
        advice: the sentences of an engine; the first that fits counts.
        **facts: what the sentences name.
    """
    if hasattr(error, _ADVISED):
        return True
    text = str(error)
    sentence = next((advice[pattern] for pattern in advice if re.search(pattern, text)), None)
    if sentence is None:
        return False
    error.args = (f"{sentence.format(**facts)}\n\ntorch says: {text}",)
    setattr(error, _ADVISED, True)
    return True
