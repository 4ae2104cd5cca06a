"""Scripts that know nothing of FSDP, launched with it on two processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from accel_callbacks.cli.main import main
from accel_callbacks.models.compile import regions
from accel_callbacks.models.memory_estimate import sharded_memory

pytestmark = pytest.mark.distributed

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# A model with odd sizes, an optimizer before it in `prepare`, and what each process then holds.
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear, self.norm = nn.Linear(size, size), nn.LayerNorm(size)

    def forward(self, inputs):
        return self.norm(inputs + torch.relu(self.linear(inputs)))

def make():
    return nn.Sequential(
        nn.Linear(7, 15), nn.Sequential(Block(15), Block(15)),
        nn.Linear(15, 3),
    )
"""
TRAIN = """
import json
import os
import torch
from accel_callbacks import Accelerator
from model import make

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def held(tensors):
    return sum(local(one).nbytes for one in tensors)

accel = Accelerator()
torch.manual_seed(1)
model = make()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(32, 7), torch.randn(32, 3))
loader = torch.utils.data.DataLoader(data, 8 // accel.num_processes)
model, optimizer, loader = accel.prepare(model, optimizer, loader)
losses = []
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accel.backward(loss)
    gradients = held(one.grad for one in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(accel.reduce(loss.detach(), "mean")))
states = [one for state in optimizer.state.values() for one in state.values()]
mesh = accel.torch_device_mesh
facts = {
    "kind": accel.distributed_type.value,
    "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape)) if mesh is not None else None,
    "losses": losses,
    "weights": held(model.parameters()),
    "gradients": gradients,
    "optimizer": held(states),
    "reshard": accel.strategy.options.reshard if accel.strategy.name == "fsdp" else None,
}
with open(f"facts{accel.process_index}", "w") as file:
    json.dump(facts, file)
accel.end_training()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def facts_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"facts{rank}").read_text()) for rank in range(2)]


def run(warm_accel: Run, *words: str) -> subprocess.CompletedProcess[str]:
    done = warm_accel("launch", *words, "train.py", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return done


# As `accelerate config` writes it for version 1.
OLD = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "fsdp_config": {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_use_orig_params": True,
        "fsdp_version": 1,
    },
    "machine_rank": 0,
    "main_training_function": "main",
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


def test_a_file_of_accelerate_shards_and_trains_as_ddp_does(warm_accel: Run, script: Path) -> None:
    (script / "old.yaml").write_text(yaml.safe_dump(OLD))
    done = run(warm_accel, "--config_file", "old.yaml")
    sharded = facts_of(script)
    # Once for all processes, and each key by its name.
    assert done.stderr.count("is trained as 2") == 1
    for key in ("backward_prefetch", "use_orig_params"):
        assert done.stderr.count(f"fsdp_{key} ") == 1
    run(warm_accel, "--cpu", "--num_processes", "2")
    plain = facts_of(script)
    assert [one["kind"] for one in (*sharded, *plain)] == ["FSDP"] * 2 + ["MULTI_CPU"] * 2
    assert sharded[0]["mesh"] == {"dp_shard": 2}
    assert sharded[0]["reshard"] is False
    for one, other in zip(sharded, plain, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
        for name in ("weights", "gradients", "optimizer"):
            assert one[name] < 0.6 * other[name]


def test_a_mesh_alone_shards(warm_accel: Run, script: Path) -> None:
    run(warm_accel, "--cpu", "--num_processes", "2", "--parallelism_config_dp_shard_size", "2")
    for facts in facts_of(script):
        assert (facts["kind"], facts["mesh"]) == ("FSDP", {"dp_shard": 2})


def test_the_estimate_is_what_the_first_process_holds(
    warm_accel: Run,
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mesh = ["--use_parallelism_config", "--parallelism_config_dp_shard_size", "2"]
    run(warm_accel, "--cpu", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", *mesh)
    held, other = facts_of(script)
    assert held["kind"] == other["kind"] == "FSDP"
    assert held["mesh"] == other["mesh"] == {"dp_shard": 2}
    monkeypatch.chdir(script)
    words = ["model:make", "--parallelism", "dp_shard=2", "--dtypes", "fp32", "--json"]
    assert main(["estimate-memory", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"dp_replicate": 1, "dp_shard": 2}
    (one,) = found["processes"]
    for name in ("weights", "gradients", "optimizer"):
        assert one[name] == held[name]
    assert one["total"] == held["weights"] + held["gradients"] + held["optimizer"]


def test_the_self_test_holds_under_fsdp(warm_accel: Run, tmp_path: Path) -> None:
    data = {"distributed_type": "FSDP", "num_processes": 2, "use_cpu": True}
    (tmp_path / "accel.yaml").write_text(yaml.safe_dump(data | {"mixed_precision": "bf16"}))
    done = warm_accel("test", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 9
    assert lines[0].endswith("precision bf16, dp_shard 2")
    assert last == "9 checks hold"


TENSOR_PARALLEL = ["--cpu", "--num_processes", "2", "--parallelism_config_tp_size", "2"]
PLAN = {"1.*.linear": "colwise_gather_output", "2": "embedding_rowwise"}


@pytest.mark.slow
def test_a_launch_cuts_layers_by_the_plan_of_the_model(warm_accel: Run, script: Path) -> None:
    text = MODEL.replace("def make():\n    return", "def make():\n    model =")
    text += f"    model._tp_plan = {PLAN}\n    return model\n"
    (script / "planned.py").write_text(text)
    text = TRAIN.replace("from model", "from planned").replace("8 // accel.num_processes", "8")
    (script / "train.py").write_text(text)
    run(warm_accel, *TENSOR_PARALLEL)
    first, second = facts_of(script)
    assert first["mesh"] == {"tp": 2}
    assert first["losses"] == second["losses"]


@pytest.mark.parametrize(
    "checks",
    ["processes,gradients", pytest.param("", marks=pytest.mark.slow)],
)
def test_the_self_test_holds_where_layers_are_cut(
    checks: str, warm_accel: Run, tmp_path: Path
) -> None:
    chosen = ["--checks", checks] if checks else []
    done = warm_accel("test", *chosen, *TENSOR_PARALLEL, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines[0].endswith("precision no, tp 2")
    assert last == f"{2 if checks else 9} checks hold"


# --- the estimate, without processes -------------------------------------------------------


class Uneven(nn.Module):
    """Two equal blocks, an embedding that is tied to the head, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)) for _ in "ab")
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 5, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))


