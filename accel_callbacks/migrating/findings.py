"""What a migration yields: the new text, and the places that somebody should look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Migration", "UnreadableError"]

Kind = Literal["left", "differs", "note"]


class UnreadableError(ValueError):
    """A text that is no Python, or a file that is no notebook; nothing can be done with it.

    Example:
        >>> from accel_callbacks.migrate import UnreadableError, migrate_script
        >>> try:
        ...     migrate_script("import (")
        ... except UnreadableError as error:
        ...     print("line 1" in str(error))
        True
    """


@dataclass(frozen=True, order=True)
class Finding:
    """A place to look at.

    Attributes:
        line: where it is, from 1; in a notebook counted within the cell.
        name: what is there, such as a name or a call.
        text: what is different, and what to do.
        kind: "left": does not run here and was left as it is; "differs": runs, and behaves in
            another way; "note": worth knowing.
        cell: number of the notebook's cell, from 1; 0 in a script.

    Example:
        >>> from accel_callbacks.migrate import migrate_script
        >>> [finding] = migrate_script("from accelerate import cpu_offload\\n").findings
        >>> finding.line, finding.name, finding.kind
        (1, 'cpu_offload', 'left')
    """

    line: int
    name: str
    text: str
    kind: Kind = "differs"
    cell: int = 0

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"cell {self.cell} line {self.line}" if self.cell else f"line {self.line}"


@dataclass(frozen=True)
class Migration:
    """One file before and after.

    Attributes:
        before: the text as it was.
        after: the text as it is to be; the same where there is nothing to change.
        findings: what to look at, in the order of the file.

    Example:
        >>> from accel_callbacks.migrate import migrate_script
        >>> migrate_script("print(1)\\n").changed
        False
    """

    before: str
    after: str
    findings: Sequence[Finding] = ()

    @property
    def changed(self) -> bool:
        """Whether anything is to be written."""
        return self.before != self.after

    @property
    def left(self) -> list[Finding]:
        """What will not run here."""
        return [finding for finding in self.findings if finding.kind == "left"]
