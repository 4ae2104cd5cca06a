"""The lines of marks of a journal: JSON with a checksum."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import xxhash

from accel_callbacks.addons.journal.format import JournalError
from loggers import plain_config
from loggers.redaction import redacted

__all__ = ["mark_problem", "pack_mark", "plain_mark", "unpack_marks"]

_SUM = re.compile(rb',"checksum":"([0-9a-f]{8})"\}$')


def pack_mark(mark: Mapping[str, Any], before: int) -> tuple[bytes, int]:
    """Return the line of a mark, and its checksum.

    Args:
        mark: from :func:`plain_mark`.
        before: the checksum of the line before, 0 for the first.
    """
    text = json.dumps(mark, separators=(",", ":"), allow_nan=False)
    body = text[:-1].encode()
    checksum = xxhash.xxh32_intdigest(body, before)
    return body + b',"checksum":"%08x"}\n' % checksum, checksum


def unpack_marks(data: bytes, path: str) -> tuple[dict[str, Any], ...]:
    """Return the marks of a file, without a last line that a kill has cut.

    A file of an earlier version has no checksums.

    Args:
        data: the file.
        path: of the file, for errors.

    Raises:
        JournalError: a line is damaged.
    """
    *lines, rest = data.split(b"\n")
    summed = any(map(_SUM.search, lines))
    marks, checksum = [], 0
    for number, line in enumerate([*lines, rest], start=1):
        if not line.strip():
            continue
        found = _SUM.search(line)
        body = line if found is None else line[: found.start()]
        if found is not None and xxhash.xxh32_intdigest(body, checksum) == int(found[1], 16):
            checksum, line, problem = int(found[1], 16), body + b"}", ""
        else:
            problem = "its checksum is wrong" if summed or found is not None else ""
        mark, fault = _parse(line)
        if mark is not None and not problem:
            marks.append(mark)
        elif number <= len(lines):  # else a kill has cut it
            raise JournalError(
                f"{path}: line {number} is damaged ({problem or fault}). Restore the file from a "
                "backup."
            )
    return tuple(marks)


def plain_mark(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mark as it is written: without secrets, and with text for numbers JSON has not."""
    mark: dict[str, Any] = _finite(plain_config(facts))
    return {
        name: value if _is_exact(name, value) else redacted(value, name)
        for name, value in mark.items()
    }


def _is_exact(name: str, value: Any) -> bool:
    """Return whether a replay needs a value as it is: an order, or a path on a disk."""
    return name == "layout" or (name == "path" and "://" not in str(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list) else value


def mark_problem(mark: Mapping[str, Any]) -> str:
    """Return why a mark is none, an empty text if it is one."""
    time: Any = mark.get("time")
    step = mark.get("step", 0)
    if not isinstance(mark.get("kind"), str):
        return "it has no 'kind'"
    if type(time) not in (int, float) or not abs(time) < 2**63:  # which NaN is not
        return "it has no 'time'"
    if type(step) is not int or not 0 <= step < 2**63:
        return "its 'step' is no count"
    return ""


def _parse(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return the mark of a line; else None, and what is wrong."""
    try:
        mark = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, str(error)
    if not isinstance(mark, dict):
        return None, "it is no object of JSON"
    problem = mark_problem(mark)
    return (None, problem) if problem else (mark, "")
