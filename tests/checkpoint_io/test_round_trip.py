from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from checkpoint_io import (
    BackgroundSaver,
    UnsupportedStateError,
    load,
    load_model_state,
    read_manifest,
    save,
    save_model,
)
from checkpoint_io.format.safetensors import DTYPES

BASE = torch.arange(60, dtype=torch.float32).reshape(5, 12)


def same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        left, right = (t.detach().resolve_conj().contiguous().reshape(-1) for t in (a, b))
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        )
    if isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in b)
    if isinstance(b, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(b, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(b, float) and math.isnan(b):
        return math.isnan(a)
    return repr(a) == repr(b) if isinstance(b, float) else a == b


VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**53 + 1, 2**127, -(2**200)],
    "floats": [0.1, -0.0, 1e-308, 5e-324, math.nan, math.inf, -math.inf],
    "text": "ünï ☃ \ud800 \x00 / ~ $",
    "nested": {"a": [{"b": (1, (2, [3]))}], "": {}, "e": [], "t": ()},
    "int_keys": {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": torch.zeros(3)}, "0": torch.ones(1)},
    "dollar": {"$tensor": "not a tensor", "x": 1},
    "odd_keys": {(1, "a"): 1, None: 2, 1.5: 3, True: 4, b"k": 5, frozenset({1}): 6},
    "deques": [collections.deque([1, torch.ones(2)], 3), collections.deque("ab")],
    "sets": {"s": {1, "a", (2, 3)}, "f": frozenset({1.5})},
    "bytes": b"\x00\xff" * 9,
    "dtypes": [torch.float32, torch.bfloat16, torch.complex128],
    "escapes": {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a~1b": torch.ones(2)},
    "ranks": {"0": {"x": torch.tensor(5)}},
    "__metadata__": torch.tensor([1, 2]),
    "zero_dim": torch.tensor(1234),
    "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8)],
    "views": [BASE.t(), BASE[1:4, ::3], BASE[:1].expand(4, 12), BASE[2]],
    "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "requires_grad": torch.ones(2, requires_grad=True) * 2,
    "arrays": [
        np.arange(6).astype(dtype).reshape(2, 3)
        for dtype in ("bool", "int8", "uint16", "uint64", "float16", "float64", "complex64")
    ],
    "array_0d": np.array(3.5),
    "array_f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_comes_back_the_same(tmp_path: Path, name: str) -> None:
    save(tmp_path, {name: VALUES[name], "other": 1}, local_state={name: VALUES[name]})
    checkpoint = load(tmp_path)
    assert same(checkpoint.state, {name: VALUES[name], "other": 1})
    assert same(checkpoint.local_state, {name: VALUES[name]})


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_bitwise(tmp_path: Path, name: str) -> None:
    raw = torch.randint(0, 2 if name == "BOOL" else 256, (24, 8), dtype=torch.uint8)
    tensor = raw.view(DTYPES[name])
    save(tmp_path, {"t": tensor, "odd": torch.ones(3, dtype=torch.uint8)})
    assert same(load(tmp_path).state["t"], tensor)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(1.5), 1.5),
        (np.int32(3), 3),
        (np.bool_(True), True),
        (torch.Size([2, 3]), (2, 3)),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.defaultdict(int, b=2), {"b": 2}),
        (bytearray(b"x"), b"x"),
        (np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4")),
    ],
)
def test_values_that_are_normalized(tmp_path: Path, value: Any, expected: Any) -> None:
    save(tmp_path, {"v": value})
    assert same(load(tmp_path).state["v"], expected)


