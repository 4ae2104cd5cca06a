"""Model weights on two processes: sharded parameters are gathered to save, cut to load."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import checkpoint_io
from checkpoint_io import load_model, load_model_state, save_model
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def full(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(shape, generator=generator)


SHAPES = {"rows.weight": (7, 4), "columns.weight": (4, 5), "rows.bias": (7,), "plain.weight": (3,)}


class Part(torch.nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor))


def sharded_model(zero: bool = False) -> torch.nn.Module:
    """A model with row-wise, column-wise, uneven, replicated and plain parameters, and a tie."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from accel_callbacks import Accelerator

    Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (2,))

    def spread(name: str, placement: Any) -> torch.Tensor:
        value = full(name, *SHAPES[name])
        return distribute_tensor(torch.zeros_like(value) if zero else value, mesh, [placement])

    model = torch.nn.Module()
    model.rows = Part(weight=spread("rows.weight", Shard(0)), bias=spread("rows.bias", Shard(0)))
    model.columns = Part(weight=spread("columns.weight", Shard(1)))
    model.copied = Part(weight=spread("rows.bias", Replicate()))
    plain = full("plain.weight", *SHAPES["plain.weight"])
    model.plain = Part(weight=torch.zeros_like(plain) if zero else plain)
    model.tied = Part()
    model.tied.register_parameter("weight", model.rows.weight)
    return model


def wanted() -> dict[str, torch.Tensor]:
    weights = {name: full(name, *shape) for name, shape in SHAPES.items()}
    return {**weights, "copied.weight": weights["rows.bias"], "tied.weight": weights["rows.weight"]}


def save_sharded(path: str, limit: str) -> list[str]:
    return save_model(sharded_model().state_dict(), path, max_shard_size=limit)


@pytest.mark.parametrize("limit", ["5GB", "100B"])
def test_sharded_parameters_are_saved_whole(pool: Any, tmp_path: Path, limit: str) -> None:
    first, second = pool.run(save_sharded, str(tmp_path), limit)
    assert first == second
    assert (len(first) == 1) == (limit == "5GB")
    state = load_model_state(tmp_path)
    weights = wanted()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[key], value) for key, value in weights.items())
    stored = {key for name in first if "index" not in name for key in load_file(tmp_path / name)}
    assert len(stored & {"rows.weight", "tied.weight"}) == 1


def load_sharded(path: str, only: str | None = None) -> dict[str, bool]:
    model, weights = sharded_model(zero=True), wanted()
    parts = {name: p.data_ptr() for name, p in model.named_parameters() if name == "plain.weight"}
    load_model(model, path, only=only)
    assert all(
        p.data_ptr() == parts.get(name, p.data_ptr()) for name, p in model.named_parameters()
    )
    return {
        name: torch.equal(
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter,
            weights[name],
        )
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def save_dcp(path: str) -> None:
    dcp.save({"model": sharded_model().state_dict()}, checkpoint_id=path)


@pytest.mark.parametrize("kind", ["single", "shards", "checkpoint", "torch", "dcp"])
def test_sharded_parameters_take_their_part(pool: Any, tmp_path: Path, kind: str) -> None:
    weights = wanted()
    if kind == "checkpoint":
        checkpoint_io.save(tmp_path, {"models": {"0": weights}})
    elif kind == "torch":
        torch.save(weights, tmp_path / "pytorch_model.bin")
    elif kind == "dcp":
        pool.run(save_dcp, str(tmp_path))
        state = load_model_state(tmp_path)
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[key], value) for key, value in weights.items())
    else:
        save_model(weights, tmp_path, max_shard_size="100B" if kind == "shards" else "5GB")
    for loaded in pool.run(load_sharded, str(tmp_path)):
        assert loaded == dict.fromkeys(weights, True)


def save_different(path: str) -> None:
    model = sharded_model()
    if torch.distributed.get_rank() == 1:
        model.columns.register_parameter("more", model.columns.weight)
        del model.columns.weight
    save_model(model.state_dict(), path)


