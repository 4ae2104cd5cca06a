"""Files of Accelerate for Megatron-LM: what a launch of them runs, refuses and names."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_callbacks.cli.main import main

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# As `accelerate config` writes it, but for use_cpu.
FILE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MEGATRON_LM",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "megatron_lm_config": {
        "megatron_lm_gradient_clipping": 1.0,
        "megatron_lm_pp_degree": 1,
        "megatron_lm_recompute_activations": True,
        "megatron_lm_sequence_parallelism": False,
        "megatron_lm_tp_degree": 2,
        "megatron_lm_use_distributed_optimizer": True,
    },
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": True,
}


def written(folder: Path, **block: Any) -> str:
    inner = FILE["megatron_lm_config"] | {f"megatron_lm_{k}": v for k, v in block.items()}
    path = folder / "megatron.yaml"
    path.write_text(yaml.safe_dump(FILE | {"megatron_lm_config": inner}))
    return str(path)


def dry_run(file: str, *words: str) -> int:
    return main(["launch", "--dry_run", "--config_file", file, *words, "-m", "timeit"])


def test_the_processes_get_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(written(tmp_path, num_micro_batches=4)) == 0
    done = capsys.readouterr()
    for text in (
        "ACCEL_DISTRIBUTED_TYPE=MEGATRON_LM",
        "ACCEL_MEGATRON_LM_TP_DEGREE=2",
        "ACCEL_MEGATRON_LM_RECOMPUTE_ACTIVATIONS=1",
        "ACCEL_MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER=1",
        "ACCEL_MEGATRON_LM_NUM_MICRO_BATCHES=4",
        "ACCEL_MEGATRON_LM_GRADIENT_CLIPPING=1.0",
    ):
        assert text in done.out
    assert done.err == ""


def test_flags_are_those_of_accelerate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    words = ["launch", "--dry_run", "--use_megatron_lm", "--cpu", "--num_processes", "4"]
    words += ["--megatron_lm_tp_degree", "2", "--megatron_lm_use_custom_fsdp", "true"]
    words += ["--megatron_lm_attention_dropout", "0.1", "-m", "timeit"]
    assert main(words) == 0
    done = capsys.readouterr()
    assert "ACCEL_MEGATRON_LM_TP_DEGREE=2" in done.out
    assert "ACCEL_MEGATRON_LM_USE_CUSTOM_FSDP=1" in done.out
    (line,) = done.err.splitlines()
    assert line.startswith("accel launch: --megatron_lm_attention_dropout has no effect: ")


def test_keys_without_a_meaning_are_named_one_by_one_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"attention_dropout": 0.1, "eod_mask_loss": True, "attention_backend": True}
    file = written(tmp_path, **asked, no_save_optim=False)
    assert dry_run(file) == 0
    (line,) = capsys.readouterr().err.splitlines()
    for name in asked:
        assert line.count(f" megatron_lm_{name} (megatron.yaml ({file}))") == 1
    assert "no_save_optim" not in line  # asks for nothing
    assert main(["config", "show", "--config_file", file]) == 0
    shown = capsys.readouterr().out
    assert "no effect: the model, the loop and its optimizer are the script's" in shown


def test_keys_have_no_effect_in_another_kind_of_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, expert_model_parallel_size=2, attention_dropout=0.1)
    assert dry_run(file, "--distributed_type", "MULTI_CPU") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["expert_tensor_parallel_size", "expert_model_parallel_size"])
def test_what_is_refused_stops_with_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(written(tmp_path, **{name: 2})) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"megatron_lm_config.megatron_lm_{name}: 2 (megatron.yaml (" in line


def test_degrees_that_do_not_divide_the_processes_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(written(tmp_path, context_parallel_size=2)) == 2
    text = capsys.readouterr().err
    assert "arrange groups of 4 ranks, and there are 2" in text
    assert dry_run(written(tmp_path, context_parallel_size=2), "--num_processes", "4") == 0


TRAIN = """
import json
import torch
from accel_callbacks import Accelerator

class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, inputs):
        return inputs + self.down_proj(torch.relu(self.up_proj(inputs)))

accel = Accelerator()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Sequential(MLP(), MLP()), torch.nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 3))
loader = torch.utils.data.DataLoader(data, 8 // accel.data_world)
model, optimizer, loader = accel.prepare(model, optimizer, loader)
losses = []
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accel.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(accel.reduce(loss.detach(), "mean")))
mesh = accel.torch_device_mesh
facts = {
    "engine": accel.strategy.name,
    "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape)) if mesh is not None else None,
    "losses": losses,
}
with open(f"facts{accel.process_index}", "w") as file:
    json.dump(facts, file)
accel.end_training()
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("degree", "mesh"), [(2, {"tp": 2}), (1, {"dp_shard": 2})])
def test_a_file_of_accelerate_trains_as_one_process_does(
    degree: int, mesh: Any, warm_accel: Run, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = warm_accel("launch", "--cpu", "--num_processes", "1", "train.py", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    expected = json.loads((tmp_path / "facts0").read_text())["losses"]
    file = written(tmp_path, tp_degree=degree)
    done = warm_accel("launch", "--config_file", file, "train.py", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("gradient_clipping=1.0 (the loop clips: ") == 1
    for rank in range(2):
        facts = json.loads((tmp_path / f"facts{rank}").read_text())
        assert facts["mesh"] == mesh
        assert facts["losses"] == pytest.approx(expected, rel=1e-5)
