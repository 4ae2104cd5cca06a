"""A plain script under `accel launch` with a config file of Accelerate's for DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("deepspeed", reason="deepspeed is not installed: scripts/test_deepspeed")

from tests.support.rounding import reordered

pytestmark = pytest.mark.distributed

TRAIN = """
import json
import torch
from accel_callbacks import Accelerator

accel = Accelerator()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 3))
loader = torch.utils.data.DataLoader(data, 8 // accel.data_world)
model, optimizer, loader = accel.prepare(model, optimizer, loader)
losses = []
for inputs, targets in loader:
    with accel.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(float(accel.reduce(loss.detach(), "mean")))
plugin = accel.state.deepspeed_plugin
facts = {"losses": losses, "window": accel.gradient_accumulation_steps}
facts["stage"] = None if plugin is None else plugin.zero_stage
with open(f"facts{accel.process_index}", "w") as file:
    json.dump(facts, file)
accel.end_training()
"""


def facts(folder: Path, *words: str) -> list[dict[str, object]]:
    """Return what each of two processes has written."""
    done = subprocess.run(
        [sys.executable, "-m", "accel_callbacks.cli", "launch", *words, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCEL_HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"facts{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_file_of_accelerate_trains_as_ddp(tmp_path: Path, stage: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    block = {"zero_stage": stage, "gradient_accumulation_steps": 2, "zero3_init_flag": False}
    file = tmp_path / "deepspeed.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {**block, "deepspeed_multinode_launcher": "standard"},
                "num_processes": 2,
                "use_cpu": True,
            }
        )
    )
    engine = facts(tmp_path, "--config_file", str(file))
    assert [(one["stage"], one["window"]) for one in engine] == [(stage, 2)] * 2
    plain = ("--cpu", "--num_processes", "2", "--gradient_accumulation_steps", "2")
    expected = facts(tmp_path, *plain)
    assert expected[0]["stage"] is None
    for one, other in zip(engine, expected, strict=True):
        assert one["losses"] == reordered(other["losses"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_checks_of_accel_test_hold(tmp_path: Path, stage: int) -> None:
    file = tmp_path / "deepspeed.yaml"
    block: dict[str, object] = {"zero_stage": stage}
    if stage == 3:
        block |= {"zero3_init_flag": True, "offload_optimizer_device": "cpu"}
    settings = {"distributed_type": "DEEPSPEED", "deepspeed_config": block}
    file.write_text(yaml.safe_dump({**settings, "num_processes": 2, "use_cpu": True}))
    done = subprocess.run(
        [sys.executable, "-m", "accel_callbacks.cli", "test", "--json", "--config_file", str(file)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCEL_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)  # DeepSpeed prints too
    assert report["holds"]
    assert {check["status"] for check in report["checks"]} == {"ok"}
    assert f"in ZeRO stage {stage}" in done.stderr