def test_the_parts_of_the_estimate() -> None:
    model = Uneven()
    fp32, mixed, low = sharded_memory(
        model, 4, [(block,) for block in regions(model)], ["fp32", "bf16"]
    )
    # ceil(rows / 4) rows: 3 x 6, and in both blocks 2 x 6 + 2 + 2 x 7 + 2.
    trained = 18 + 2 * (12 + 2 + 14 + 2)
    frozen = 2 * 6
    assert fp32.gradients == mixed.gradients == 4 * trained
    assert fp32.optimizer == 2 * 4 * trained + 4 * 9
    assert fp32.weights == 4 * (trained + frozen + 3)
    assert mixed.weights == 4 * (trained + 3) + 2 * frozen
    assert (mixed.masters, low.masters) == ("fp32", "bf16")
    assert low.weights == 2 * (trained + frozen + 3)
    assert low.optimizer == 2 * 2 * trained + 4 * 9
    block = 6 * 7 + 7 + 7 * 6 + 6
    assert fp32.largest_unit == 4 * block
    assert mixed.largest_unit == low.largest_unit == 2 * block
    assert fp32.unit_name in ("blocks.0", "blocks.1")


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ("dp_shrad=2", "did you mean 'dp_shard'"),
        ("dp_shard=x", "not an integer of at least 1"),
        ("dp_shard=0", "not an integer of at least 1"),
        ("tp=2,dp_shard=2", "tp is not estimated"),
    ],
)
def test_a_wrong_mesh_is_one_line(axes: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", "torch.nn:Identity", "--parallelism", axes]) == 2
    assert text in capsys.readouterr().err


def test_the_estimate_as_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide_layer.py").write_text(
        "from torch import nn\ndef make(): return nn.Linear(1000, 1000)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["wide_layer:make"]
    words += ["--parallelism", "dp_shard=8, dp_replicate=2", "--dtypes", "bf16"]
    assert main(["estimate-memory", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(
        "1,001,000 parameters on dp_replicate 2 x dp_shard 8, bytes of each process"
    )
    assert [line.split()[:4] for line in lines[2:4]] == [
        ["bf16", "fp32", "500", "kB"],
        ["bf16", "bf16", "250", "kB"],
    ]
    assert lines[4] == "Largest unit: Linear."
    assert (
        main(["estimate-memory", *words[:1], "--parallelism=dp_replicate=2", "--dtypes=int8"]) == 2
    )
