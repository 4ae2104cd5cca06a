"""Migrate a script: rewrite its imports, and find code that behaves differently."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from accel_callbacks.compat.migrate.imports import (
    below,
    bindings_of,
    import_edits,
    imports_of,
    use_edits,
    use_findings,
)
from accel_callbacks.compat.migrate.names import OLD, TOP, finding_for, home_of, is_module
from accel_callbacks.compat.migrate.rules import (
    ANY,
    ARGUMENTS,
    ATTRIBUTES,
    FUNCTIONS,
    METHODS,
    NAMELESS,
    POSITIONAL,
    SCHEDULER,
    SCHEDULER_LENGTH,
    STATE_ATTRIBUTES,
    TF32,
    VARIABLES,
)
from accel_callbacks.compat.migrate.source import (
    Edit,
    Finding,
    Migration,
    Source,
    UnreadableError,
    apply_edits,
    parsed,
)

__all__ = ["analyze", "migrate_script"]

_USUAL = {"accelerator", "accel"}
_COMMAND = re.compile(r"\baccelerate (launch|config|env|test|estimate-memory|merge-weights)\b")
_MODULE = re.compile(r"accelerate(\.\w+)*")


def migrate_script(text: str) -> Migration:
    """Migrate a Python script from accelerate to accel_callbacks, without running it.

    Imports and uses of accelerate are rewritten if this package has the name; others stay and are
    listed as findings. The result parses, and migrating it again changes nothing.

    Args:
        text: source of the script.

    Raises:
        UnreadableError: the text is not valid Python of this version.

    Example:
        >>> from accel_callbacks.compat.migrate import migrate_script
        >>> script = "import accelerate\\naccelerate.utils.set_seed(1)\\n"
        >>> print(migrate_script(script).after, end="")
        import accel_callbacks
        accel_callbacks.set_seed(1)
    """
    edits, findings = analyze(text)
    after = apply_edits(text, edits)
    try:
        parsed(after)
    except UnreadableError as error:
        raise UnreadableError(f"cannot be rewritten without breaking it ({error})") from error
    return Migration(text, after, findings)


def analyze(text: str) -> tuple[list[Edit], Sequence[Finding]]:
    """Return the edits and findings of a script."""
    source = Source(text)
    bindings = bindings_of(source)
    edits: list[Edit] = []
    findings: set[Finding] = set()
    added: set[str] = set()
    for statement, aliases in imports_of(source):
        edits += import_edits(source, statement, aliases, bindings, added)
        if isinstance(statement, ast.ImportFrom):
            findings |= set(_missing_names(statement))
    for binding in bindings.values():
        edits += use_edits(source, binding)
        findings |= set(use_findings(binding))
    edits += positional_edits(source)
    findings |= set(behavior_findings(source))
    return edits, sorted(findings)


def _missing_names(statement: ast.ImportFrom) -> list[Finding]:
    """List the imported names that are missing here."""
    path = below(statement.module or "") or ()
    findings = []
    for alias in statement.names:
        if alias.name == "*" and path[:1] != ("test_utils",):
            advice = "import what you use by name, then migrate again"
            findings.append(Finding(statement.lineno, f"from {OLD} import *", advice, "left"))
        elif not is_module((*path, alias.name)) and home_of((*path, alias.name)) is None:
            findings.append(finding_for(alias.lineno, (*path, alias.name)))
    return findings


@dataclass
class _Script:
    """Names in a script that refer to accelerate and its objects, as far as can be inferred."""

    names: dict[str, str] = field(default_factory=dict)  # local name: name in accelerate
    modules: set[str] = field(default_factory=set)
    accelerators: set[str] = field(default_factory=lambda: set(_USUAL))
    schedulers: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)

    def function(self, node: ast.expr) -> str:
        """Return the name in accelerate that an expression refers to, or an empty string."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "")
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        known = isinstance(root, ast.Name) and root.id in self.modules
        return node.attr if known and isinstance(node, ast.Attribute) else ""

    def is_accelerator(self, node: ast.expr) -> bool:
        """Return whether an expression is an Accelerator, by its name or its assignment."""
        return _last(node) in self.accelerators

    def is_state(self, node: ast.expr) -> bool:
        """Return whether an expression is an AcceleratorState."""
        if isinstance(node, ast.Call):
            return self.function(node.func) == "AcceleratorState"
        known = isinstance(node, ast.Attribute) and self.is_accelerator(node.value)
        return known and _last(node) == "state"


def behavior_findings(source: Source) -> Iterator[Finding]:
    """Yield code that behaves differently with this package."""
    script = _collect_names(source.nodes)
    for node in source.nodes:
        if isinstance(node, ast.Call):
            yield from _of_call(node, script)
        elif isinstance(node, ast.Attribute) and script.is_accelerator(node.value):
            if node.attr in ATTRIBUTES:
                name = f"accelerator.{node.attr}"
                yield Finding(node.lineno, name, ATTRIBUTES[node.attr], "left")
        elif isinstance(node, ast.Attribute) and script.is_state(node.value):
            if node.attr in STATE_ATTRIBUTES:
                text = STATE_ATTRIBUTES[node.attr]
                yield Finding(node.lineno, f"state.{node.attr}", text, "left")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            yield from _of_product(node, script)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _of_text(node, node.value, source)


