"""Damaged and hostile manifests and tensor headers: refused by name, or right; nothing else."""

from __future__ import annotations

import copy
import itertools
import json
import tracemalloc
from functools import lru_cache
from typing import Any

import fsspec
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_io import CorruptCheckpointError, Manifest, ManifestVersionError, save
from checkpoint_io.format.manifest import seal
from checkpoint_io.format.parse import parse_manifest, parse_without_tensors
from checkpoint_io.format.safetensors import parse_header

RUNS = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
LIMIT = 64 * 2**20

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([4095, 4096, 2**31, 2**62, 2**63 - 1, 2**63, 2**200, 10**4000]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["F32", "F64", "BOOL", "w", "0" * 16, "../x", "$tensor", "objects-ab.json"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@lru_cache(maxsize=1)
def example() -> tuple[bytes, bytes, int]:
    """The manifest of a checkpoint, a tensor file's header, and that file's size."""
    url = "memory://test-fuzz/example"
    tied = torch.ones(3)
    state = {
        "w": torch.zeros(4, 5),
        "e": torch.zeros(0, 2),
        "n": torch.tensor(1),
        "t": [tied, tied],
    }
    manifest = save(url, state, local_state={"r": torch.arange(5)}, metadata={"run_id": "r"})
    read = fsspec.filesystem("memory").cat_file
    tensors = read(f"{url}/{manifest.files[0].name}")
    return read(f"{url}/manifest.json"), tensors[8 : manifest.files[0].covered], len(tensors)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    inner = [p for k, v in items for p in places(v, (*path, k))]
    return [path, *inner] if path else inner


def mutate(data: st.DataObject, document: Any) -> Any:
    """Change, remove or double some places of a document."""
    for _ in range(data.draw(st.integers(1, 3))):
        *outer, last = data.draw(st.sampled_from(places(document)))
        holder = document
        for key in outer:
            holder = holder[key]
        action = data.draw(st.sampled_from(["put", "put", "remove", "double"]))
        if action == "put":
            holder[last] = data.draw(VALUES)
        elif action == "remove":
            del holder[last]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
        else:
            holder[data.draw(st.text(max_size=4))] = copy.deepcopy(holder[last])
        if not places(document):
            break
    return document


def bounded(parse: Any) -> Any:
    """Run a parser; it refuses or returns, and takes little memory."""
    tracemalloc.start()
    found, text = None, "here"
    try:
        found = parse()
    except (CorruptCheckpointError, ManifestVersionError) as error:
        text = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < LIMIT
    assert "here" in text
    assert len(text) < 2000
    return found


def check(manifest: Manifest) -> None:
    """What was accepted keeps what readers rely on."""
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            entry = manifest.files[chunk.file]
            assert entry.covered <= chunk.begin <= chunk.end <= entry.size
            assert len(chunk.checksums) == -(-(chunk.end - chunk.begin) // manifest.part_size)
    assert all("/" not in entry.name and ".." not in entry.name for entry in manifest.files)
    assert all(target in manifest.tensors for target in manifest.aliases.values())


@RUNS
@given(st.data())
def test_manifest_with_other_values(data: st.DataObject) -> None:
    """Sealed again after the change, so that the digest does not tell."""
    document = mutate(data, json.loads(example()[0]))
    sealed = seal(document)
    manifest = bounded(lambda: parse_manifest(sealed, "here"))
    lazy = bounded(lambda: parse_without_tensors(sealed, "here", lambda: manifest))
    if manifest is not None:
        check(manifest)
        assert lazy.files == manifest.files
        assert lazy == manifest


@RUNS
@given(st.data())
def test_manifest_with_other_bytes(data: st.DataObject) -> None:
    raw = bytearray(example()[0])
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[at] ^= data.draw(st.integers(1, 255))
    else:
        raw[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    manifest = bounded(lambda: parse_manifest(bytes(raw), "here"))
    lazy = bounded(lambda: parse_without_tensors(bytes(raw), "here", lambda: manifest))
    assert (manifest is lazy is None) or bytes(raw) == example()[0]


@RUNS
@given(st.one_of(st.binary(max_size=200), VALUES.map(lambda value: json.dumps(value).encode())))
def test_anything_as_a_manifest(raw: bytes) -> None:
    assert bounded(lambda: parse_manifest(raw, "here")) is None
    assert bounded(lambda: parse_without_tensors(raw, "here", example)) is None


@RUNS
@given(st.data())
def test_header_with_other_values(data: st.DataObject) -> None:
    _, header, size = example()
    raw = json.dumps(mutate(data, json.loads(header))).encode()
    found = bounded(lambda: parse_header(raw, size - len(header) + len(raw), "here"))
    if found is not None:
        ends = sorted((slot.begin, slot.end) for slot in found[1].values())
        assert ends[0][0] == 8 + len(raw)
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ends))


@RUNS
@given(st.one_of(st.binary(max_size=200), VALUES.map(lambda value: json.dumps(value).encode())))
def test_anything_as_a_header(raw: bytes) -> None:
    bounded(lambda: parse_header(raw, 8 + len(raw), "here"))


def test_unchanged_ones_are_accepted() -> None:
    """The control of all of these."""
    manifest, header, size = example()
    assert parse_manifest(seal(json.loads(manifest)), "here").tensors.keys() >= {"w", "e", "n"}
    assert set(parse_header(header, size, "here")[1]) >= {"w", "e", "n"}
