"""A checkpoint that an earlier layout of the code wrote on two processes is loaded on two."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.data.make_checkpoint_before_rooms import DATA, resume_by_seed

pytestmark = pytest.mark.distributed

CLOSE = {"rel": 1e-4, "abs": 1e-5}


def test_two_processes_go_on_as_they_did(pool, tmp_path):
    expected = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))["two"]
    resumed = pool.run(resume_by_seed, str(DATA / "two"), str(tmp_path))
    assert len(expected) == 2
    for now, before in zip(resumed, expected, strict=True):
        # The checkpoint that was the best is not there any more.
        assert now["loaded"] == {**before["loaded"], "saver": None}
        assert now["batches"] == before["batches"]
        # Other CPUs and versions of torch round differently.
        assert now["losses"] == pytest.approx(before["losses"], **CLOSE)
        assert now["history"] == pytest.approx(before["history"], **CLOSE)
        assert (now["steps"], now["last_lr"]) == (before["steps"], before["last_lr"])
    kept = load_file(DATA / "two.safetensors")
    assert set(resumed[0]["tensors"]) == set(kept)
    for name, tensor in kept.items():
        first, second = (torch.tensor(now["tensors"][name]) for now in resumed)
        torch.testing.assert_close(first, tensor, rtol=1e-4, atol=1e-5, msg=name)
        if "running" not in name:  # the statistics of BatchNorm are those of each rank's batches
            assert torch.equal(first, second), name
