"""A checkpoint that an earlier layout of the code wrote is loaded, and trained on as there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.data.make_checkpoint_before_rooms import DATA, resume, resume_by_seed

CLOSE = {"rel": 1e-4, "abs": 1e-5}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return json.loads((DATA / "expected.json").read_text(encoding="utf-8"))["one"][0]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return resume_by_seed(str(DATA / "one"), str(tmp_path_factory.mktemp("resumed")))


def test_what_is_loaded_is_the_same_to_the_bit(resumed, expected):
    # The checkpoint that was the best is not there any more.
    assert resumed["loaded"] == {**expected["loaded"], "saver": None}


def test_the_rest_of_the_epoch_and_the_next_one_have_the_same_samples(resumed, expected):
    assert len(expected["batches"]) == 8 + 12
    assert resumed["batches"] == expected["batches"]


def test_training_goes_on_as_it_did(resumed, expected):
    # Other CPUs and versions of torch round differently.
    assert resumed["losses"] == pytest.approx(expected["losses"], **CLOSE)
    assert resumed["history"] == pytest.approx(expected["history"], **CLOSE)
    assert (resumed["steps"], resumed["last_lr"]) == (expected["steps"], expected["last_lr"])
    kept = load_file(DATA / "one.safetensors")
    assert set(resumed["tensors"]) == set(kept)
    for name, tensor in kept.items():
        now = torch.tensor(resumed["tensors"][name])
        torch.testing.assert_close(now, tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_its_open_epoch_keeps_its_order_with_a_warning_and_the_next_is_the_samplers(
    expected, tmp_path
):
    with pytest.warns(UserWarning, match="an older version, which chose the orders of epochs"):
        now = resume(str(DATA / "one"), str(tmp_path))
    assert now["batches"][:8] == expected["batches"][:8]
    assert now["batches"][8:] != expected["batches"][8:]
    assert sorted(n for batch in now["batches"][8:] for n in batch) == list(range(48))


def test_nothing_of_the_machine_that_made_it_is_in_the_checkpoint():
    for path in Path(DATA).rglob("*"):
        if path.is_file():
            assert path.stat().st_size < 20_000
            assert not [word for word in (b"/tmp", b"/home", b"/root") if word in path.read_bytes()]
