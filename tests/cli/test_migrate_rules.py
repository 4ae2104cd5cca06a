"""The tables of `accel migrate` agree with the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import accel_callbacks
from accel_callbacks import Accelerator, AcceleratorState, utils
from accel_callbacks.migrate import migrate_script
from accel_callbacks.migrate.names import home_of
from accel_callbacks.migrate.rules import (
    ANY,
    ARGUMENTS,
    ATTRIBUTES,
    FUNCTIONS,
    METHODS,
    POSITIONAL,
    STATE_ATTRIBUTES,
    VARIABLES,
)

ROOT = Path(accel_callbacks.__file__).parent
PARAMETERS = {
    name
    for name, one in inspect.signature(Accelerator).parameters.items()
    if one.kind is not one.VAR_KEYWORD
}


def test_arguments_that_are_left_are_not_there() -> None:
    said = {
        arg
        for (callee, arg, value), (kind, _) in ARGUMENTS.items()
        if callee == "Accelerator" and value is ANY and kind == "left"
    }
    assert set(POSITIONAL) - PARAMETERS == said


def test_attributes_that_are_left_are_not_there() -> None:
    assert [name for name in ATTRIBUTES if hasattr(Accelerator, name)] == []
    state = AcceleratorState(cpu=True)
    assert [name for name in STATE_ATTRIBUTES if hasattr(state, name)] == []


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_differ_are_there(name: str) -> None:
    assert callable(getattr(Accelerator, name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_differ_are_there(name: str) -> None:
    assert hasattr(utils, name)


def test_names_are_in_the_named_package() -> None:
    assert {home_of([name]) for name in accel_callbacks.__all__} == {"accel_callbacks", None}
    for name in utils.__all__:
        home = home_of(["utils", name])
        assert home is not None
        assert hasattr(__import__(home, fromlist=["x"]), name)
    assert home_of(["utils", "is_wandb_available"]) == "accel_callbacks.utils"
    assert home_of(["utils", "is_nothing_available"]) is None
    assert home_of(["test_utils", "set_seed"]) is None


@pytest.mark.parametrize("name", VARIABLES.values())
def test_variables_are_read(name: str) -> None:
    assert any(name in path.read_text(encoding="utf-8") for path in ROOT.glob("*.py"))


@pytest.mark.parametrize("rule", ARGUMENTS, ids=lambda rule: ".".join(map(str, rule[:2])))
def test_every_argument_is_found(rule: tuple[str, str, object]) -> None:
    callee, argument, value = rule
    owner = "" if callee[0].isupper() or callee == "get_logger" else "accelerator."
    literal = "x" if value is ANY else repr(value)
    script = f"from accelerate import {callee}\n{owner}{callee}({argument}={literal})"
    names = [finding.name for finding in migrate_script(script).findings]
    assert any(re.search(rf"\b{callee}\({argument}=", name) for name in names)
