"""Config files: where they are found, what is read, how they are written."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_callbacks.launch.config_file import (
    expanded,
    find_config,
    read_config,
    values_of,
    write_config,
)
from accel_callbacks.launch.resolve import resolve_settings
from accel_callbacks.plugins.option import SettingsError
from checkpoint_io import local_files

SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "configs" / "accel.yaml"
# What `accelerate config` of 1.15 writes for two GPUs, before each block is added to it.
PLAIN: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
BLOCKS: dict[str, dict[str, Any]] = {
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": "false",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": False,
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_sharding_strategy": 1,
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": 1,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 1,
        "parallelism_config_cp_size": 2,
        "parallelism_config_cp_comm_strategy": "allgather",
    },
    "deepspeed_config": {
        "zero_stage": 3,
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": "/nvme",
        "offload_param_device": "none",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero3_save_16bit_model": True,
        "zero3_init_flag": True,
        "deepspeed_multinode_launcher": "standard",
        "deepspeed_moe_layer_cls_names": "A,B",
    },
    "megatron_lm_config": {
        "megatron_lm_tp_degree": 2,
        "megatron_lm_sequence_parallelism": True,
        "megatron_lm_gradient_clipping": 1.0,
    },
    "dynamo_config": {
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": "default",
        "dynamo_use_fullgraph": False,
        "dynamo_use_dynamic": False,
        "dynamo_use_regional_compilation": True,
    },
    "fp8_config": {
        "backend": "TE",
        "amax_history_len": 1024,
        "amax_compute_algorithm": "max",
        "fp8_format": "E4M3",
        "interval": 1,
        "margin": 0,
        "override_linear_precision": [False, False, True],
        "use_autocast_during_eval": False,
    },
    "mpirun_config": {"mpirun_ccl": "1", "mpirun_hostfile": "/home/user/hostfile"},
}


def written(folder: Path, text: str, name: str = "accel.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# --- where ---------------------------------------------------------------------------------


def test_the_projects_own_file_is_found_upwards_from_the_script(tmp_path: Path) -> None:
    inner = tmp_path / "project" / "src" / "deep"
    inner.mkdir(parents=True)
    own = written(tmp_path / "project", "")
    nearer = written(tmp_path / "project" / "src", "")
    assert find_config(str(inner / "train.py"), {}) == nearer
    nearer.unlink()
    assert find_config(str(inner / "train.py"), {}) == own


def test_without_a_script_the_search_starts_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = written(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    assert find_config(None, {}) == own


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"ACCEL_HOME": "a", "HF_HOME": "h", "XDG_CACHE_HOME": "x"}, "a"),
        ({"HF_HOME": "h", "XDG_CACHE_HOME": "x"}, "h/accelerate"),
        ({"XDG_CACHE_HOME": "x"}, "x/huggingface/accelerate"),
        ({}, ".cache/huggingface/accelerate"),
    ],
)
@pytest.mark.parametrize("name", ["default_config.yaml", "default_config.json"])
def test_then_the_cache_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    place: str,
    name: str,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / place
    folder.mkdir(parents=True)
    environment = {key: str(tmp_path / value) for key, value in variables.items()}
    assert find_config(str(tmp_path / "train.py"), environment) is None
    own = written(folder, "{}", name)
    assert find_config(str(tmp_path / "train.py"), environment) == own


def test_the_projects_file_comes_before_the_cache(tmp_path: Path) -> None:
    written(tmp_path, "", "default_config.yaml")
    own = written(tmp_path, "")
    assert find_config(str(tmp_path / "train.py"), {"ACCEL_HOME": str(tmp_path)}) == own


# --- what Accelerate writes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "suffix"),
    [(block, ("yaml", "json")[number % 2]) for number, block in enumerate([*BLOCKS, ""])],
)
def test_files_of_accelerate_are_read_as_they_are(tmp_path: Path, block: str, suffix: str) -> None:
    data = PLAIN | ({block: BLOCKS[block]} if block else {name: {} for name in BLOCKS})
    text = json.dumps(data) if suffix == "json" else yaml.safe_dump(data)
    found = resolve_settings({}, str(written(tmp_path, text, f"a.{suffix}")), None, {})
    assert found.settings.num_processes == 2
    assert found.settings.mixed_precision == "bf16"
    assert found.settings.downcast_bf16 is False
    if block:
        given = [path for path in found.origins if path.startswith(f"{block}.")]
        assert sum(map(found.given, given)) == len(BLOCKS[block])
    idle = found.idle()
    assert {"same_network", "tpu_env", "compute_environment", "downcast_bf16"} <= set(idle)


def test_old_keys_of_accelerate_mean_what_they_meant() -> None:
    old = {"fp16": True, "dynamo_backend": "EAGER", "ipex_config": {"ipex": True}, "command": None}
    values, gone = values_of(old, "f")
    assert values == {"mixed_precision": "fp16", "dynamo_config.dynamo_backend": "EAGER"}
    assert set(gone) == {"ipex_config", "command"}


def test_keys_of_a_block_may_lack_its_prefix_or_have_it_as_for_accelerate() -> None:
    data = {
        "fsdp_config": {"sharding_strategy": 1, "backward_prefetch_policy": "BACKWARD_PRE"},
        "dynamo_config": {"backend": "EAGER"},
        "fp8_config": {"fp8_backend": "AO", "format": "E4M3", "fp8_opt_level": "O1"},
    }
    assert values_of(data, "f")[0] == {
        "fsdp_config.fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_config.fsdp_backward_prefetch": "BACKWARD_PRE",
        "dynamo_config.dynamo_backend": "EAGER",
        "fp8_config.backend": "AO",
        "fp8_config.fp8_format": "E4M3",
        "fp8_config.optimization_level": "O1",
    }


def test_sagemaker_is_refused() -> None:
    data = {"compute_environment": "AMAZON_SAGEMAKER", "ec2_instance_type": "ml.p3"}
    with pytest.raises(SettingsError, match=r"f: is for Amazon SageMaker \(compute_environment\)"):
        values_of(data, "f")


def test_the_sample_has_the_keys_of_the_quick_tour() -> None:
    assert set(PLAIN) - set(read_config(SAMPLE)) == {"enable_cpu_affinity"}
    assert resolve_settings({}, str(SAMPLE), None, {}).settings.num_processes == 2


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ({"num_proceses": 2}, "has no key 'num_proceses'. Did you mean 'num_processes'?"),
        ({"fsdp_config": {"fsdp_versoin": 2}}, "fsdp_config: has no key 'fsdp_versoin'. Did you"),
        ({"dynamo_config": {"bakend": "x"}}, "dynamo_config: has no key 'bakend'. Did you mean"),
        ({"fp8_config": {"margin": 1, "fp8_margin": 2}}, "fp8_config.margin is given under two"),
        ({"fsdp_config.fsdp_version": 2}, "has no key 'fsdp_config.fsdp_version'"),
        ({"fsdp_config": True}, "fsdp_config must be a block of keys, not True"),
        ({"num_processes": "2"}, "num_processes must be an integer"),
        ({"fsdp_config": {"fsdp_version": []}}, "fsdp_config.fsdp_version must be an integer"),
        ({"fp16": "yes"}, "fp16 must be true or false"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(data: dict[str, Any], hint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        values_of(data, "my.yaml")
    assert str(caught.value).startswith("my.yaml: ")
    assert hint in str(caught.value)


# --- reading -------------------------------------------------------------------------------


def test_bom_crlf_and_an_empty_file_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfnum_processes: 2\r\nuse_cpu: true\r\n")
    assert read_config(path) == {"num_processes": 2, "use_cpu": True}
    path.write_bytes(b"# nothing\n")
    assert read_config(path) == {}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a: [1", "line 1"),
        (b"\ta: 1", "line 1"),
        (b"[" * 5000, "cannot be read"),
        (b"- 1", "must hold `key: value` lines, not a list of 1"),
        (b"just text", "must hold `key: value` lines, not 'just text'"),
        (b"1: 2", "has the key 1, and keys must be text"),
        (b"? [a]\n: 1", "cannot be read"),
        (b"a: 1\n---\nb: 2", "cannot be read"),
        (
            b"a: !!python/object/apply:os.system ['touch owned']",
            "could not determine a constructor",
        ),
        (b"a: !!python/name:os.system", "could not determine a constructor"),
        (b"a: !!timestamp soon", "cannot be read"),
        (b"a: !!int soon", "cannot be read"),
        (b"a: 2001-99-99", "cannot be read"),
        (b"a: " + b"9" * 5000, "cannot be read"),
        (b"a: b\0c", "cannot be read"),
        (b"\xff\xfea\0", "'utf-8' codec can't decode"),
    ],
)
def test_broken_and_hostile_yaml_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "accel.yaml"
    path.write_bytes(raw)
    with pytest.raises(SettingsError) as caught:
        read_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert text in message
    assert "\n" not in message
    assert sorted(os.listdir(tmp_path)) == ["accel.yaml"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a": 1', "line 1"),
        ("[" * 60_000, "cannot be read"),
        ("[1]", "must hold"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
    ],
)
def test_broken_and_hostile_json_is_one_line(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(SettingsError, match=part):
        read_config(written(tmp_path, text, "a.json"))


def test_what_is_no_file_is_one_line(tmp_path: Path) -> None:
    for path, text in (
        (tmp_path, "cannot be read: .*Is a directory"),
        (tmp_path / "missing", "there is no such file; `accel config` writes one"),
        (tmp_path / "x" / "a.yaml", "there is no such file"),
        (Path("a\0b"), "cannot be read"),
        (Path("n" * 5000), "cannot be read: .*File name too long"),
    ):
        with pytest.raises(SettingsError, match=text) as caught:
            read_config(path)
        assert "\0" not in str(caught.value)


def test_an_unknown_home_is_one_line(tmp_path: Path) -> None:
    path = "~nobody-of-this-name/a.yaml"
    for act in (
        lambda: read_config(path),
        lambda: write_config(path, {}),
        lambda: find_config(str(tmp_path / "train.py"), {"ACCEL_HOME": path}),
        lambda: expanded(path),
    ):
        with pytest.raises(SettingsError, match=r"^~nobody-of-this-name/a\.yaml: there is no such"):
            act()


# --- writing -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    data = {"num_processes": 2, "mixed_precision": "no", "dynamo_config": {"dynamo_backend": "NO"}}
    path = write_config(tmp_path / "new" / name, data)
    assert read_config(path) == data
    assert sorted(os.listdir(path.parent)) == [name]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "use_cpu: true\n")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SettingsError, match="cannot be written: No space left on device"):
        write_config(path, {"use_cpu": False})
    assert path.read_text() == "use_cpu: true\n"
    assert os.listdir(tmp_path) == ["accel.yaml"]


def test_a_config_survives_a_power_cut_of_a_mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, call: synced.append(call))
    path = write_config(tmp_path / "accel.yaml", {"use_cpu": True})
    assert synced == [51]
    assert path.read_bytes() == b"use_cpu: true\n"


def test_a_config_that_is_open_elsewhere_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "use_cpu: true\n")

    def refuses(old: str, new: str) -> None:
        error = PermissionError(13, "Access is denied", new)
        error.winerror = 32  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(os, "replace", refuses)
    monkeypatch.setattr(local_files, "_PAUSES", (0,))
    with pytest.raises(SettingsError, match="another program has the file open: close it"):
        write_config(path, {"use_cpu": False})
    assert path.read_text() == "use_cpu: true\n"
    assert os.listdir(tmp_path) == ["accel.yaml"]


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    file = written(tmp_path, "")
    for path in (file / "inner.yaml", Path("/proc/nowhere/a.yaml"), tmp_path):
        with pytest.raises(SettingsError, match="cannot be written"):
            write_config(path, {})


def test_a_link_and_the_mode_of_the_file_stay(tmp_path: Path) -> None:
    real = written(tmp_path, "", "real.yaml")
    real.chmod(0o600)
    link = tmp_path / "link.yaml"
    link.symlink_to(real)
    assert write_config(link, {"use_cpu": True}) == real
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o600
    assert read_config(link) == {"use_cpu": True}
