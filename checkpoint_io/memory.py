"""Host memory that this process can still use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["free_memory"]

_ROOT = Path("/")


def free_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes of host memory that this process can still use; None if unknown.

    It is what the system calls available, which counts what the page cache can give back, or less
    where a control group above this process leaves less.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    limits = [*_available(root), *_free_in_groups(root)]
    return min(limits) if limits else None


def _available(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield what each control group of this process leaves, of version 1 and 2."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.strip("/")
        # In a container the path may be that of the host: its group is mounted as the base then.
        for folder in [group, *group.parents]:
            yield from _free_in_group(folder, *names)
            if folder == base:
                break


def _free_in_group(folder: Path, limit: str, used: str, cached: str) -> Iterator[int]:
    limits, uses = _lines(folder / limit), _lines(folder / used)
    if not limits or not uses or not limits[0].isdigit():  # "max" is no limit
        return
    stats = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    yield max(int(limits[0]) - int(uses[0]) + int(stats.get(cached, 0)), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
