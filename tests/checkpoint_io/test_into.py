"""Loading into existing tensors: in place, all or nothing where that can be, and said where not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint_io.loader.load
from checkpoint_io import (
    Checkpoint,
    CorruptCheckpointError,
    StateMismatchError,
    TornLoadError,
    load,
    save,
    verify,
)
from tests.checkpoint_io.handmade import handmade, rows, whole

Flip = Callable[[Path, int], None]


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 30)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def tree_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"models": [model.state_dict()], "optimizers": {"0": optimizer.state_dict()}}


def test_a_model_and_its_optimizer_are_filled_in_place(tmp_path: Path) -> None:
    model, optimizer = trained(3)
    save(tmp_path, {**tree_of(model, optimizer), "step": 3, "rng": torch.arange(4)})
    other, its_optimizer = trained(1)
    tree = tree_of(other, its_optimizer)
    pointers = [p.data_ptr() for p in other.parameters()]
    checkpoint = load(tmp_path, into=tree)
    assert [p.data_ptr() for p in other.parameters()] == pointers
    for mine, saved in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, saved)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(its_optimizer.state[mine][name], optimizer.state[saved][name])
    assert checkpoint.state["models"][0]["0.weight"] is tree["models"][0]["0.weight"]
    # what into= does not mention is loaded as ever, plain values come back in the state
    assert checkpoint.state["step"] == 3
    assert torch.equal(checkpoint.state["rng"], torch.arange(4))
    assert checkpoint.state["optimizers"]["0"]["param_groups"][0]["lr"] == 0.1
    assert checkpoint.missing == checkpoint.unexpected == ()


@pytest.mark.parametrize("strict", [True, False])
def test_names_must_fit_or_are_listed(tmp_path: Path, strict: bool) -> None:
    saved = {"layer.weight": torch.ones(2), "layer.bias": torch.ones(2), "head": torch.ones(2)}
    save(tmp_path, {"model": saved, "optimizer": {"m": torch.ones(2)}})
    mine = {name: torch.zeros(2) for name in ("layer.weight", "layer.biass", "head")}
    if strict:
        with pytest.raises(StateMismatchError, match=r"missing model/layer\.biass \(nearest: "):
            load(tmp_path, into={"model": mine})
        assert not any(value.any() for value in mine.values())
        return
    checkpoint = load(tmp_path, into={"model": mine}, strict=False)
    assert checkpoint.missing == ("model/layer.biass",)
    assert checkpoint.unexpected == ("model/layer.bias",)
    assert [bool(value.any()) for value in mine.values()] == [True, False, True]
    assert checkpoint.state["model"]["layer.bias"].read().all()  # still a view
    assert checkpoint.state["optimizer"]["m"].all()


@pytest.mark.parametrize(
    ("name", "target"),
    [("b", torch.zeros(4)), ("b", torch.zeros(3, dtype=torch.float16)), ("b", np.zeros(3))],
)
def test_nothing_changes_when_one_target_does_not_fit(
    tmp_path: Path, name: str, target: Any
) -> None:
    save(tmp_path, {"a": torch.ones(3), "b": torch.ones(3)})
    fine = torch.zeros(3)
    with pytest.raises(StateMismatchError, match="tensor b was saved"):
        load(tmp_path, into={"a": fine, name: target})
    assert not fine.any()


def test_cast_and_numpy_targets(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.arange(3.0), "b": np.arange(4), "c": torch.tensor(2.5)})
    half, array = torch.zeros(3, dtype=torch.float16), np.zeros(4, dtype=np.int64)
    number = torch.tensor(0.0)
    state = load(tmp_path, into={"a": half, "b": array, "c": number}, cast=True).state
    assert half.tolist() == [0, 1, 2]
    assert array.tolist() == [0, 1, 2, 3]
    assert number == 2.5
    assert state["b"] is array
    array.flags.writeable = False
    with pytest.raises(StateMismatchError, match="read-only"):
        load(tmp_path, into={"a": half, "b": array, "c": number}, cast=True)


def test_plain_values_in_into_are_placeholders(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(2), "t": torch.tensor(5), "epoch": 3})
    given = {"a": torch.zeros(2), "t": None, "epoch": 0}
    state = load(tmp_path, into=given).state
    assert given["epoch"] == 0
    assert (state["epoch"], state["t"]) == (3, torch.tensor(5))


def test_tied_tensors(tmp_path: Path) -> None:
    weight = torch.randn(5, 5)
    save(tmp_path / "tied", {"emb": weight, "head": weight})
    save(tmp_path / "apart", {"emb": weight, "head": weight + 1})
    save(tmp_path / "equal", {"emb": weight, "head": weight.clone()})
    mine = torch.zeros(5, 5)
    for name in ("tied", "equal"):
        state = load(tmp_path / name, into={"emb": mine, "head": mine}).state
        assert torch.equal(mine, weight)
        assert state["emb"] is state["head"] is mine
        mine.zero_()
    with pytest.raises(StateMismatchError, match=r"emb and head are one tensor .*tied"):
        load(tmp_path / "apart", into={"emb": mine, "head": mine})
    assert not mine.any()
    other = torch.zeros(5, 5)
    load(tmp_path / "tied", into={"emb": mine, "head": other})
    assert torch.equal(mine, weight)
    assert torch.equal(other, weight)


def big(folder: Path, flip_bit: Flip) -> dict[str, torch.Tensor]:
    """A checkpoint of two tensors in different spans, the second of them damaged."""
    state = {"a": torch.ones(5 << 20), "b": torch.ones(5 << 20)}
    save(folder, state)
    file = next(folder.glob("*.safetensors"))
    flip_bit(file, file.stat().st_size - 1)
    return {key: torch.zeros_like(value) for key, value in state.items()}


def test_damage_never_reaches_a_target_and_a_torn_load_is_said(
    tmp_path: Path, flip_bit: Flip
) -> None:
    targets = big(tmp_path, flip_bit)
    with pytest.raises(TornLoadError, match=r"mixture.*checksum differs.*in tensor b") as caught:
        load(tmp_path, into=targets)
    assert isinstance(caught.value.__cause__, CorruptCheckpointError)
    assert not targets["b"][-(1 << 18) :].any()
    assert (targets["a"][:100] == 1).all()


def test_verify_full_finds_it_before_anything_changes(tmp_path: Path, flip_bit: Flip) -> None:
    targets = big(tmp_path, flip_bit)
    with pytest.raises(CorruptCheckpointError, match="in tensor b") as caught:
        load(tmp_path, into=targets, verify="full")
    assert not isinstance(caught.value, TornLoadError)
    assert not any(value.any() for value in targets.values())
    load(tmp_path, into={"a": targets["a"]}, only="a")
    assert targets["a"].all()


def test_verify_sizes_takes_the_bytes_as_they_are(tmp_path: Path, flip_bit: Flip) -> None:
    targets = big(tmp_path, flip_bit)
    load(tmp_path, into=targets, verify="sizes")
    assert targets["b"][-1] != 1
    with pytest.raises(ValueError, match="parts, full, sizes"):
        load(tmp_path, verify="all")  # type: ignore[arg-type]


def test_damage_in_the_first_bytes_leaves_the_targets_whole(tmp_path: Path, flip_bit: Flip) -> None:
    save(tmp_path, {"a": torch.ones(8)})
    file = next(tmp_path.glob("*.safetensors"))
    flip_bit(file, file.stat().st_size - 1)
    target = torch.zeros(8)
    with pytest.raises(CorruptCheckpointError) as caught:
        load(tmp_path, into={"a": target})
    assert not isinstance(caught.value, TornLoadError)
    assert not target.any()


@pytest.mark.parametrize("with_into", [True, False])
def test_a_save_that_replaces_it_meanwhile_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_into: bool
) -> None:
    save(tmp_path, {"a": torch.zeros(8), "step": 1})
    real, calls = checkpoint_io.loader.load.read_checkpoint, []

    def after_another_save(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            save(tmp_path, {"a": torch.ones(8), "step": 2})
        return real(*arguments)

    monkeypatch.setattr(checkpoint_io.loader.load, "read_checkpoint", after_another_save)
    target = torch.zeros(8)
    checkpoint: Checkpoint = load(tmp_path, into={"a": target} if with_into else None)
    assert checkpoint.state["step"] == 2
    assert checkpoint.state["a"].all()
    assert bool(target.any()) is with_into
    assert len(calls) == 2


def test_chunks_of_many_writers_fill_one_target(tmp_path: Path) -> None:
    tensor = torch.randn(50, 40, 3)
    other = torch.arange(7)
    parts = {"t": (tensor, rows(tensor, 3, 17, 18)[::-1]), "o": (other, whole(other))}
    place = handmade(tmp_path, parts)
    verify(place)
    target = torch.zeros(50, 3, 40).transpose(1, 2)
    state = load(place, into={"t": target, "o": None}).state
    assert torch.equal(target, tensor)
    assert torch.equal(state["o"], other)
    assert torch.equal(load(place).state["t"], tensor)


def test_into_must_be_a_dict(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(1)})
    with pytest.raises(TypeError, match="a dict like the saved state"):
        load(tmp_path, into=torch.ones(1))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_targets_on_a_gpu(tmp_path: Path) -> None:
    state = {"big": torch.randn(3000, 3000), "half": torch.randn(70).half(), "n": torch.tensor(3)}
    save(tmp_path, state)
    mine = {
        "big": torch.zeros(3000, 3000, device="cuda").t(),
        "half": torch.zeros(70, dtype=torch.float16, device="cuda"),
        "n": torch.tensor(0, device="cuda"),
    }
    load(tmp_path, into=mine)
    assert all(torch.equal(mine[key].cpu(), state[key]) for key in state)


MEMORY = """
import sys, torch
from checkpoint_io import load, save

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

