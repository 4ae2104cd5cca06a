"""Checkpoints of DeepSpeed's own format: read as DeepSpeed's zero_to_fp32 reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed", reason="deepspeed is not installed: scripts/test_deepspeed")

import checkpoint_io
from accel_callbacks import Accelerator
from accel_callbacks.cli.main import main
from tests.deepspeed.jobs import PATIENCE, finish, net, plugin

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


def _saved(stage: int, precision: str, folder: str, sub_group: int) -> Any:
    options = {"sub_group_size": sub_group} if stage == 3 else {}
    zero = plugin(stage)
    zero.deepspeed_config["zero_optimization"].update(options)
    accel = Accelerator(
        cpu=True, deepspeed_plugin=zero, mixed_precision=precision, timeout=PATIENCE
    )
    model = net()
    model[0].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:1], "lr": 0.02}, {"params": trained[1:]}]
    model, optimizer = accel.prepare(model, torch.optim.AdamW(groups, lr=0.01))
    for _ in range(2):
        accel.backward(model(torch.ones(2, 7) + accel.process_index).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    model.save_checkpoint(folder)
    state = accel.get_state_dict(model)
    finish(accel)
    return {name: value.float().flatten().tolist() for name, value in state.items()}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_those_of_zero_to_fp32(
    pool, tmp_path: Path, stage: int, precision: str
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder, out = str(tmp_path / "zero"), tmp_path / "out"
    # small groups of stage 3, so that a parameter is in several of them
    trained = pool.run(_saved, stage, precision, folder, 200)[0]
    assert main(["merge-weights", folder, str(out)]) == 0
    merged = checkpoint_io.load_model_state(out)
    wanted = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert wanted.keys() - merged.keys() == set()
    # DeepSpeed leaves frozen parameters out in stage 1
    assert merged.keys() - wanted.keys() == ({"0.bias"} if stage == 1 else set())
    for name, value in wanted.items():
        assert torch.equal(merged[name], value), name
        assert merged[name].dtype == value.dtype
    assert {name: value.float().flatten().tolist() for name, value in merged.items()} == trained
    assert "4.weight" not in load_file(out / "model.safetensors")  # the tied weight once
