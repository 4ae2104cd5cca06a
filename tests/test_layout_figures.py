"""The figures about the layout: what is of the core, and what it names."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import layout_figures


def module(name: str, text: str = "", *, door: bool = False) -> layout_figures.Module:
    path = Path(*name.split("."), "__init__.py") if door else Path(*name.split(".")[:-1], "x.py")
    return layout_figures.Module(name, path, text, ast.parse(text))


@pytest.mark.parametrize(
    ("name", "core"),
    [
        ("accel_callbacks.accelerator", True),
        ("accel_callbacks.loop.step", True),
        ("accel_callbacks.callbacks.base", True),
        ("accel_callbacks.callbacks.dispatch.ledger", True),
        ("accel_callbacks.callbacks.timer", False),
        ("accel_callbacks.engines.ddp.strategy", False),
        ("accel_callbacks.utils", False),
        ("checkpoint_io.errors", False),
    ],
)
def test_the_core_is_what_stands_in_no_outbuilding(name: str, core: bool) -> None:
    assert layout_figures.is_core(module(name)) is core


def test_doors_of_rooms_belong_to_them() -> None:
    doors = {
        "accel_callbacks": False,
        "accel_callbacks.loop": True,
        "accel_callbacks.callbacks": True,
        "accel_callbacks.addons": False,
    }
    assert {n: layout_figures.is_core(module(n, door=True)) for n in doors} == doors


def test_identifiers_name_others_and_texts_do_not() -> None:
    text = (
        '"""Offload."""\nif replays:  # fp8\n    from a.engines.xla import XLA\nx = "deepspeed"\n'
    )
    assert layout_figures.named_in(module("accel_callbacks.loop.a", text)) == {"journal", "xla"}
    assert layout_figures.named_in(module("accel_callbacks.loop.a", "BackgroundSaves()")) == set()


def test_the_figures_of_the_core_are_printed(tmp_path: Path) -> None:
    folder = tmp_path / "accel_callbacks" / "loop"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text(
        '"""A."""\n\nx = 1\n\n\ndef f(offload):\n    # why\n    return x\n'
    )
    (tmp_path / "accel_callbacks" / "utils.py").write_text("y = 1\n")
    figures = layout_figures.source_figures(tmp_path)
    assert figures["code of the core"] == "3"
    assert figures["files of the core"] == "1"
    assert figures["files of it that name others"] == "1"
    assert figures["whom they name"] == "offload 1"
