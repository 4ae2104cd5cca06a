"""States that Accelerate saved, written here as it writes them, and orders as it draws them."""

from __future__ import annotations

import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from accel_callbacks import ResumeError
from accel_callbacks.compat.names import resolve
from checkpoint_io import CorruptCheckpointError
from checkpoint_io.storage.local import folder_lock
from tests.support import warm


def name(key: str):
    return resolve("accelerate", key)


class Counted:
    def __init__(self) -> None:
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def prepared():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5], gamma=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def written(folder) -> list[torch.Tensor]:
    """Write a state as Accelerate does; return what its generators draw next."""
    folder.mkdir()
    model, optimizer, scheduler = prepared()
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    torch.save({"number": 7}, folder / "custom_checkpoint_0.pkl")
    states = {
        **{"step": 1, "random_state": random.getstate()},
        **{"numpy_random_seed": np.random.get_state(), "torch_manual_seed": torch.get_rng_state()},
    }
    torch.save(states, folder / "random_states_0.pkl")
    return [*model.state_dict().values(), torch.rand(2)]


def test_a_state_of_accelerate_is_restored(tmp_path):
    expected = written(tmp_path / "state")
    draws = random.random(), np.random.rand()
    accelerator = name("Accelerator")(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5], gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counted = Counted()
    accelerator.register_for_checkpointing(counted)
    assert accelerator.load_state(tmp_path / "state") == str(tmp_path / "state")
    for parameter, saved in zip(model.state_dict().values(), expected, strict=False):
        assert torch.equal(parameter, saved)
    assert optimizer.state_dict()["state"][0]["step"] == 1
    assert scheduler.get_last_lr() == [0.25]
    assert counted.number == 7
    assert torch.equal(torch.rand(2), expected[-1])
    assert (random.random(), np.random.rand()) == draws


def test_nothing_changes_where_a_file_lacks_or_holds_objects(tmp_path):
    written(tmp_path / "state")
    accelerator = name("Accelerator")(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    before = model.weight.detach().clone()
    accelerator.register_for_checkpointing(Counted(), Counted())
    with pytest.raises(ResumeError, match=r"custom_checkpoint_1.pkl is not there"):
        accelerator.load_state(tmp_path / "state")
    torch.save(Counted(), tmp_path / "state" / "custom_checkpoint_1.pkl")
    with pytest.raises(CorruptCheckpointError, match="only full unpickling can create"):
        accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, before)


def test_own_states_are_loaded_as_before(tmp_path):
    accelerator = name("Accelerator")(cpu=True, project_dir=str(tmp_path))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    path = accelerator.save_state()
    saved = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    assert accelerator.load_state() == path
    assert torch.equal(model.weight, saved)


def test_a_seed_of_the_data_is_that_of_the_seedable_sampler_alone():
    torch.manual_seed(3)
    loader = DataLoader(range(10), batch_size=2, shuffle=True)
    plain = [batch.tolist() for batch in loader]
    options = name("DataLoaderConfiguration")(data_seed=5)
    accelerator = name("Accelerator")(cpu=True, dataloader_config=options)
    torch.manual_seed(3)
    assert [batch.tolist() for batch in accelerator.prepare(loader)] == plain


KILLED = """
import os, signal, sys
import torch
from accel_callbacks.compat import beside
from accel_callbacks.compat.names import resolve
from checkpoint_io.storage import local

accelerator = resolve("accelerate", "Accelerator")(cpu=True)
accelerator.prepare(torch.nn.Linear(1, 1))
assert accelerator.save_state("step_1") == "step_1"
where = {"manifest": local, "name": beside}[sys.argv[1]]
where.replace = lambda old, new: os.kill(os.getpid(), signal.SIGKILL)
accelerator.save_state("step_2")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("moment", ["manifest", "name"])
def test_a_listing_never_has_half_a_state(moment, tmp_path, monkeypatch):
    killed = warm.run([sys.executable, "-c", KILLED, moment], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["_accel_saving-step_2", "step_1"]
    monkeypatch.chdir(tmp_path)
    with folder_lock(str(tmp_path / "_accel_saving-step_2")):  # another process saves there
        name("Accelerator")(cpu=True)
        assert sorted(os.listdir(tmp_path)) == ["_accel_saving-step_2", "step_1"]
    accelerator = name("Accelerator")(cpu=True)
    assert os.listdir(tmp_path) == ["step_1"]
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.load_state("step_1")
    with torch.no_grad():
        model.weight.fill_(3.0)
    assert accelerator.save_state(tmp_path / "step_2") == str(tmp_path / "step_2")
    assert accelerator.save_state("step_1") == "step_1"  # one that there is, in place
    accelerator.load_state(tmp_path / "step_1")
    assert model.weight.item() == 3.0
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_2"]
