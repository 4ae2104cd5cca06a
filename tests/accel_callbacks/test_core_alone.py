"""The core alone: without engines, add-ons, launcher and commands it trains, saves and resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HIDDEN = ("engines", "addons", "compat", "launch", "cli")
STEPS = 4  # of the epoch
#: A model, an optimizer and its data, and a step: the same with the library and without.
COMMON = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def parts():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2)
"""
SCRIPT = """
import importlib.abc
import sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"accel_callbacks.{room}" for room in HIDDEN)):
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, Hide())

import json
import os
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint

model, optimizer, loader = parts()
accel = Accelerator(
    cpu=True,
    project_dir="project",
    log_with="jsonl",
    callbacks=[Checkpoint(every_n_steps=1, async_save=False)],
)
model, optimizer, loader = accel.prepare(model, optimizer, loader)
stop = int(sys.argv[1])
with accel.run("alone") as run:
    began = run.global_step
    for _ in run.epochs(1):
        for (batch,) in loader:
            if run.global_step == stop:  # is killed
                print(json.dumps({"began": began}), flush=True)
                os._exit(0)
            loss = model(batch).square().mean()
            accel.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accel.log({"loss": loss})
accel.save_state("state")
trained = {name: value.clone() for name, value in model.state_dict().items()}
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
accel.load_state("state")
accel.end_training()
for name, value in model.state_dict().items():
    assert torch.equal(value, trained[name]), name
weights = {name: value.tolist() for name, value in trained.items()}
print(json.dumps({"began": began, "weights": weights}))
"""


def train(folder: Path, stop: int) -> Any:
    script = COMMON + SCRIPT.replace("HIDDEN", repr(HIDDEN))
    done = subprocess.run(
        [sys.executable, "-c", script, str(stop)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_core_trains_saves_and_resumes_alone(tmp_path: Path) -> None:
    assert train(tmp_path, stop=2) == {"began": 0}
    resumed = train(tmp_path, stop=STEPS)
    assert resumed["began"] == 2
    (metrics,) = tmp_path.rglob("*.jsonl")
    assert "loss" in metrics.read_text("utf-8")

    torch_alone: dict[str, Any] = {}
    exec(COMMON, torch_alone)
    model, optimizer, loader = torch_alone["parts"]()
    for (batch,) in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(torch.tensor(resumed["weights"][name]), value), name
