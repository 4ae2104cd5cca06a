"""Weights as views of mapped files: nothing is copied, and no file is ever written to."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_io import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    CorruptCheckpointError,
    StateMismatchError,
    TornLoadError,
    load_model,
    save,
    save_model,
)
from checkpoint_io.weights import map_tensors, mapped, open_weights
from tests.checkpoint_io.test_hostile_weights import write_header

needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")


class Net(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(10, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.body = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.emb(tokens))))


def on_meta(width: int = 4) -> Net:
    with torch.device("meta"):
        return Net(width)


def saved(folder: Path, **options: Any) -> tuple[Net, dict[str, bytes]]:
    """A model and the files that hold it."""
    torch.manual_seed(0)
    model = Net()
    save_model(model.state_dict(), folder, **options)
    return model, content(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(v, theirs[k]) for k, v in mine.items())


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("limit", ["5GB", 200])
@pytest.mark.parametrize("empty", [True, False])
def test_weights_are_those_of_the_file_and_tied(tmp_path: Path, limit: Any, empty: bool) -> None:
    trained, before = saved(tmp_path, max_shard_size=limit)
    model = on_meta() if empty else Net()
    assert load_model(model, tmp_path, mapped=True) == ([], [])
    assert same(model, trained)
    assert model.head.weight is model.emb.weight
    assert model.body.weight.requires_grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(10)).sum().backward()
    optimizer.step()
    assert not same(model, trained)
    assert content(tmp_path) == before  # what is written to is private


@needs_proc
def test_no_memory_is_taken_for_them(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4096, 4096)}, tmp_path / "model.safetensors")  # 64 MiB
    with torch.device("meta"):
        model = torch.nn.Linear(4096, 4096, bias=False)
    before = private_bytes()
    load_model(model, tmp_path, mapped=True)
    with torch.no_grad():
        assert float(model(torch.ones(1, 4096))[0, 0]) == 4096
    assert private_bytes() - before < 16 * 2**20


def test_parameters_and_buffers_stay_the_objects_that_they_were(tmp_path: Path) -> None:
    trained, _ = saved(tmp_path)
    model = Net()
    tensors = [*model.parameters(), *model.buffers()]
    model.body.weight.grad = torch.ones(4, 4)
    version = model.body.weight._version
    load_model(model, tmp_path, mapped=True)
    assert all(
        a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True)
    )
    assert same(model, trained)
    assert model.body.weight.grad is not None
    assert model.body.weight._version > version  # a graph that saved the old values notices


def test_a_stored_tensor_for_two_of_the_model_is_mapped_for_each(tmp_path: Path) -> None:
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    tied["b"].weight = tied["a"].weight
    save_model(tied.state_dict(), tmp_path)
    free = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    load_model(free, tmp_path, mapped=True)
    assert torch.equal(free["a"].weight, free["b"].weight)
    with torch.no_grad():
        free["a"].weight.zero_()
    assert torch.equal(free["b"].weight, tied["b"].weight)


def test_a_parameter_that_is_a_part_of_other_memory_stays_one(tmp_path: Path) -> None:
    flat = torch.zeros(20)
    whole = torch.nn.Parameter(torch.zeros(3))
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(flat[:10])
    model.b, model.c = whole, torch.nn.Parameter(whole.detach())
    model.d = torch.nn.Parameter(torch.zeros(2))
    state = {k: torch.full_like(v, float(ord(k))) for k, v in model.state_dict().items()}
    state["c"] = state["b"]
    save_file({k: v.clone() for k, v in state.items()}, tmp_path / "m.safetensors")
    with pytest.warns(CheckpointWarning, match=r"3 tensors \(64 bytes\).*a shares its memory"):
        load_model(model, tmp_path / "m.safetensors", mapped=True)
    assert flat[:10].tolist() == [float(ord("a"))] * 10
    assert model.b.data_ptr() == model.c.data_ptr()
    assert model.d.tolist() == [float(ord("d"))] * 2


def test_what_cannot_be_mapped_is_copied_and_named(tmp_path: Path) -> None:
    trained, _ = saved(tmp_path)
    model = on_meta()
    model.body.half()
    with pytest.warns(CheckpointWarning, match=r"body.weight is torch.float16, stored is torch.fl"):
        load_model(model, tmp_path, mapped=True)
    assert torch.equal(model.body.weight, trained.body.weight.half())
    assert torch.equal(model.emb.weight, trained.emb.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_nothing_to_map_is_an_error_and_changes_nothing(tmp_path: Path, dtype: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    save_model(torch.nn.Linear(2, 2).state_dict(), tmp_path)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    if dtype is None:
        layer = layer.double()
        before = {k: v.double() for k, v in before.items()}
    with pytest.raises(CheckpointError, match="nothing was changed") as caught:
        load_model(layer, tmp_path, dtype=dtype, mapped=True)
    assert not isinstance(caught.value, TornLoadError)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def test_a_mismatch_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    model = on_meta(5)
    with pytest.raises(StateMismatchError, match="nothing was changed"):
        load_model(model, tmp_path, mapped=True)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_what_has_no_file_to_map_says_so(tmp_path: Path) -> None:
    model = Net()
    save_model(model.state_dict(), "memory://mapped/m")
    torch.save(model.state_dict(), tmp_path / "m.pt")
    save(tmp_path / "checkpoint", {"model": model.state_dict()})
    for url, reason in (
        ("memory://mapped/m", "on this machine"),
        (tmp_path / "m.pt", "only safetensors"),
        (tmp_path / "checkpoint", "verified while it is read"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            load_model(model, url, mapped=True)
        with pytest.raises(CheckpointError, match=reason):
            map_tensors(url)
    with pytest.raises(ValueError, match="mapped=True"):
        load_model(model, tmp_path / "checkpoint", device="cuda", mapped=True)
    with pytest.raises(CheckpointNotFoundError):
        load_model(model, tmp_path / "nothing", mapped=True)


# --- map_tensors ---------------------------------------------------------------------------


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "fp8": torch.randn(7).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "int": torch.arange(6).reshape(2, 3),
    }
    save_model(state, tmp_path)
    with torch.device("meta"):  # a default device is not for what is in a file
        found = map_tensors(tmp_path)
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].float(), value.float()), name
    assert list(map_tensors(open_weights(tmp_path, 0, None), ["int"])) == ["int"]
    with pytest.raises(KeyError, match="other"):
        map_tensors(tmp_path, ["other"])


def test_tied_names_share_a_tensor(tmp_path: Path) -> None:
    saved(tmp_path)
    found = map_tensors(tmp_path, ["head.weight", "emb.weight"])
    assert found["head.weight"] is found["emb.weight"]


@needs_proc
def test_a_file_is_mapped_as_long_as_a_tensor_lives(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(2000), "b": torch.zeros(3)}, path)
    descriptors = len(os.listdir("/proc/self/fd"))
    found = map_tensors(path)
    part = found["a"][10:20]
    del found
    gc.collect()
    assert is_mapped(path)
    assert part.sum() == 10
    if sys.version_info >= (3, 13):
        assert len(os.listdir("/proc/self/fd")) == descriptors
    del part
    gc.collect()
    assert not is_mapped(path)
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps a file that is mapped")
def test_a_file_that_is_replaced_or_removed_keeps_its_content(tmp_path: Path) -> None:
    trained, _ = saved(tmp_path)
    model = on_meta()
    load_model(model, tmp_path, mapped=True)
    save_model({k: torch.zeros_like(v) for k, v in trained.state_dict().items()}, tmp_path)
    assert same(model, trained)
    for path in tmp_path.iterdir():
        path.unlink()
    assert same(model, trained)


@pytest.mark.parametrize("change", ["truncated", "other", "missing", "empty"])
def test_a_file_that_changes_after_it_was_opened(tmp_path: Path, change: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100)}, path)
    source = open_weights(tmp_path, 0, None)
    if change == "truncated":
        os.truncate(path, path.stat().st_size - 8)
    if change == "empty":
        os.truncate(path, 0)
    if change == "missing":
        path.unlink()
    if change == "other":
        save_file({"v": torch.ones(3), "w": torch.ones(100)}, tmp_path / "new")
        os.replace(tmp_path / "new", path)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        map_tensors(source)


def test_a_misaligned_tensor_is_not_mapped(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"w":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    data = b"\x07" + bytes(4) + torch.ones(1).numpy().tobytes()
    path = tmp_path / "m.safetensors"
    write_header(path, header.ljust(-(-len(header) // 8) * 8), data)
    assert map_tensors(path, ["a"])["a"].tolist() == [7]
    with pytest.raises(CheckpointError, match="w cannot be mapped, it starts at byte"):
        map_tensors(path)
    model = torch.nn.Module()
    model.register_buffer("a", torch.zeros(1, dtype=torch.uint8))
    model.w = torch.nn.Parameter(torch.zeros(2))
    with pytest.warns(CheckpointWarning, match="w starts in the file where"):
        load_model(model, path, mapped=True)
    assert model.w.tolist() == [0, 1]


# --- reading ahead -------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
@pytest.mark.parametrize("room", [True, False])
def test_files_are_asked_for_if_memory_has_room(
    tmp_path: Path, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"weight": torch.ones(500, 500), "bias": torch.ones(500), "other": torch.ones(999)}
    save_model(state, tmp_path)
    advised: list[tuple[int, int]] = []
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, n, advice: advised.append((at, n)))
    monkeypatch.setattr(mapped, "free_memory", lambda: 2**40 if room else 1_000_000)
    layer = torch.nn.Linear(500, 500)
    load_model(layer, tmp_path, mapped=True, strict=False)
    for thread in started:
        thread.join()
    assert sum(length for _, length in advised) == (501 * 500 * 4 if room else 0)
    assert all(0 < length <= 128 * 1024 for _, length in advised)  # more of one call is ignored
    assert len(set(advised)) == len(advised)
