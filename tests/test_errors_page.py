"""docs/reference/errors.md has each error that a user can meet, with its address and bases."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "errors.md"
SECTION = re.compile(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", re.M | re.S)
DEFINITION = re.compile(r"^class ([A-Za-z]\w*)\([^)]*(?:Error|Exception|Warning)\w*[^)]*\):", re.M)
#: Raised and caught inside of the packages, or by checks that are not for users.
INTERNAL = {
    "AlreadySent",
    "CommandError",
    "Failed",
    "Injected",
    "LoadFailed",
    "RecordTooLargeError",
    "Skipped",
    "WrongAnswer",
}


def sections() -> dict[str, str]:
    return dict(SECTION.findall(PAGE.read_text("utf-8")))


@cache
def classes() -> dict[str, type[BaseException]]:
    """Return the exceptions that are defined in the packages, by name."""
    defined = {}
    for package in ("accel_callbacks", "checkpoint_io", "loggers"):
        for path in (PAGE.parents[2] / package).rglob("*.py"):
            for name in DEFINITION.findall(path.read_text("utf-8")):
                words = path.relative_to(PAGE.parents[2]).with_suffix("").parts
                module = ".".join(words).removesuffix(".__init__")
                value = getattr(importlib.import_module(module), name)
                if issubclass(value, BaseException):
                    defined[name] = value
    return defined


def test_every_error_has_a_section() -> None:
    assert sorted(sections()) == sorted(set(classes()) - INTERNAL)


def test_a_section_says_where_the_class_is_and_what_to_do() -> None:
    for name, section in sections().items():
        address = re.match(r"\n`([\w.]+)`, (an?) `(\w+)`(?: and an? `(\w+)`)?[.;]", section)
        assert address, f"{name} begins with the address of the class and its bases"
        module, _, attribute = address[1].rpartition(".")
        error = getattr(importlib.import_module(module), attribute)
        assert error is classes()[name]
        bases = [base for base in address.groups()[2:] if base]
        assert bases == [base.__name__ for base in error.__bases__], name
        assert "**What it means.**" in section, name
        assert "**What to do.**" in section, name