def cyclic() -> list[Any]:
    result: list[Any] = []
    result.append(result)
    return result


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 0,
        1j,
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex128),
        torch.empty(2, device="meta"),
        np.array(["a"]),
        np.array([object()]),
        np.datetime64("2020-01-01"),
        {torch.ones(1): 1},
        collections.namedtuple("Point", "x")(1),
        cyclic(),
        2**20_000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_is_named_and_leaves_nothing(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\['deep'\]\[0\]"):
        save(tmp_path / "c", {"ok": torch.ones(2), "deep": [value]})
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").iterdir())


def test_metadata_takes_plain_values_only(tmp_path: Path) -> None:
    save(tmp_path, {}, metadata={"loss": math.nan, "tags": ("a",), "n": np.int64(3)})
    metadata = read_manifest(tmp_path).metadata
    assert math.isnan(metadata["loss"])
    assert (metadata["tags"], metadata["n"]) == (("a",), 3)
    with pytest.raises(UnsupportedStateError, match=r"metadata\['loss'\].*item"):
        save(tmp_path, {}, metadata={"loss": torch.tensor(1.0)})
    assert read_manifest(tmp_path).metadata["n"] == 3


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    weight = torch.randn(100, 10)
    view = weight[:50]
    manifest = save(tmp_path, {"emb": weight, "head": weight, "part": view})
    assert manifest.aliases == {"head": "emb"}
    assert set(manifest.tensors) == {"emb", "part"}
    state = load(tmp_path).state
    assert state["head"] is state["emb"]
    assert torch.equal(state["part"], view)


def test_stock_safetensors_reads_our_shards(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(50, i + 1) for i in range(9)}
    state["h"] = torch.ones(3, dtype=torch.float16)
    state["d"] = torch.ones(3, dtype=torch.float64)
    manifest = save(tmp_path, {"m": state}, max_shard_size=2000)
    found = {}
    shards = [entry for entry in manifest.files if entry.kind == "tensors"]
    assert len(shards) > 3
    for entry in shards:
        with safe_open(tmp_path / entry.name, "pt") as file:
            found.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    assert same(dict(sorted(found.items())), {f"m/{k}": v for k, v in sorted(state.items())})
    for entry in manifest.tensors.values():
        size = entry.chunks[0].end - entry.chunks[0].begin
        itemsize = size // max(1, math.prod(entry.shape))
        assert entry.chunks[0].begin % itemsize == 0
        assert entry.chunks[0].begin >= 4096


def test_data_larger_than_a_part_crosses_part_borders(tmp_path: Path) -> None:
    state = {"a": torch.randn(3_000_001), "b": torch.randn(3_000_003), "c": torch.arange(5)}
    manifest = save(tmp_path, state)
    assert [len(manifest.tensors[key].chunks[0].checksums) for key in "abc"] == [12, 12, 1]
    assert same(load(tmp_path).state, state)


def test_optimizer_trains_on_bitwise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    save(tmp_path, {"models": [model.state_dict()], "optimizers": [optimizer.state_dict()]})
    step()
    expected = model.weight.detach().clone()
    state = load(tmp_path).state
    model.load_state_dict(state["models"][0])
    optimizer.load_state_dict(state["optimizers"][0])
    step()
    assert torch.equal(model.weight, expected)
    assert "models/0/weight" in read_manifest(tmp_path).tensors


@pytest.mark.parametrize("size", [0, "5 parsecs", -1, True])
def test_bad_shard_size(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ValueError, match="5GB"):
        save(tmp_path, {}, max_shard_size=size)


def test_home_and_path_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/runs/a", {"x": 1})
    assert load(tmp_path / "runs" / "a").state == {"x": 1}
    assert load(f"file://{tmp_path}/runs/a/").state == {"x": 1}


def test_default_device_is_for_the_users_own_tensors(tmp_path: Path) -> None:
    """On any other default device than the CPU, host memory is still host memory."""
    state = {"cut": torch.ones(6, 5, device="cpu").T, "w": torch.ones(300, device="cpu")}
    targets = {key: torch.zeros_like(value).half() for key, value in state.items()}
    with torch.device("meta"):
        BackgroundSaver().save(tmp_path / "a", state).wait()
        loaded = load(tmp_path / "a").state
        load(tmp_path / "a", into=targets, cast=True)
        save_model(state, tmp_path / "m")
        weights = load_model_state(tmp_path / "m")
    for key, value in state.items():
        for found in (loaded[key], targets[key].float(), weights[key]):
            assert torch.equal(found, value), key
