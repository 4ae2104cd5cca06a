"""Damage to the files of a checkpoint, and what it must not do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from checkpoint_io import Manifest

Damage = Callable[[bytes], "bytes | None"]


def flip(at: int, bit: int = 3) -> Damage:
    """Change one bit; `at` counts from the end if it is negative."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        return bytes(changed)

    return change


WHOLE_FILE: dict[str, Damage] = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "last_byte_gone": lambda data: data[:-1],
    "half_of_it": lambda data: data[: len(data) // 2],
    "one_byte_more": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "first_bit": flip(0),
    "last_bit": flip(-1),
}


@contextmanager
def damaged(path: Path, damage: Damage) -> Iterator[None]:
    """Damage one file during a block."""
    good = path.read_bytes()
    bad = damage(good)
    assert bad != good
    if bad is None:
        path.unlink()
    else:
        path.write_bytes(bad)
    try:
        yield
    finally:
        path.write_bytes(good)


def tensors_at(manifest: Manifest, name: str, position: int) -> list[str]:
    """Return the keys of the tensors that hold a byte of a file."""
    return [
        key
        for key, entry in manifest.tensors.items()
        for chunk in entry.chunks
        if manifest.files[chunk.file].name == name and chunk.begin <= position < chunk.end
    ]


SENTINEL = 0x5A


def targets_like(tree: Any) -> Any:
    """Build a tree with the same tensors, every byte of them the sentinel."""
    if isinstance(tree, dict):
        return {key: targets_like(value) for key, value in tree.items()}
    if isinstance(tree, torch.Tensor):
        target = torch.empty_like(tree)
        raw(target).fill_(SENTINEL)
        return target
    return tree


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def no_corrupt_byte(targets: Any, truth: Any, path: str = "") -> None:
    """Every byte of every target is the sentinel still, or the right one."""
    if isinstance(truth, dict):
        for key in truth:
            no_corrupt_byte(targets[key], truth[key], f"{path}/{key}")
    elif isinstance(truth, torch.Tensor):
        found, right = raw(targets), raw(truth)
        wrong = (found != right) & (found != SENTINEL)
        assert not wrong.any(), f"{path}: {int(wrong.sum())} corrupt bytes reached the target"


def edit_manifest(place: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and seal it again with a right digest, as an attacker can."""
    path = place / "manifest.json"
    document = json.loads(path.read_bytes())
    change(document)
    seal_manifest(path, document)


def seal_manifest(path: Path, document: dict[str, Any]) -> None:
    """Write a manifest with a right digest; after the text of the format, not after its code."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps({"digest": "0" * 64, **rest}, separators=(",", ":")).encode()
    head = b'{"digest":"'
    assert text.startswith(head + b"0" * 64)
    digest = hashlib.sha256(text).hexdigest().encode()
    path.write_bytes(head + digest + text[len(head) + 64 :])


def admit(place: Path, name: str, data: bytes) -> None:
    """Put other bytes into a file and make the manifest agree, so that checksums do not tell."""
    (place / name).write_bytes(data)

    def change(document: dict[str, Any]) -> None:
        part = document["checksum"]["part_size"]
        entry = next(entry for entry in document["files"] if entry["name"] == name)
        covered = min(entry.get("covered", len(data)), len(data))
        if entry["kind"] == "objects":
            covered = len(data)
        entry["size"] = len(data)
        entry["covered"] = covered
        entry["checksums"] = sums(data[:covered], part)

    edit_manifest(place, change)


def sums(data: bytes, part: int) -> list[str]:
    """Return the checksums of some bytes, part by part."""
    return [xxhash.xxh3_64_hexdigest(data[at : at + part]) for at in range(0, len(data), part)]
