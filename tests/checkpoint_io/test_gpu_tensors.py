"""Saves and loads of tensors on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from checkpoint_io import BackgroundSaver, load, open_checkpoint, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20


def busy() -> None:
    """Queue work that a copy has to wait for."""
    torch.cuda._sleep(int(3e8))


def test_a_save_in_the_background_is_of_the_moment_whatever_is_queued_around_it(
    tmp_path: Path,
) -> None:
    weights = [torch.full((4 * MIB,), float(index), device="cuda") for index in range(4)]
    saver = BackgroundSaver()
    for turn in range(3):
        busy()
        for one in weights:
            one.add_(1)
        saver.save(f"{tmp_path}/{turn}", {str(n): one for n, one in enumerate(weights)})
        for one in weights:
            one.mul_(-1)
        for one in weights:
            one.mul_(-1)
        saver.wait()
        found = load(f"{tmp_path}/{turn}").state
        assert all(bool((found[str(n)] == float(n + turn + 1)).all()) for n in range(4))
    saver.close()


def test_workers_that_are_forked_between_saves_leave_the_copies_alone(tmp_path: Path) -> None:
    weight, count = torch.zeros(16 * MIB, device="cuda"), torch.zeros(MIB)
    saver, workers = BackgroundSaver(), []
    for turn in range(4):
        weight.fill_(turn)
        count.fill_(turn)
        saver.save(f"{tmp_path}/{turn}", {"weight": weight, "count": count})
        saver.wait()
        found = load(f"{tmp_path}/{turn}").state
        assert bool((found["weight"] == turn).all())
        assert bool((found["count"] == turn).all())
        workers.append(iter(DataLoader(list(range(8)), num_workers=2)))  # alive at the next save
        assert next(workers[-1]).tolist() == [0]
    saver.close()


def test_a_synchronous_save_reads_every_kind_of_tensor_behind_queued_work(tmp_path: Path) -> None:
    state = {
        "large": torch.arange(20 * MIB, dtype=torch.int32, device="cuda"),
        "transposed": torch.randn(3000, 2001, device="cuda").t(),
        "rows": torch.randn(4, 6 * MIB, device="cuda")[:, ::2],
        "bf16": torch.randn(5 * MIB + 3, dtype=torch.bfloat16, device="cuda"),
        "bool": torch.rand(3 * MIB, device="cuda") > 0.5,
        "complex": torch.randn(2 * MIB, dtype=torch.complex64, device="cuda").conj(),
        "small": torch.randn(7, device="cuda"),
        "scalar": torch.tensor(3.0, device="cuda"),
    }
    busy()
    for name in ("large", "bf16"):
        state[name].add_(1)
    save(tmp_path / "c", state)
    found = load(tmp_path / "c").state
    assert all(torch.equal(found[name], one.cpu()) for name, one in state.items())


def test_tensors_are_read_in_place(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(1000, 1001, device="cuda"),
        "b": torch.randn(7, dtype=torch.bfloat16, device="cuda"),
        "c": torch.tensor(3.0, device="cuda"),
    }
    save(tmp_path / "c", state)
    target = {name: torch.empty_like(one) for name, one in state.items()}
    target["a"] = torch.empty(1001, 1000, device="cuda").t()
    reader = open_checkpoint(tmp_path / "c")
    reader.read([(reader[name], target[name]) for name in target])
    assert all(torch.equal(state[name], target[name]) for name in target)
