"""States that Accelerate saved, written here as it writes them, and orders as it draws them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from accel_callbacks import ResumeError
from accel_callbacks.compat.names import resolve
from checkpoint_io import CorruptCheckpointError


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
