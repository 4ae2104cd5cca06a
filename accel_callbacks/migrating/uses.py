"""Rewriting ``accelerate.utils.set_seed(0)``, where the module itself was imported."""

from __future__ import annotations

from collections.abc import Iterator

from accel_callbacks.migrate.imports import Binding, Use
from accel_callbacks.migrate.names import advice_for, home_of
from accel_callbacks.migrate.source import Edit, Source
from accel_callbacks.migrating.findings import Finding


def use_edits(source: Source, binding: Binding) -> Iterator[Edit]:
    """Yield what changes where a module of accelerate is used."""
    if binding.mode == "leave":
        return
    for use in binding.uses:
        if use.home is None:
            continue
        name = use.path[-1]
        start = binding.local if binding.mode == "alias" else use.home
        edit = Edit(*source.span(use.node), f"{start}.{name}")
        if source.text[edit.start : edit.end] != edit.text:
            yield edit


def use_findings(binding: Binding) -> Iterator[Finding]:
    """Yield the uses that stay as they are, and why."""
    for use in binding.uses:
        if not use.path or (use.home and binding.mode != "leave"):
            continue
        name = ".".join(("accelerate", *use.path))
        yield Finding(use.root.lineno, name.removesuffix(".*"), _why(use, binding), "left")


def _why(use: Use, binding: Binding) -> str:
    """Say why a use was left."""
    if use.home:
        return f"{binding.local!r} names something else in this file too: change it by hand"
    if use.path[-1] == "*":
        return "the module itself is passed on: change it by hand"
    if home_of(use.path):
        return "in quotes, in an f-string or assigned to: change it by hand"
    return advice_for(use.path[-1])
