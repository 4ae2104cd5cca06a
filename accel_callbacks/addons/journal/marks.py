"""The lines of marks of a journal: JSON with a checksum, and fields of known types."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from accel_callbacks.addons.journal.format import JournalError
from loggers import plain_config
from loggers.redaction import redacted

__all__ = ["mark_problem", "pack_mark", "plain_mark", "unpack_marks"]

_SUM = re.compile(rb',"checksum":"([0-9a-f]{8})"\}$')
_MOST_SAMPLES = 1 << 40  # of a dataset
_DEEPEST = 60  # levels of lists and objects in a mark, of which the writer has fewer


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63  # which NaN is not


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_layout(value: Any) -> bool:
    """Return whether a layout of a pass has no numbers that would be drawn for ever."""
    if not isinstance(value, dict) or not isinstance(value.get("source"), str):
        return False
    sampler = value.get("sampler", {})
    sizes = [value.get(name) for name in ("world_size", "batch_size", "position")]
    sizes += [sampler.get(name) for name in ("length", "samples")] if _is_mapping(sampler) else [-1]
    return all(size is None or (_is_count(size) and size < _MOST_SAMPLES) for size in sizes)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_Fields = Mapping[str, Callable[[Any], bool]]

#: Fields that marks of any kind may have; those with a star must be there.
_OF_ALL: _Fields = {"kind*": _is_text, "time*": _is_number, "step": _is_count}
#: Those of the marks that readers look into.
_OF_KINDS: Mapping[str, _Fields] = {
    "start": {
        **dict.fromkeys(("name", "run_id", "resumed_from", "cwd"), _is_text),
        **dict.fromkeys(("config", "environment", "versions", "git"), _is_mapping),
        **dict.fromkeys(("numerics", "hardware", "script"), _is_mapping),
        **dict.fromkeys(("argv", "command"), _is_texts),
        **{"process_began": _is_number, "world_size": _is_count, "in_window": _is_flag},
    },
    "end": {
        **{"step*": _is_count, "status*": _is_text, "error": _is_text},
        **dict.fromkeys(("data_s", "save_s", "evaluation_s"), _is_number),
    },
    "compile": {"seconds*": _is_number},
    "energy": {"kwh*": _is_number, "co2_kg": _is_number},
    "pass": {"epoch*": _is_count, "layout*": _is_layout},
    "batch": {"step*": _is_count, "content*": _is_text},
    "save": {"path*": _is_text},
    "rollback": {"step*": _is_count, "path": _is_text},
    "unguarded": {"folder*": _is_text, "problem*": _is_text},
    "control": {"number": _is_count, "action": _is_text, "command": _is_text},
    "commands": {"number*": _is_count},
}


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
    """Return why a mark is none of its kind, an empty text if it is one."""
    fields = {**_OF_ALL, **_OF_KINDS.get(str(mark.get("kind")), {})}
    for name, fits in fields.items():
        value = mark.get(name.rstrip("*"))
        if value is None and name.endswith("*"):
            return f"it has no {name[:-1]!r}"
        if value is not None and not fits(value):
            expected = fits.__name__.removeprefix("_is_")
            return f"its {name.rstrip('*')!r} is no {expected}"
    if not _is_shallow(mark, _DEEPEST):
        return "it is nested too deeply, or has a number that is too large"
    return ""


def _parse(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return the mark of a line; else None, and what is wrong."""
    try:
        mark = json.loads(line, object_pairs_hook=_object, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return None, "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    if not isinstance(mark, dict):
        return None, "it is no object of JSON"
    problem = mark_problem(mark)
    return (None, problem) if problem else (mark, "")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; one that has a name twice says two things."""
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("a name is there twice")
    return named


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _is_shallow(value: Any, levels: int) -> bool:
    """Return whether a value has few levels, and no number that is not finite."""
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_is_shallow(part, levels - 1) for part in inner)
    return not isinstance(value, float) or math.isfinite(value)
