"""The config reader on random input: no traceback, no code, one line or plain values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from accel_callbacks.launch.resolve import Resolved, refuse_unbuilt, resolve_settings
from accel_callbacks.launch.settings import all_options
from accel_callbacks.plugins.option import SettingsError

NAMES = [one.name for one in all_options() if not one.block]
INNER = [one.name for one in all_options() if one.block]
TAGS = ["!!python/object/apply:os.system", "!!python/name:os.system", "!!int", "!!timestamp"]
TAGS += ["!!binary", "!!set", "!!omap", "!!float", "!!bool", "!!null", "!", "!x", "!!python/tuple"]
BITS = ["&a ", "*a", "<<: ", "- ", "? ", ": ", "{", "}", "[", "]", "'", '"', "|\n", "%YAML 1.1\n"]
BITS += ["---\n", "...\n", "\t", "\r\n", "\ufeff", "\0", "\x1b[2J", "\u2028", "0x" + "f" * 9000]
BITS += ["1:1:1", "2001-99-99", "1e999", ".nan", "-.inf", "=", "0b", "0o9", "~", "no", "!!str"]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["NO", "no", "true", "1", "auto", "FSDP", "MULTI_GPU", "all", "1:2"]),
    st.dates(),
    st.binary(max_size=5),
)
keys = st.one_of(st.sampled_from(NAMES), st.sampled_from(INNER), st.text(max_size=9), scalars)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=6,
)
documents = st.dictionaries(keys, values, max_size=4).map(
    lambda data: yaml.dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")
)
broken = st.lists(
    st.one_of(st.sampled_from([*BITS, *TAGS, *NAMES, *INNER, " ", "\n"]), st.text(max_size=5)),
    max_size=12,
).map(lambda parts: "".join(parts).encode("utf-8", "surrogatepass"))
LIMITS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def read(folder: Path, raw: bytes, name: str) -> Resolved | None:
    """Resolve the file as a launch would; every error must be one printable line about it."""
    path = folder / name
    path.write_bytes(raw)
    try:
        found = resolve_settings({}, str(path), None, {})
        refuse_unbuilt(found)
    except SettingsError as error:
        text = str(error)
        assert text.isprintable()
        assert name in text
        assert len(text) < 700
        return None
    return found


def check(found: Resolved | None) -> None:
    """Whatever was accepted has the types that the table declares."""
    kinds: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "list": tuple}
    for one in all_options() if found is not None else ():
        value = found.value(one.path) if found is not None else None
        if one.kind != "block" and value is not None:
            assert isinstance(value, kinds[one.kind]), one.path
    if found is not None:
        assert all(text.isprintable() for text in found.variables().values())
        found.idle()


@LIMITS
@given(raw=documents)
def test_yaml_of_any_values(tmp_path: Path, raw: bytes) -> None:
    check(read(tmp_path, raw, "a.yaml"))


@LIMITS
@given(raw=st.one_of(broken, st.binary(max_size=60)), name=st.sampled_from(["a.yaml", "a.json"]))
@example(raw=b"{" * 30_000, name="a.yaml")
@example(raw=b"- " * 30_000, name="a.yaml")
@example(raw=b"a:\n" * 20_000, name="a.yaml")
@example(raw=b"?" * 60_000, name="a.yaml")
@example(raw=b"%TAG ! tag:yaml.org,2002:python/\n---\na: !object/apply:os.abort []", name="a.yaml")
def test_no_text_breaks_the_reader(tmp_path: Path, raw: bytes, name: str) -> None:
    check(read(tmp_path, raw, name))
    assert set(os.listdir(tmp_path)) <= {"a.yaml", "a.json"}


@pytest.mark.parametrize(
    "command",
    ["!!python/object/apply:os.system ['touch owned']", "!!python/object/new:os.mkdir ['owned']"],
)
def test_no_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert read(tmp_path, f"main_process_ip: {command}".encode(), "a.yaml") is None
    assert os.listdir(tmp_path) == ["a.yaml"]
