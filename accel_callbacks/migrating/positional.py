"""``Accelerator(True, "bf16")``: ours takes keywords only, so their names are put in."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accel_callbacks.migrate.script import look_through, named_arguments
from accel_callbacks.migrate.source import Edit, Source


def positional_edits(source: Source) -> Iterator[Edit]:
    """Yield a name for each positional argument of Accelerator, however that was imported."""
    script = look_through(source.nodes)
    for node in source.nodes:
        if not (isinstance(node, ast.Call) and script.function(node.func) == "Accelerator"):
            continue
        if any(isinstance(one, ast.JoinedStr) for one in source.ancestors(node)):
            continue
        floor = source.text.index("(", source.span(node.func)[1]) + 1 if node.args else 0
        for name, argument in named_arguments(node):
            start = source.span(argument)[0]
            while (before := source.text[floor:start].rstrip()).endswith("("):
                start = floor + len(before) - 1  # the parser leaves out the parentheses around it
            yield Edit(start, start, f"{name}=")
