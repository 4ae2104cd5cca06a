"""Files of Accelerate for DeepSpeed: what a launch of them passes on, and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_callbacks.cli.main import main
from accel_callbacks.options import resolve_config
from accel_callbacks.plugins import DeepSpeedPlugin

# As `accelerate config` writes it, but for use_cpu.
FILE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "deepspeed_config": {
        "deepspeed_multinode_launcher": "standard",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero_stage": 3,
    },
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "use_cpu": True,
}


def variables(
    folder: Path, capsys: pytest.CaptureFixture[str], block: dict[str, Any], *words: str
) -> dict[str, str]:
    """Return the variables that the processes of a launch get."""
    path = folder / "deepspeed.yaml"
    path.write_text(yaml.safe_dump(FILE | {"deepspeed_config": block}))
    assert main(["launch", "--dry_run", "--config_file", str(path), *words, "-m", "timeit"]) == 0
    text = capsys.readouterr().out
    found = (word.partition("=") for word in text.split() if word.startswith("ACCEL_"))
    return {name: value for name, _, value in found}


def test_the_plugin_has_what_the_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolve_config({}, variables(tmp_path, capsys, FILE["deepspeed_config"]))
    plugins = DeepSpeedPlugin.from_launch(None, config)
    assert plugins is not None
    plugin = plugins.active
    assert plugin.zero_stage == 3
    assert plugin.gradient_accumulation_steps == 4
    assert plugin.gradient_clipping == 0.5
    assert plugin.offload_optimizer_device == "cpu"
    assert plugin.zero3_init_flag is False
    assert config.mixed_precision == "bf16"


def test_only_what_is_given_is_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A default of the launcher would contradict DeepSpeed's own file.
    block = {"deepspeed_config_file": "ds.json", "gradient_accumulation_steps": "auto"}
    found = variables(tmp_path, capsys, block, "--gradient_clipping", "auto")
    assert {name: value for name, value in found.items() if "DEEPSPEED_" in name} == {
        "ACCEL_DEEPSPEED_CONFIG_FILE": "ds.json",
        "ACCEL_DEEPSPEED_GRADIENT_ACCUMULATION_STEPS": "auto",
        "ACCEL_DEEPSPEED_GRADIENT_CLIPPING": "auto",
    }


@pytest.mark.parametrize(
    "key", ["deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"]
)
def test_a_choice_of_hosts_stops_with_one_sentence(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deepspeed.yaml"
    path.write_text(yaml.safe_dump(FILE | {"deepspeed_config": {key: "x"}}))
    assert main(["launch", "--dry_run", "--config_file", str(path), "-m", "timeit"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"deepspeed_config.{key}: x (deepspeed.yaml (" in line
    assert "start `accel launch` on each machine" in line
