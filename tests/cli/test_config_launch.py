"""Settings of a config file reach the Accelerator of a real launch."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from accel_callbacks import Accelerator, TorchDynamoPlugin
from accel_callbacks.launch.machine import DRIVERS, has_driver

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "examples" / "configs" / "accel.yaml"
Run = Callable[..., "subprocess.CompletedProcess[str]"]
PROBE = """
import json
from accel_callbacks import Accelerator
accel = Accelerator()
facts = {name: getattr(accel.config, name) for name in ("mixed_precision", "cpu", "debug")}
facts["world"] = accel.num_processes
if accel.is_main_process:
    print(json.dumps(facts))
accel.end_training()
"""


# --- the sample ----------------------------------------------------------------------------


@pytest.mark.distributed
def test_the_sample_launches_the_digits_example(warm_accel: Run, tmp_path: Path) -> None:
    options = ["--epochs", "1", "--batch_size", "256", "--every_n_steps", "100"]
    options += ["--project_dir", str(tmp_path / "runs"), "--log_with", "jsonl"]
    script = str(ROOT / "examples" / "digits.py")
    done = warm_accel(
        "launch", "--config_file", str(SAMPLE), script, *options, ACCEL_HOME=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs").is_dir()


@pytest.mark.distributed
def test_as_accel_yaml_above_the_script_it_is_found(warm_accel: Run, tmp_path: Path) -> None:
    data = yaml.safe_load(SAMPLE.read_text()) | {"mixed_precision": "bf16", "debug": True}
    (tmp_path / "accel.yaml").write_text(yaml.safe_dump(data))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "probe.py").write_text(PROBE)
    done = warm_accel("launch", "src/probe.py")
    assert done.returncode == 0, done.stderr
    facts = json.loads(next(line for line in done.stdout.splitlines() if "world" in line))
    assert facts == {
        "mixed_precision": "bf16",
        "cpu": True,
        "debug": True,
        "world": 2,
    }


def test_what_is_not_built_stops_before_anything_starts(accel: Run, tmp_path: Path) -> None:
    shutil.copy(SAMPLE, tmp_path / "accel.yaml")
    (tmp_path / "touch.py").write_text("open('ran', 'w')")
    done = accel("launch", "--use_deepspeed", "--deepspeed_hostfile", "hosts", "touch.py")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert (
        "deepspeed_hostfile: hosts (command line): hosts are not started from here" in done.stderr
    )
    assert not (tmp_path / "ran").exists()


def test_gpus_that_are_not_there_stop_it_too(accel: Run, tmp_path: Path) -> None:
    kind = next((kind for kind in DRIVERS if not has_driver(kind)), None)
    if kind is None:
        pytest.skip("has a driver of every kind")
    (tmp_path / "touch.py").write_text("open('ran', 'w')")
    done = accel("launch", "--distributed_type", kind, "touch.py")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--use_cpu trains on the CPU" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert accel("launch", "--dry_run", "--distributed_type", kind, "touch.py").returncode == 0


# --- what the Accelerator takes ------------------------------------------------------------


def test_models_are_compiled_as_the_launch_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCEL_DYNAMO_USE_FULLGRAPH", "1")
    accel = Accelerator(cpu=True)
    model = accel.prepare(torch.nn.Sequential(torch.nn.Linear(2, 1)))
    assert accel.dynamo_plugin.fullgraph
    assert model._compiled_call_impl is not None
    assert "dynamo.backend=EAGER (environment variable ACCEL_DYNAMO_BACKEND)" in (
        accel.config.describe()
    )


def test_an_argument_of_the_script_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_DYNAMO_BACKEND", "eager")
    assert not Accelerator(cpu=True, dynamo_backend="no").dynamo_plugin.compiles
    plugin = TorchDynamoPlugin(backend="aot_eager")
    assert Accelerator(cpu=True, dynamo_plugin=plugin).dynamo_plugin is plugin


def test_no_backend_compiles_nothing_whatever_else_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCEL_DYNAMO_BACKEND", "no")
    monkeypatch.setenv("ACCEL_DYNAMO_MODE", "max-autotune")
    assert not Accelerator(cpu=True).dynamo_plugin.compiles


def test_a_backend_that_does_not_exist_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCEL_DYNAMO_BACKEND", "inducktor")
    with pytest.raises(ValueError, match=r"ACCEL_DYNAMO_BACKEND.*Did you mean 'inductor'"):
        Accelerator(cpu=True)
