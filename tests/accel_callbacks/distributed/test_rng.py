"""The state of the random generators: a few values, restored from what older versions saved too."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.distributed.rng import capture_rng, restore_rng
from checkpoint_io import load

CPU = torch.device("cpu")


def draws() -> list[Any]:
    numbers = [random.random(), random.gauss(0, 1), *np.random.rand(3), np.random.randn()]
    return [*numbers, *torch.rand(3).tolist()]


def captured_by_older_versions() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
    }


def decoded_by_older_versions() -> dict[str, Any]:
    """As above, but lists for what JSON does not keep as a tuple."""
    version, words, gauss = random.getstate()
    return {**captured_by_older_versions(), "python": [version, list(words), gauss]}


@pytest.fixture(params=[False, True], ids=["even", "odd"])
def halfway(request):
    """Both generators of Python and NumPy hold the second number of a pair, or none."""
    before = capture_rng(CPU)
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    if request.param:
        random.gauss(0, 1)
        np.random.randn()
    yield
    restore_rng(before, CPU)


@pytest.mark.parametrize(
    "capture",
    [lambda: capture_rng(CPU), captured_by_older_versions, decoded_by_older_versions],
    ids=["now", "older", "older, from JSON"],
)
def test_what_was_captured_is_drawn_again(halfway, capture):
    state = capture()
    first = draws()
    assert draws() != first
    restore_rng(state, CPU)
    assert draws() == first


def test_a_checkpoint_holds_it_in_a_few_values_and_in_no_file_of_tensors(halfway, tmp_path):
    accel = Accelerator(cpu=True)
    accel.prepare(torch.nn.Linear(1, 1))
    accel.save_state(tmp_path / "c")
    first = draws()
    saved = load(tmp_path / "c")
    rng = saved.local_state["rng"]
    assert len(rng["python"]) == 3
    assert [type(rng["python"][1]), type(rng["torch"]), type(rng["numpy"][1])] == [bytes] * 3
    kinds = [(entry.kind, entry.name.rsplit("-", 1)[-1]) for entry in saved.manifest.files]
    assert sorted(kinds) == [
        ("objects", "r00000.json"),
        ("objects", "shared.json"),
        ("tensors", "00001.safetensors"),
    ]
    accel.load_state(tmp_path / "c")
    assert draws() == first


def test_another_bit_generator_in_the_place_of_numpys_is_kept():
    """`get_state` warns of it, and returns a dict, which is kept as it is."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.warns(RuntimeWarning, match="legacy"):
            state = capture_rng(CPU)
        first = np.random.rand(3).tolist()
        restore_rng(state, CPU)
        assert np.random.rand(3).tolist() == first
    finally:
        np.random.set_bit_generator(before)