def test_ranks_with_different_tensors_are_an_error_on_all(pool: Any, tmp_path: Path) -> None:
    for kind, text in pool.outcomes(save_different, str(tmp_path)):
        assert kind == "CheckpointError"
        assert "different DTensors" in text
    assert not list(tmp_path.iterdir())


def save_to_a_broken_place(path: str) -> None:
    from checkpoint_io.storage.local import LocalStore

    real = LocalStore.create

    def failing(self: LocalStore, name: str, size: int | None = None) -> Any:
        raise OSError(28, "No space left on device")  # the others are gathering already

    LocalStore.create = failing  # type: ignore[method-assign]
    try:
        save_model(sharded_model().state_dict(), path)
    finally:
        LocalStore.create = real  # type: ignore[method-assign]


def save_to_a_file(path: str) -> None:
    save_model(sharded_model().state_dict(), path)


def test_a_failure_of_the_writing_rank_is_one_of_all(pool: Any, tmp_path: Path) -> None:
    for kind, text in pool.outcomes(save_to_a_broken_place, str(tmp_path / "a")):
        assert kind == "CheckpointError"
        assert "rank 0: OSError" in text
        assert "No space left" in text
    (tmp_path / "b").write_text("no folder")  # fails before the first tensor is gathered
    for kind, text in pool.outcomes(save_to_a_file, str(tmp_path / "b")):
        assert kind == "CheckpointError", text
    assert pool.run(save_sharded, str(tmp_path / "c"), "5GB")[0] == ["model.safetensors"]


def load_here(path: str, broadcast: bool, dtype: str | None = None) -> list[Any]:
    from accel_callbacks import Accelerator, load_checkpoint_in_model

    accel = Accelerator(cpu=True, timeout=BOUND)
    torch.manual_seed(accel.process_index)
    model = torch.nn.Linear(3, 2)
    head = torch.nn.Linear(2, 1)
    both = torch.nn.Sequential(model, head)
    if accel.process_index and broadcast:
        path = "/nowhere/at/all"  # only rank 0 may look
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_checkpoint_in_model(both, path, broadcast_from_rank0=broadcast, dtype=dtype)
    return [model.weight.tolist(), model.bias.sum().item(), str(model.weight.dtype)]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_rank_0_reads_for_all(pool: Any, tmp_path: Path, dtype: str | None) -> None:
    weights = {"0.weight": torch.ones(2, 3), "0.bias": torch.zeros(2)}
    save_model(weights, tmp_path)
    first, second = pool.run(load_here, str(tmp_path), True, dtype)
    assert first == second == [torch.ones(2, 3).tolist(), 0.0, f"torch.{dtype or 'float32'}"]


def test_a_failure_of_rank_0_is_one_of_all(pool: Any, tmp_path: Path) -> None:
    outcomes = pool.outcomes(load_here, str(tmp_path / "absent"), True)
    assert [kind for kind, _ in outcomes] == ["CheckpointNotFoundError", "RemoteError"]


def broadcast_to_shards(path: str) -> None:
    from accel_callbacks import load_checkpoint_in_model

    load_checkpoint_in_model(sharded_model(), path, broadcast_from_rank0=True)


def test_sharded_parameters_are_not_sent(pool: Any, tmp_path: Path) -> None:
    for kind, text in pool.outcomes(broadcast_to_shards, str(tmp_path)):
        assert kind == "ValueError"
        assert "each process then reads its own part" in text


def without_memory_on_rank_1(path: str) -> None:
    from accel_callbacks import Accelerator, load_checkpoint_in_model

    accel = Accelerator(cpu=True, timeout=BOUND)
    width = 3 if accel.is_main_process else 1 << 50
    load_checkpoint_in_model(
        torch.nn.Linear(width, 2, device="meta"), path, broadcast_from_rank0=True
    )


def test_no_memory_on_one_rank_is_an_error_on_all(pool: Any, tmp_path: Path) -> None:
    save_model({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, tmp_path)
    outcomes = pool.outcomes(without_memory_on_rank_1, str(tmp_path))
    assert [kind for kind, _ in outcomes] == ["RemoteError", "RuntimeError"]
