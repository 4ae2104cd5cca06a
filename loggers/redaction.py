"""Hide secrets in settings before they are printed or written: by name, and inside texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["HIDDEN", "redacted"]

HIDDEN = "(set, not shown)"
_DEEPEST = 20  # levels of nesting that are shown
_ENDS = re.compile(
    r"(?:key|auth|authorization|token|secret|passw(?:or)?d|passphrase|credentials?"
    r"|cookie|webhook|jwt|(?:amz|goog)-signature)\d*$",
    re.I,
)
_HOLDS = re.compile(
    r"secret|passw|credential|private|webhook|token(?!iz)|(?:api|access)[_-]?key", re.I
)
# Tokens of texts, such as pad_token, are words of a vocabulary.
_WORDS = re.compile(
    r"(?:^|[^a-z])(?:pad|eos|bos|unk|cls|sep|mask|image|audio|video|decoder_start|special)_token$",
    re.I,
)
# Of ``name=value`` alone, and of the query of a URL alone.
_IN_TEXTS = re.compile(r"(?:sig|signature)$", re.I)
_IN_QUERIES = re.compile(r"(?:sig|signature|pwd|code|sas)$", re.I)
_NUMBER = re.compile(r"[-+]?[\d._]+(?:e[-+]?\d+)?[,;)}\]]*$", re.I)
# Starts only where a word does, and so takes linear time.
_NAME = re.compile(r"(?<![\w.-])([\w.-]+)([\"']?\s*[=:]\s*|\s+)")
_PLACE = re.escape(HIDDEN)
_VALUE = re.compile(_PLACE + r'|"(?:[^"\\]|\\.)*"|\'[^\']*\'|(?:Bearer|Basic)\s+\S+|\S+', re.I)
_QUERY_VALUE = re.compile(_PLACE + r"|[^\s&#\"'<>]+")
_HEADER_VALUE = re.compile(_PLACE + r'|"(?:[^"\\]|\\.)*"|[^"\'\n]+')
_AUTHORIZATION = re.compile(r"(?:authorization|cookie)$", re.I)
# A long user without a password is a token.
_LOGIN = re.compile(r"(?:(?<=://)[^\s/@]*:[^\s/]*|(?<=https://)[^\s/@:]{16,})@")
_BEARER = re.compile(r"\b([Bb]earer)\s+(?=\S*\d|\S{20})[\w.~+/=-]{6,}")
# Who knows the address of a webhook may write to it.
_WEBHOOK = re.compile(
    r"(\bhooks\.[\w.-]{1,253}/|/(?:api/)?webhook(?:s|b2)?/|\bapi\.telegram\.org/)"
    rf"(?:{_PLACE}|[^\s\"'<>])+",
    re.I,
)


def redacted(value: Any, name: str = "") -> Any:
    """Return a value with a placeholder for each secret in it.

    A secret is what has a name such as ``WANDB_API_KEY``, also within a text (``NAME=value``,
    ``--name value``, ``?sig=value`` of a URL), the user and password of a URL, the path of a
    webhook, and what follows ``Bearer``. None, booleans and what is empty stay.

    Args:
        value: of a setting or variable; mappings and lists may be nested.
        name: of the setting or variable; none by default.

    Example:
        >>> redacted("hf_abc", "HF_TOKEN")
        '(set, not shown)'
        >>> redacted({"env": ["WANDB_API_KEY=abc", "DEBUG=1"], "steps": 3})
        {'env': ['WANDB_API_KEY=(set, not shown)', 'DEBUG=1'], 'steps': 3}
        >>> redacted("https://store/data.tar?part=3&sig=abc&se=2030")
        'https://store/data.tar?part=3&sig=(set, not shown)&se=2030'
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
    if _WORDS.search(name):
        return False
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
        in_query = mark == "=" and text[match.start() - 1 : match.start()] in ("?", "&", ";")
        named = not mark.isspace() or name.startswith("-")
        # Values of other names are not looked at: that would take quadratic time.
        named = named and (_is_secret(name, "") or _IN_QUERIES.match(name) is not None)
        parts.append(text[at : match.end()])
        at = match.end()
        value = _value_of(name, in_query).match(text, at) if named else None
        if value is not None and _is_secret_text(name, value[0], mark, in_query):
            # In `NAME=value` as a whole the value may have blanks.
            whole = match.start() == 0 and mark == "="
            parts.append(HIDDEN)
            at = len(text) if whole else value.end()
    text = _LOGIN.sub(f"{HIDDEN}@", "".join([*parts, text[at:]]))
    text = _WEBHOOK.sub(lambda place: f"{place[1]}{HIDDEN}", text)
    return _BEARER.sub(lambda place: f"{place[1]} {HIDDEN}", text)


def _is_secret_text(name: str, value: str, mark: str, in_query: bool) -> bool:
    """Return whether a value in a text is a secret."""
    if in_query and _IN_QUERIES.match(name):
        return True
    number = _NUMBER.match(value) is not None
    signature = "=" in mark and _IN_TEXTS.match(name) is not None and not number
    return signature or _is_secret(name, 0 if number else value)


def _value_of(name: str, in_query: bool) -> re.Pattern[str]:
    """Return what matches the value of a secret: to the end of a query's part or of a header."""
    if in_query:
        return _QUERY_VALUE
    return _HEADER_VALUE if _AUTHORIZATION.search(name) else _VALUE
