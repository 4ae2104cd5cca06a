"""Strict JSON: no NaN literals, no duplicate keys, a limit on size."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError

# Enforced by readers, so writers enforce it too.
MAX_JSON_BYTES = 512 * 1024 * 1024


def dumps(value: Any, label: str) -> bytes:
    """Encode as compact ASCII JSON; `label` names the file in errors."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    check_size(len(text), label)
    return text.encode("ascii")


def check_size(size: int, label: str) -> None:
    """Raise CheckpointError for more JSON than readers accept."""
    if size > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{label} would be {size} bytes of JSON, more than the limit of {MAX_JSON_BYTES}; "
            "keep large data as tensors or numpy arrays instead of lists or bytes"
        )


def loads(data: bytes, label: str) -> Any:
    """Decode strict JSON, or raise `CorruptCheckpointError` that names `label`."""
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise CorruptCheckpointError(f"{label}: JSON is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{label}: not valid JSON ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; raise for a duplicate key."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has a duplicate key")
    return result


def _refuse_constant(name: str) -> NoReturn:
    """Raise for the non-standard literals NaN and Infinity."""
    raise ValueError(f"the literal {name} is not JSON")