save(sys.argv[1], {"a": torch.ones(64 << 20), "b": torch.ones(8192, 8192)})
into = {"a": torch.zeros(64 << 20), "b": torch.full((8192, 8192), 0.5).t()}
open("/proc/self/clear_refs", "w").write("5")
before = peak()
load(sys.argv[1], into=into)
assert into["a"].all() and into["b"].all()
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_no_second_copy_in_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256 << 20  # of 512 MiB


def test_patterns_from_a_generator(tmp_path: Path) -> None:
    save(tmp_path / "c", {"m": {"a": torch.ones(2), "b": torch.ones(2)}})
    target = torch.zeros(2)
    load(tmp_path / "c", into={"m": {"a": target}}, only=(name for name in ["m/a"]))
    assert target.tolist() == [1.0, 1.0]
    state = load(tmp_path / "c", only=(name for name in ["m/a"])).state
    assert torch.equal(state["m"]["a"], torch.ones(2))


def test_what_is_tied_to_a_converted_target_keeps_its_dtype(tmp_path: Path) -> None:
    weight = torch.tensor([1.0, 1.0 + 2**-20])
    save(tmp_path / "c", {"m": {"w": weight}, "average": {"w": weight}})
    into = {"m": {"w": torch.zeros(2, dtype=torch.bfloat16)}}
    state = load(tmp_path / "c", into=into, cast=True).state
    assert state["m"]["w"].dtype == torch.bfloat16
    assert torch.equal(state["average"]["w"], weight)
