"""load_model: every layout that it reads, into every kind of model that it is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from checkpoint_io import (
    CheckpointNotFoundError,
    StateMismatchError,
    TornLoadError,
    load_model,
    load_model_state,
    save,
    save_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Tied(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(10, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.body = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, 10, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(v, theirs[k]) for k, v in mine.items())


def trained() -> Tied:
    model = Tied()
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.copy_(torch.full_like(tensor, number + 1))
    return model


def as_file(model: torch.nn.Module, folder: Path) -> Path:
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    save_file(weights, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_folder(model: torch.nn.Module, folder: Path) -> Path:
    save_model(model.state_dict(), folder)
    return folder


def as_shards(model: torch.nn.Module, folder: Path) -> Path:
    assert len(save_model(model.state_dict(), folder, max_shard_size=200)) > 2
    return folder


def as_index(model: torch.nn.Module, folder: Path) -> Path:
    return as_shards(model, folder) / "model.safetensors.index.json"


def as_checkpoint(model: torch.nn.Module, folder: Path) -> Path:
    save(folder, {"models": {"0": model.state_dict()}, "step": 3})
    return folder


def as_plain_checkpoint(model: torch.nn.Module, folder: Path) -> Path:
    save(folder, {"model": model.state_dict()})
    return folder


def as_bin(model: torch.nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def as_pt(model: torch.nn.Module, folder: Path) -> Path:
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, folder / "last.pt")
    return folder / "last.pt"


def as_old_pth(model: torch.nn.Module, folder: Path) -> Path:
    path = folder / "old.pth"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    return path


def as_bin_shards(model: torch.nn.Module, folder: Path) -> Path:
    weights = model.state_dict()
    names = {k: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, k in enumerate(weights)}
    for name in set(names.values()):
        torch.save({k: v for k, v in weights.items() if names[k] == name}, folder / name)
    index = {"metadata": {}, "weight_map": names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def as_hub_snapshot(model: torch.nn.Module, folder: Path) -> Path:
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "abc123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_model(model.state_dict(), snapshot, max_shard_size=200)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"{number:064x}")
        path.symlink_to(Path("..") / ".." / "blobs" / f"{number:064x}")
    return snapshot


def as_dcp(model: torch.nn.Module, folder: Path) -> Path:
    dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id=folder, no_dist=True)
    return folder


LAYOUTS = [
    as_file, as_folder, as_shards, as_index, as_checkpoint, as_plain_checkpoint, as_bin, as_pt,
    as_old_pth, as_bin_shards, as_hub_snapshot, as_dcp,
]  # fmt: skip
Write = Callable[[torch.nn.Module, Path], Path]


@pytest.mark.parametrize("write", LAYOUTS)
def test_every_layout_is_read_in_place(write: Write, tmp_path: Path) -> None:
    model, other = trained(), Tied()
    place = write(model, tmp_path)
    weight, version = other.body.weight, other.body.weight._version
    memory = weight.data_ptr()
    assert load_model(other, place) == ([], [])
    assert same(other, model)
    assert other.head.weight is other.emb.weight
    assert other.body.weight is weight
    assert weight.data_ptr() == memory
    assert weight._version > version
    state = load_model_state(place)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def copied(place: Path, root: Path, name: str) -> str:
    """Copy what was written to a memory filesystem."""
    memory = fsspec.filesystem("memory")
    for path in root.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/{name}/{path.relative_to(root)}", path.read_bytes())
    return f"memory://{name}/{place.relative_to(root)}".removesuffix("/.")


@pytest.mark.parametrize("write", [w for w in LAYOUTS if w is not as_hub_snapshot])
def test_every_layout_is_read_from_a_url(write: Write, tmp_path: Path) -> None:
    model, other = trained(), Tied()
    url = copied(write(model, tmp_path), tmp_path, f"weights-{write.__name__}")
    load_model(other, url)
    assert same(other, model)


@pytest.mark.parametrize("write", [as_folder, as_checkpoint, as_bin])
def test_dtype_and_device(write: Write, tmp_path: Path) -> None:
    model = trained()
    place = write(model, tmp_path)
    half = Tied().to(torch.bfloat16)
    load_model(half, place)
    assert half.body.weight.dtype == torch.bfloat16
    assert torch.equal(half.body.weight.float(), model.body.weight)
    half = Tied()
    weight = half.body.weight
    load_model(half, place, dtype=lambda name: torch.float16 if name == "body.weight" else None)
    assert half.body.weight is weight
    assert (weight.dtype, half.body.bias.dtype) == (torch.float16, torch.float32)
    assert torch.equal(weight.float(), model.body.weight)
    with torch.device("meta"):
        empty = Tied()
    load_model(empty, place, dtype=torch.float16)
    assert empty.head.weight is empty.emb.weight
    assert isinstance(empty.emb.weight, torch.nn.Parameter)
    assert empty.norm.num_batches_tracked.dtype == torch.int64
    assert torch.equal(empty.body.weight.float(), model.body.weight)
    assert empty.norm.running_mean is not None
    assert empty.norm.running_mean.device.type == "cpu"


@pytest.mark.parametrize("write", [as_shards, as_checkpoint, as_bin_shards])
def test_nothing_changes_if_something_does_not_fit(write: Write, tmp_path: Path) -> None:
    place = write(trained(), tmp_path)
    wide = Tied(5)
    before = {key: value.clone() for key, value in wide.state_dict().items()}
    with pytest.raises(StateMismatchError, match=r"body\.weight is \[5, 5\], stored is \[4, 4\]"):
        load_model(wide, place)
    with pytest.raises(StateMismatchError, match=r"emb\.weight"):
        load_model(wide, place, strict=False)
    counted = Tied()
    counted.norm.num_batches_tracked = torch.tensor(0.5)
    with pytest.raises(StateMismatchError, match=r"float32, stored is torch\.int64"):
        load_model(counted, place)
    assert all(torch.equal(before[key], value) for key, value in wide.state_dict().items())
    assert not torch.equal(counted.body.weight, trained().body.weight)


class Copied(torch.nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        return {key: value.detach().clone() for key, value in state.items()}


def test_a_model_that_gives_copies_is_refused(tmp_path: Path) -> None:
    model = Copied(2, 2)
    save_model(model.state_dict(), tmp_path)
    with pytest.raises(StateMismatchError, match="weight is a copy"):
        load_model(model, tmp_path)  # else the copies would be filled, and nobody would know


def test_names_are_chosen_renamed_and_reported(tmp_path: Path) -> None:
    weights = {f"backbone.{key}": value for key, value in trained().state_dict().items()}
    weights["extra"] = torch.ones(1)
    save_model(weights, tmp_path)
    model = Tied()
    with pytest.raises(StateMismatchError, match=r"nearest: backbone\.body\.weight") as caught:
        load_model(model, tmp_path)
    assert "unexpected backbone" in str(caught.value)
    report = load_model(model, tmp_path, rename={"backbone.": ""}, strict=False)
    assert (report.missing, report.unexpected) == ([], ["extra"])
    assert same(model, trained())
    model = Tied()
    old = model.emb.weight.detach().clone()
    assert load_model(model, tmp_path, only="*body*", rename={"backbone.": ""}, strict=False)
    assert torch.equal(model.body.weight, trained().body.weight)
    assert torch.equal(model.emb.weight, old)


def test_a_tied_name_is_enough_whichever_was_kept(tmp_path: Path) -> None:
    weights = trained().state_dict()
    del weights["emb.weight"]
    save_file({k: v.clone() for k, v in weights.items()}, tmp_path / "model.safetensors")
    model = Tied()
    assert load_model(model, tmp_path) == ([], [])
    assert same(model, trained())
    assert model.head.weight is model.emb.weight


@pytest.mark.slow  # importing the compiler takes seconds
def test_wrappers_are_looked_through(tmp_path: Path) -> None:
    save_model(trained().state_dict(), tmp_path)
    model = Tied()
    load_model(torch.compile(model), tmp_path)  # type: ignore[arg-type]
    assert same(model, trained())


def test_one_of_several_models(tmp_path: Path) -> None:
    models = {str(n): {"w": torch.full((3,), float(n))} for n in range(2)}
    save(tmp_path, {"models": models})
    assert load_model_state(tmp_path, model_index=1)["w"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointNotFoundError, match="no model 2"):
        load_model_state(tmp_path, model_index=2)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_tensors_of_many_sizes_arrive_bitwise(
    tmp_path: Path, staged: bool, into: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import checkpoint_io.weights.safetensors as source
    import checkpoint_io.weights.source

    monkeypatch.setattr(source, "_SPAN", 1000)  # so that small tensors cross its borders
    monkeypatch.setattr(source, "can_read_into", lambda: into)
    monkeypatch.setattr(source, "_GAP", 100)
    monkeypatch.setattr(checkpoint_io.weights.source, "STAGING", 500)
    monkeypatch.setattr(source, "STAGING", 500)
    generator = torch.Generator().manual_seed(0)
    sizes = [(), (0,), (1,), (3, 0), (250,), (251,), (17, 31), (999, 2), (5, 4, 3)]
    weights = {
        f"t{n}": torch.randn(size, generator=generator, dtype=torch.float64)
        for n, size in enumerate(sizes)
    }
    save_model(weights, tmp_path, max_shard_size=9000)
    model = torch.nn.Module()
    for name, value in weights.items():
        target = torch.full_like(value, -1.0)
        if staged:  # neither another dtype nor another order of elements can be read straight
            target = target.float() if value.dim() < 2 else target.mT.contiguous().mT
        model.register_buffer(name, target)
    load_model(model, tmp_path)
    for name, value in weights.items():
        assert torch.equal(model.get_buffer(name), value.to(model.get_buffer(name).dtype)), name


def test_a_read_that_breaks_off_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoint_io.storage.local import LocalStore

    save_model(trained().state_dict(), tmp_path, max_shard_size=200)
    fetch_into = LocalStore.fetch_into
    calls = iter(range(100))

    def failing(self: LocalStore, spans: Any, views: Any, filled: Any) -> None:
        if next(calls) == 1:
            raise OSError(5, "Input/output error")
        fetch_into(self, spans, views, filled)

    monkeypatch.setattr(LocalStore, "fetch_into", failing)
    with pytest.raises(TornLoadError, match="load weights again"):
        load_model(Tied(), tmp_path)


def test_a_folder_may_be_named_like_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "net.bin"
    save_model({"w": torch.ones(2)}, folder)
    for url in (str(folder), f"file://{folder}"):
        assert torch.equal(load_model_state(url)["w"], torch.ones(2))


def test_what_is_no_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="check the path"):
        load_model(Tied(), tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match="check the path"):
        load_model(Tied(), tmp_path / "nothing.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"")
    (tmp_path / "b.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"a\.safetensors, b\.safetensors"):
        load_model(Tied(), tmp_path)


def test_a_file_that_was_named_may_be_a_link(tmp_path: Path) -> None:
    place = as_file(trained(), tmp_path)
    (tmp_path / "link.safetensors").symlink_to(place)
    model = Tied()
    load_model(model, tmp_path / "link.safetensors")
    assert same(model, trained())


def test_a_pattern_that_selects_nothing_is_an_error(tmp_path: Path) -> None:
    save_model(trained().state_dict(), tmp_path)
    with pytest.raises(StateMismatchError, match=r"'bodi\.weight' \(nearest: body\.weight\)"):
        load_model(Tied(), tmp_path, only=["norm.*", "bodi.weight"])
    report = load_model(Tied(), tmp_path, only=["norm.*", "bodi.weight"], strict=False)
    assert report == (["bodi.weight"], [])


def test_patterns_from_a_generator(tmp_path: Path) -> None:
    save_model(trained().state_dict(), tmp_path)
    model = Tied()
    load_model(model, tmp_path, only=(name for name in ["body.*"]))
    assert torch.equal(model.body.weight, trained().body.weight)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("as_layout", [as_file, as_checkpoint, as_bin])
def test_different_values_for_tied_names_are_refused(
    tmp_path: Path, as_layout: Callable[[torch.nn.Module, Path], Path], strict: bool
) -> None:
    other = trained()
    other.head.weight = torch.nn.Parameter(other.emb.weight + 1)
    path, model = as_layout(other, tmp_path), trained()
    with pytest.raises(StateMismatchError, match=r"emb\.weight and head\.weight .*tied"):
        load_model(model, path, strict=strict)
    assert same(model, trained())


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "x-00001-of-00010.bin"])
def test_a_shard_left_alone_is_not_the_model(tmp_path: Path, name: str) -> None:
    weights = {"body.weight": torch.ones(4, 4)}
    write = torch.save if name.endswith(".bin") else save_file
    write(weights, tmp_path / name)
    with pytest.raises(CheckpointNotFoundError, match="name the file"):
        load_model_state(tmp_path)
    assert load_model_state(tmp_path / name).keys() == weights.keys()


def test_dtypes_are_settled_before_anything_changes(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    save_model(model.state_dict(), tmp_path)

    def failing(name: str) -> torch.dtype:
        if name.startswith("b."):
            raise RuntimeError("no such dtype")
        return torch.float64

    with pytest.raises(RuntimeError, match="no such dtype"):
        load_model(model, tmp_path, dtype=failing)
    assert model["a"].weight.dtype == torch.float32
