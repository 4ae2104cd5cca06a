"""What the process finds out about itself, and what it takes from arguments and environment."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    AcceleratorState,
    DistributedType,
    PartialState,
    ProjectConfiguration,
    Topology,
    is_main_process,
)
from accel_callbacks.config import resolve_config

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_argument_wins_over_the_environment_and_that_over_the_default(monkeypatch):
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCEL_GRADIENT_ACCUMULATION_STEPS", "4")
    accel = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accel.mixed_precision == "bf16"
    assert accel.gradient_accumulation_steps == 2
    assert accel.config.describe().splitlines() == [
        "mixed_precision=bf16 (environment variable ACCEL_MIXED_PRECISION)",
        "gradient_accumulation_steps=2 (argument)",
        "cpu=True (argument)",
    ]


def test_false_is_an_argument_that_was_given(monkeypatch):
    monkeypatch.setenv("ACCEL_CPU", "yes")
    config = resolve_config({"cpu": False}, os.environ)
    assert config.cpu is False
    assert config.origins["cpu"] == "argument"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCEL_GRADIENT_ACCUMULATION_STEPS", "four"),
        ("ACCEL_CPU", "perhaps"),
        ("ACCEL_MIXED_PRECISION", "bf32"),
    ],
)
def test_a_bad_value_in_the_environment_is_named_with_its_origin(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    explicit = {} if name == "ACCEL_CPU" else {"cpu": True}
    with pytest.raises(ValueError, match=value) as caught:
        Accelerator(**explicit)
    assert name in str(caught.value)


def test_a_window_of_nothing_in_the_environment_is_named_with_its_origin(monkeypatch):
    monkeypatch.setenv("ACCEL_GRADIENT_ACCUMULATION_STEPS", "0")
    with pytest.raises(ValueError, match="ACCEL_GRADIENT_ACCUMULATION_STEPS"):
        Accelerator(cpu=True)


def test_an_unknown_precision_brings_a_suggestion():
    with pytest.raises(ValueError, match=r"'bf61' \(argument\).*Did you mean 'bf16'"):
        Accelerator(cpu=True, mixed_precision="bf61")


def test_a_config_does_not_change():
    with pytest.raises(FrozenInstanceError):
        Accelerator(cpu=True).config.cpu = False
    with pytest.raises(FrozenInstanceError):
        Accelerator(cpu=True).topology.rank = 3


def test_project_folders(tmp_path):
    assert Accelerator(cpu=True).project_dir == "."
    assert Accelerator(cpu=True, project_dir=tmp_path).project_dir == str(tmp_path)
    config = ProjectConfiguration("runs", logging_dir="logs")
    assert Accelerator(cpu=True, project_config=config).project_configuration.log_folder == "logs"
    with pytest.raises(ValueError, match="not both"):
        Accelerator(cpu=True, project_dir="a", project_config=config)


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="gradient_acumulation_steps"):
        Accelerator(gradient_acumulation_steps=2)


def test_all_handles_see_the_same_facts():
    partial = PartialState(cpu=True)
    accel = Accelerator(cpu=True)
    state = AcceleratorState("fp16", cpu=True)
    assert partial.topology is accel.topology is state.topology
    assert state.mixed_precision == "fp16"
    assert state.config.origins["mixed_precision"] == "argument"
    assert partial.distributed_type is DistributedType.NO
    assert (partial.backend, partial.device) == (None, torch.device("cpu"))
    assert not partial.use_distributed
    assert "rank=0/1" in repr(partial)


def test_the_state_knows_what_the_launcher_said(monkeypatch):
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCEL_CPU", "1")
    assert AcceleratorState().mixed_precision == "bf16"
    assert PartialState().device.type == "cpu"


def test_a_topology_tells_its_place():
    device = torch.device("cpu")
    last = Topology(device, rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert last.distributed_type is DistributedType.MULTI_CPU
    assert Topology(torch.device("cuda:1"), world_size=2).distributed_type == "MULTI_GPU"


def test_two_accelerators_side_by_side_keep_their_own_state():
    one = Accelerator(cpu=True, gradient_accumulation_steps=2)
    two = Accelerator(cpu=True, mixed_precision="bf16")
    with one.accumulate():
        assert not one.sync_gradients
        assert two.sync_gradients
    assert (one.mixed_precision, two.mixed_precision) == ("no", "bf16")
    one.end_training()
    assert two.num_processes == 1
    assert Accelerator(cpu=True).device.type == "cpu"


def test_the_environment_stays_as_it_is():
    before = dict(os.environ)
    accel = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    PartialState()
    accel.end_training()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "x"}, "MASTER_PORT not set"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK"),
    ],
    ids=["no rank", "no address", "no port", "no number", "rank beyond the world"],
)
def test_a_broken_launch_says_what_is_missing(environment, says):
    code = "from accel_callbacks import Accelerator; Accelerator(cpu=True)"
    result = in_new_process(code, **environment)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert says in last
    assert "launch" in last


def test_a_world_of_one_needs_no_launcher():
    code = "from accel_callbacks import Accelerator; print(Accelerator(cpu=True).num_processes)"
    assert in_new_process(code, WORLD_SIZE="1", RANK="0").stdout == "1\n"


def test_a_rank_is_known_before_any_accelerator_exists(monkeypatch):
    assert is_main_process()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_main_process()
