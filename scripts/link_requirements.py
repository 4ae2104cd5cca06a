"""Link what a wheel requires, and no more, from one environment into another.

Run by the interpreter that has the packages: python link_requirements.py WHEEL SITE_PACKAGES.
An import that the wheel does not declare fails there, and nothing is installed twice.
"""

from __future__ import annotations

import sys
import sysconfig
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def requirements(of: Distribution, extras: set[str]) -> list[Requirement]:
    """Return what a distribution requires here, with some of its extras."""
    found = [Requirement(line) for line in of.requires or []]
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras or {""})
    ]


def closure(wheel: Path) -> dict[str, Distribution]:
    """Return all that a wheel requires, directly or not, by name."""
    (metadata,) = (one for one in zipfile.Path(wheel).iterdir() if one.name.endswith(".dist-info"))
    pending = requirements(PathDistribution(metadata), set())  # type: ignore[arg-type]
    seen: set[str] = set()
    found: dict[str, Distribution] = {}
    while pending:
        requirement = pending.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        one = distribution(requirement.name)
        found[one.metadata["Name"]] = one
        pending += requirements(one, requirement.extras | {""})
    return found


def link(one: Distribution, target: Path) -> None:
    """Link the packages, modules and metadata of a distribution into a folder."""
    site = Path(sysconfig.get_path("purelib"))
    for first in {file.parts[0] for file in one.files or [] if len(file.parts)}:
        if first != ".." and not (target / first).exists():
            (target / first).symlink_to(site / first)


def main() -> None:
    """Link, and name what was linked."""
    wheel, target = map(Path, sys.argv[1:])
    found = closure(wheel)
    for one in found.values():
        link(one, target)
    print("linked:", *sorted(found, key=str.lower))


if __name__ == "__main__":
    main()
