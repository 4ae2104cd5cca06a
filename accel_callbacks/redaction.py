"""Hide secrets in configuration values before they are printed: by name, and inside texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["HIDDEN", "redacted"]

HIDDEN = "(set, not shown)"
_DEEPEST = 20  # levels of nesting that are shown
_ENDS = re.compile(r"(?:key|auth|token|secret|passw(?:or)?d|passphrase|credentials?)\d*$", re.I)
_HOLDS = re.compile(r"secret|passw|credential|private|token(?!iz)|(?:api|access)[_-]?key", re.I)
# Starts only where a word does, and so takes linear time.
_NAME = re.compile(r"(?<![\w.-])([\w.-]+)([\"']?\s*[=:]\s*|\s+)")
_VALUE = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|(?:Bearer|Basic)\s+\S+|\S+', re.I)
_LOGIN = re.compile(r"(?<=://)[^\s/@]*:[^\s/]*@")


def redacted(value: Any, name: str = "") -> Any:
    """Return a value with a placeholder for each secret in it.

    A secret is what has a name such as ``WANDB_API_KEY``, also within a text (``NAME=value``,
    ``--name value``), and the user and password of a URL. None, booleans and what is empty stay.

    Args:
        value: of a setting or variable; mappings and lists may be nested.
        name: of the setting or variable; none by default.

    Example:
        >>> from accel_callbacks.redaction import redacted
        >>> redacted("hf_abc", "HF_TOKEN")
        '(set, not shown)'
        >>> redacted({"env": ["WANDB_API_KEY=abc", "DEBUG=1"], "steps": 3})
        {'env': ['WANDB_API_KEY=(set, not shown)', 'DEBUG=1'], 'steps': 3}
    """
    return _redacted(value, name, _DEEPEST)


def _redacted(value: Any, name: str, levels: int) -> Any:
    """Return a value without secrets; an ellipsis for what is nested too deeply."""
    if value is None or isinstance(value, bool) or (hasattr(value, "__len__") and not len(value)):
        return value
    if _is_secret(name, value):
        return HIDDEN
    if isinstance(value, (Mapping, list, tuple)) and not levels:
        return "..."
    if isinstance(value, Mapping):
        return {key: _redacted(item, str(key), levels - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_redacted(element, flag, levels - 1) for element, flag in _after_flags(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return _without_secrets(value) if isinstance(value, str) else value


def _is_secret(name: str, value: Any) -> bool:
    """Return whether the name suggests a secret; a number such as ``token_count: 3`` is none."""
    if _ENDS.search(name):
        return True
    return not isinstance(value, (int, float)) and _HOLDS.search(name) is not None


def _after_flags(values: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the items, each with the flag before it, as in ``["--token", "abc"]``."""
    flag = ""
    for value in values:
        yield value, flag
        flag = value if isinstance(value, str) and value.startswith("-") else ""


def _without_secrets(text: str) -> str:
    """Return a text with a placeholder for each value that a secret's name precedes."""
    parts, at = [], 0
    while (match := _NAME.search(text, at)) is not None:
        name, mark = match.groups()
        named = not mark.isspace() or name.startswith("-")
        value = _VALUE.match(text, match.end()) if named and _is_secret(name, "") else None
        parts.append(text[at : match.end()])
        at = match.end()
        if value is not None:
            # In `NAME=value` as a whole the value may have blanks.
            whole = match.start() == 0 and mark == "="
            parts.append(HIDDEN)
            at = len(text) if whole else value.end()
    return _LOGIN.sub(f"{HIDDEN}@", "".join([*parts, text[at:]]))