def _collect_names(nodes: Sequence[ast.AST]) -> _Script:
    """Collect imports, then objects created from them, then what was prepared."""
    script = _Script()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_relevant(alias.name):
                    script.modules.add(alias.asname or alias.name.partition(".")[0])
        elif (
            isinstance(node, ast.ImportFrom) and not node.level and _is_relevant(node.module or "")
        ):
            for alias in node.names:
                script.names[alias.asname or alias.name] = alias.name
                script.modules.add(alias.asname or alias.name)
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {name for target in targets if (name := _last(target))}
            if script.function(node.value.func) == "Accelerator":
                script.accelerators |= names
            if _makes_scheduler(_last(node.value.func)):
                script.schedulers |= names
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            prepares = node.func.attr in ("prepare", "prepare_scheduler")
            if prepares and script.is_accelerator(node.func.value):
                script.prepared |= {_last(argument) for argument in node.args}
    return script


def _is_relevant(module: str) -> bool:
    """Return whether a module is of accelerate, or ours (in a migrated script)."""
    return below(module) is not None or module.partition(".")[0] == TOP


def _makes_scheduler(name: str) -> bool:
    """Return whether a call of this name creates a learning rate scheduler."""
    return name.endswith(("LR", "Scheduler", "ReduceLROnPlateau", "WarmRestarts")) or (
        name.startswith("get_") and "schedule" in name
    )


def _last(node: ast.AST) -> str:
    """Return the last component of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _of_call(node: ast.Call, script: _Script) -> Iterator[Finding]:
    """Yield the findings of a call."""
    name = script.function(node.func)
    rules, shown = FUNCTIONS, name
    if isinstance(node.func, ast.Attribute) and script.is_accelerator(node.func.value):
        name = node.func.attr
        rules, shown = METHODS, f"accelerator.{name}"
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "step":
        owner = _last(node.func.value)
        if owner in script.prepared and (owner in script.schedulers or "sched" in owner.lower()):
            yield Finding(node.lineno, f"{owner}.step", SCHEDULER)
    if name in rules:
        kind, text = rules[name]
        yield Finding(node.lineno, shown, text, kind)
    arguments = [(keyword.arg or "", keyword.value) for keyword in node.keywords]
    if name == "Accelerator" and node.args:
        named = named_arguments(node)
        arguments += named
        if not named:
            yield Finding(node.lineno, f"{shown}(*...)", NAMELESS, "left")
    if name == "Accelerator":
        yield from _of_dynamo(shown, dict(arguments))
    for keyword, argument in arguments:
        for value in _values(argument):
            rule = ARGUMENTS.get((name, keyword, value))
            if rule is not None:
                written = f"{shown}({keyword}={'...' if value is ANY else repr(value)})"
                yield Finding(argument.lineno, written, rule[1], rule[0])


def _of_dynamo(shown: str, arguments: dict[str, ast.expr]) -> Iterator[Finding]:
    """Yield a finding for an Accelerator that compiles, unless it has another precision than fp32.

    A precision that is not a constant, or is left to the launcher, may be "no".
    """
    precision = arguments.get("mixed_precision")
    if isinstance(precision, ast.Constant) and precision.value not in ("no", None):
        return
    for keyword in ("dynamo_backend", "dynamo_plugin"):
        argument = arguments.get(keyword)
        off = isinstance(argument, ast.Constant) and str(argument.value).lower() in ("no", "none")
        if argument is not None and not off:
            yield Finding(argument.lineno, f"{shown}({keyword}=...)", TF32, "differs")


def named_arguments(node: ast.Call) -> list[tuple[str, ast.expr]]:
    """Return the positional arguments of an Accelerator's call by name; none if one is starred."""
    stars = any(isinstance(argument, ast.Starred) for argument in node.args)
    if stars or len(node.args) > len(POSITIONAL):
        return []
    return list(zip(POSITIONAL, node.args, strict=False))


def _values(node: ast.expr) -> list[object]:
    """Return the values to match with rules: ANY, a constant, or the constants of a list."""
    items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [ANY, *(item.value for item in items if isinstance(item, ast.Constant))]


def _of_product(node: ast.BinOp, script: _Script) -> Iterator[Finding]:
    """Yield a finding for a length multiplied by num_processes, if there is a scheduler."""
    sides = (node.left, node.right)
    counts = [side for side in sides if _last(side) == "num_processes"]
    known = any(isinstance(s, ast.Attribute) and script.is_accelerator(s.value) for s in counts)
    if known and (script.schedulers or any("sched" in name.lower() for name in script.prepared)):
        yield Finding(node.lineno, "* num_processes", SCHEDULER_LENGTH)


def _of_text(node: ast.Constant, text: str, source: Source) -> Iterator[Finding]:
    """Yield a finding for a string that names the package, its command or its variables."""
    if isinstance(source.parents.get(node), ast.Expr):
        return  # a docstring
    line = node.lineno
    if text in VARIABLES:
        yield Finding(line, text, f"is not read here: {VARIABLES[text]}")
    elif text.startswith("ACCELERATE_") and text.isupper():
        yield Finding(line, text, "is not read here: an argument, or an option of accel launch")
    elif _COMMAND.search(text):
        yield Finding(line, f"{text[:40]!r}", "the command is accel here", "note")
    elif _MODULE.fullmatch(text):
        yield Finding(line, f"{text!r}", "a text that names accelerate: change it by hand", "note")


def positional_edits(source: Source) -> Iterator[Edit]:
    """Yield edits that name the positional arguments of Accelerator, however it was imported."""
    script = _collect_names(source.nodes)
    for node in source.nodes:
        if not (isinstance(node, ast.Call) and script.function(node.func) == "Accelerator"):
            continue
        if any(isinstance(ancestor, ast.JoinedStr) for ancestor in source.ancestors(node)):
            continue
        floor = source.text.index("(", source.span(node.func)[1]) + 1 if node.args else 0
        for name, argument in named_arguments(node):
            start = source.span(argument)[0]
            while (before := source.text[floor:start].rstrip()).endswith("("):
                start = floor + len(before) - 1  # positions exclude parentheses around the value
            yield Edit(start, start, f"{name}=")
