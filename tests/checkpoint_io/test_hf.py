from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import load_model as load_with_safetensors

from checkpoint_io import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedStateError,
    load_model,
    load_model_state,
    save_model,
)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(10, 4)
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight


def test_single_file_opens_with_the_stock_loader(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    assert save_model(model.state_dict(), tmp_path) == ["model.safetensors"]
    missing, unexpected = load_with_safetensors(other, tmp_path / "model.safetensors")
    assert not missing
    assert not unexpected
    assert torch.equal(other.head.weight, model.emb.weight)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "emb.weight"}
        assert "head.weight" not in file.keys()  # noqa: SIM118
    state = load_model_state(tmp_path)
    assert state["head.weight"] is state["emb.weight"]
    assert set(state) == set(model.state_dict())


def test_shards_and_index(tmp_path: Path) -> None:
    weights = {f"layer.{i}": torch.randn(10, 10) for i in range(7)}
    weights["tied"] = weights["layer.0"]
    names = save_model(weights, tmp_path, max_shard_size="1KB", metadata={"by": "me"})
    assert names == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)] + [
        "model.safetensors.index.json"
    ]
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"]["total_size"] == 7 * 400
    assert set(index["weight_map"]) == set(weights) - {"tied"}
    for key, name in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / name)[key], weights[key])
    state = load_model_state(tmp_path)
    assert all(torch.equal(state[key], weights[key]) for key in weights)


def test_saving_again_leaves_nothing_stale(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.full((100,), float(i)) for i in range(6)}
    (tmp_path / "config.json").write_text("{}")
    for size in (400, 800, "5GB", 1200):
        names = save_model(weights, tmp_path, max_shard_size=size)
        assert {p.name for p in tmp_path.iterdir()} == {*names, "config.json"}
        assert set(load_model_state(tmp_path)) == set(weights)


def test_failure_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import checkpoint_io.storage.local

    weights = {f"w{i}": torch.zeros(100) for i in range(3)}
    save_model(weights, tmp_path, max_shard_size=400)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    calls = iter([None, OSError(28, "No space left on device")])

    def failing(descriptor: int) -> None:
        if error := next(calls):
            raise error

    monkeypatch.setattr(checkpoint_io.storage.local, "sync_file", failing)
    with pytest.raises(OSError, match="No space"):
        save_model({key: value + 1 for key, value in weights.items()}, tmp_path, max_shard_size=400)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("value", [1, None, torch.ones(2).to_sparse()], ids=str)
def test_what_is_no_weight_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"state_dict\['x'\]"):
        save_model({"w": torch.ones(1), "x": value}, tmp_path)
    with pytest.raises(UnsupportedStateError):
        save_model({"__metadata__": torch.ones(1)}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_reads_what_others_wrote(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(weights, tmp_path / "model.safetensors")
    state = load_model_state(tmp_path)
    assert all(torch.equal(state[key], weights[key]) for key in weights)
    with pytest.raises(CheckpointNotFoundError, match="check the path"):
        load_model_state(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["../model.safetensors", "/x.safetensors", "a.bin", 3])
def test_index_may_not_point_elsewhere(tmp_path: Path, name: Any) -> None:
    save_model({"w": torch.ones(1)}, tmp_path)
    place = tmp_path / "m"
    place.mkdir()
    index = {"weight_map": {"w": name}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match="weight_map"):
        load_model_state(place)


def test_missing_shard_and_hostile_header(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.zeros(100) for i in range(3)}
    names = save_model(weights, tmp_path, max_shard_size=400)
    (tmp_path / names[1]).unlink()
    with pytest.raises(CorruptCheckpointError, match=names[1]):
        load_model_state(tmp_path)
    single = tmp_path / "model.safetensors"
    for header in (
        b"",
        b"[]",
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"w":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,-8]}}',
    ):
        single.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
            load_model_state(tmp_path)
    single.write_bytes(b"\xff" * 20)
    with pytest.raises(CorruptCheckpointError, match="header"):
        load_model_state(tmp_path)


def tiny_gpt2() -> torch.nn.Module:
    """A model whose head is tied to its embedding."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, n_inner=20
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("limit", ["5GB", "5KB"])
def test_transformers_opens_what_is_saved(tmp_path: Path, limit: str) -> None:
    model = tiny_gpt2()
    transformers = pytest.importorskip("transformers")
    names = save_model(model.state_dict(), tmp_path, max_shard_size=limit)
    assert (len(names) > 2) == (limit == "5KB")
    model.config.save_pretrained(tmp_path)
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert opened.lm_head.weight is opened.transformer.wte.weight
    tokens = torch.arange(8).reshape(1, 8)
    assert torch.equal(model(tokens).logits, opened.eval()(tokens).logits)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base.wte.weight, model.transformer.wte.weight)


@pytest.mark.parametrize("limit", ["10MB", "10KB"])
def test_what_transformers_saves_is_opened(tmp_path: Path, limit: str) -> None:
    model, other = tiny_gpt2(), tiny_gpt2()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path, max_shard_size=limit)
    assert load_model(other, tmp_path) == ([], [])
    assert other.lm_head.weight is other.transformer.wte.weight
    tokens = torch.arange(8).reshape(1, 8)
    assert torch.equal(model(tokens).logits, other(tokens).logits)


def test_a_group_makes_it_collective_and_only_rank_0_writes(tmp_path: Path) -> None:
    class Second:
        """The second of two ranks, whose first one has already answered."""

        rank, world_size = 1, 2

        def all_gather_object(self, obj: Any) -> list[Any]:
            return [obj, obj]

        def broadcast_object(self, obj: Any, src: int = 0) -> Any:
            return []

    save_model({"w": torch.ones(2)}, tmp_path / "m", group=Second())
    assert not (tmp_path / "m").exists()


def test_progress_counts_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    save_model({"w": torch.ones(1000)}, tmp_path, progress=True)
    assert "saving" in capsys.readouterr().err
