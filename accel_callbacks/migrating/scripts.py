"""Moving one script: what changes, what is left, and what behaves differently."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from accel_callbacks.migrate.imports import below, bindings_of, imports_of
from accel_callbacks.migrate.names import OLD, advice_for, home_of, is_module
from accel_callbacks.migrate.script import behaviour_findings
from accel_callbacks.migrate.source import Edit, Source, apply_edits, parsed
from accel_callbacks.migrating.findings import Finding, Migration, UnreadableError
from accel_callbacks.migrating.imports import import_edits
from accel_callbacks.migrating.positional import positional_edits
from accel_callbacks.migrating.uses import use_edits, use_findings

__all__ = ["analyse", "migrate_script"]


def migrate_script(text: str) -> Migration:
    """Move a Python script from accelerate to accel_callbacks, without running it.

    Imports and uses of the modules of accelerate are rewritten where a name is here too; all else
    is left as it is and told. The result parses, and moving it again changes nothing.

    Args:
        text: the whole script.

    Raises:
        UnreadableError: the text is no Python of this version.

    Example:
        >>> from accel_callbacks.migrate import migrate_script
        >>> script = "import accelerate\\naccelerate.utils.set_seed(1)\\n"
        >>> print(migrate_script(script).after, end="")
        import accel_callbacks
        accel_callbacks.set_seed(1)
    """
    edits, findings = analyse(text)
    after = apply_edits(text, edits)
    try:
        parsed(after)
    except UnreadableError as error:
        raise UnreadableError(f"cannot be rewritten without breaking it ({error})") from error
    return Migration(text, after, findings)


def analyse(text: str) -> tuple[list[Edit], Sequence[Finding]]:
    """Return the edits that move a text, and what is to be told."""
    source = Source(text)
    bindings = bindings_of(source)
    edits: list[Edit] = []
    findings: set[Finding] = set()
    added: set[str] = set()
    for statement, aliases in imports_of(source):
        edits += import_edits(source, statement, aliases, bindings, added)
        if isinstance(statement, ast.ImportFrom):
            findings |= set(_left(statement))
    for binding in bindings.values():
        edits += use_edits(source, binding)
        findings |= set(use_findings(binding))
    edits += positional_edits(source)
    findings |= set(behaviour_findings(source))
    return edits, sorted(findings)


def _left(statement: ast.ImportFrom) -> list[Finding]:
    """List the names of a statement that are not here."""
    path = below(statement.module or "") or ()
    found = []
    for alias in statement.names:
        if alias.name == "*":
            advice = "import what you use by name, then migrate again"
            found.append(Finding(statement.lineno, f"from {OLD} import *", advice, "left"))
        elif not is_module((*path, alias.name)) and home_of((*path, alias.name)) is None:
            line = alias.lineno
            found.append(Finding(line, alias.name, advice_for(alias.name), "left"))
    return found
