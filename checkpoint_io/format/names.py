"""File names of the format, and sizes given as text."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable

MANIFEST = "manifest.json"
_TENSORS = re.compile(r"tensors-([0-9a-f]{8,64})-r[0-9]{5,9}-[0-9]{5,9}\.safetensors", re.ASCII)
_OBJECTS = re.compile(r"objects-([0-9a-f]{8,64})-(?:r[0-9]{5,9}|shared)\.json", re.ASCII)
_PROBE = re.compile(r"probe-([0-9a-f]{8})-[0-9a-f]{16}\.tmp", re.ASCII)
_PROBE_SECONDS = 24 * 3600  # clocks of machines that share a store may differ by hours
_TEMPORARY = re.compile(r"manifest-([0-9a-f]{8,64})\.tmp", re.ASCII)
_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def new_save_id() -> str:
    """Return a random id for one save: 16 hex digits."""
    return secrets.token_hex(8)


def tensors_name(save_id: str, rank: int, number: int) -> str:
    """Return the name of the `number`-th (from 1) tensor file of a rank."""
    return f"tensors-{save_id}-r{rank:05d}-{number:05d}.safetensors"


def objects_name(save_id: str, rank: int | None) -> str:
    """Return the name of the JSON file of a rank's own state, or of the shared state for None."""
    return (
        f"objects-{save_id}-shared.json" if rank is None else f"objects-{save_id}-r{rank:05d}.json"
    )


def temporary_name(save_id: str) -> str:
    """Return the name of the file that becomes the manifest by an atomic rename."""
    return f"manifest-{save_id}.tmp"


def probe_name() -> str:
    """Return a unique name, with the current time, for a file that tests write access."""
    return f"probe-{int(time.time()):08x}-{secrets.token_hex(8)}.tmp"


def stale_probes(names: Iterable[str]) -> list[str]:
    """Return the names of probes old enough that their process must have been killed."""
    limit = time.time() - _PROBE_SECONDS
    return [n for n in names if (match := _PROBE.fullmatch(n)) and int(match.group(1), 16) < limit]


def kind_of(name: str) -> str | None:
    """Return the kind ("tensors" or "objects") of a file by its name; None for foreign names."""
    if _TENSORS.fullmatch(name):
        return "tensors"
    return "objects" if _OBJECTS.fullmatch(name) else None


def save_id_of(name: str) -> str | None:
    """Return the id of the save that wrote a file, by its name; None for foreign names."""
    for pattern in (_TENSORS, _OBJECTS, _TEMPORARY):
        if match := pattern.fullmatch(name):
            return match.group(1)
    return None


def parse_size(size: int | str) -> int:
    """Return a size in bytes; "5GB" is 5e9, "5GiB" is 5 * 2**30."""
    text = str(size).strip().lower()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text)
    value = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if value < 1 or isinstance(size, bool):
        raise ValueError(f'a size is a positive number of bytes or text like "5GB", not {size!r}')
    return value
