"""The options of DeepSpeed, and its configuration filled, without DeepSpeed itself."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, AcceleratorConfig, DeepSpeedPlugin
from accel_callbacks.engines.deepspeed.build import check_builds
from accel_callbacks.plugins.deepspeed import KEYS
from accel_callbacks.plugins.deepspeed_config import Known, fill
from accel_callbacks.utils import DummyOptim, DummyScheduler, HfDeepSpeedConfig

ZERO = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize("kind", ["dict", "path", "json", "base64", "object"])
def test_a_configuration_is_read_from_anywhere(kind: str, tmp_path: Path) -> None:
    text = json.dumps(ZERO)
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    given: Any = {
        "dict": ZERO,
        "path": str(path),
        "json": text,
        "base64": base64.urlsafe_b64encode(text.encode()).decode(),
        "object": HfDeepSpeedConfig(ZERO),
    }[kind]
    plugin = DeepSpeedPlugin(given)
    assert (plugin.zero_stage, plugin.offload_param_device) == (3, "cpu")
    assert plugin.hf_ds_config.is_zero3()
    assert plugin.hf_ds_config.is_offload()
    assert plugin.zero3_init_flag


def test_the_users_dict_is_not_changed() -> None:
    own = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
    before = json.dumps(own)
    plugin = DeepSpeedPlugin(own)
    plugin.filled({"bf16.enabled": Known(True, "here")})
    assert json.dumps(own) == before
    assert plugin.is_auto("bf16.enabled")


@pytest.mark.parametrize("name", sorted(KEYS))
def test_each_option_reaches_its_key_and_a_conflict_names_both(name: str) -> None:
    values = {
        "gradient_accumulation_steps": (4, 2),
        "gradient_clipping": (1.0, 0.5),
        "zero_stage": (3, 2),
        "zero3_save_16bit_model": (True, False),
    }
    device = ("cpu", "nvme") if name.endswith("device") else ("/a", "/b")
    mine, other = values.get(name, device)
    options: dict[str, Any] = {name: mine}
    plugin = DeepSpeedPlugin(**options)
    assert plugin.get_value(KEYS[name]) == mine
    assert plugin.origins[KEYS[name]] == f"option {name}"
    held = HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})
    held.set_value(KEYS[name], other)
    with pytest.raises(ValueError, match=rf"{name}=.* contradicts {KEYS[name]}=.* of the dict"):
        DeepSpeedPlugin(held.config, **options)
    held.set_value(KEYS[name], "auto")
    assert DeepSpeedPlugin(held.config, **options).get_value(KEYS[name]) == mine


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"zero_stage": 4}, "zero_stage=4 must be one of"),
        ({"offload_param_device": "disk"}, "offload_param_device='disk' must be one of"),
        ({"enable_msamp": True}, "MS-AMP is not supported"),
        ({"hf_ds_config": {"bf16": {"enabled": True}}}, "has no 'zero_optimization'"),
        ({"hf_ds_config": "no such file"}, "must be the path of a JSON file"),
        ({"hf_ds_config": "[1]"}, "must be the path of a JSON file"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DeepSpeedPlugin(**options)


def test_a_conflict_names_the_file_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO), encoding="utf-8")
    with pytest.raises(ValueError, match=r"contradicts .* of .*ds\.json"):
        DeepSpeedPlugin(str(path), zero_stage=2)


def test_deepspeed_prints_its_steps_only_where_the_configuration_says_so() -> None:
    plugin = DeepSpeedPlugin(ZERO)
    assert plugin.hf_ds_config.config["steps_per_print"] is None
    assert plugin.origins["steps_per_print"] == "default"
    said = DeepSpeedPlugin({**ZERO, "steps_per_print": 5})
    assert said.hf_ds_config.config["steps_per_print"] == 5


def test_a_key_is_true_false_or_not_set() -> None:
    held = HfDeepSpeedConfig({**ZERO, "fp16": {"enabled": False}, "bf16": {"enabled": True}})
    keys = "fp16.enabled", "bf16.enabled", "amp.enabled"
    assert [held.is_false(key) for key in keys] == [True, False, False]
    assert [held.is_true(key) for key in keys] == [False, True, False]


def test_auto_is_filled_and_the_unknown_is_named() -> None:
    config = {"a": {"b": "auto", "c": "auto"}, "d": 1}
    with pytest.raises(ValueError, match=r"DeepSpeed's a\.c is 'auto'"):
        fill(config, {"a.b": Known(2, "the model")})
    filled = fill(config, {"a.b": Known(2, "the model"), "a.c": Known(3, "the loop")})
    assert filled.config == {"a": {"b": 2, "c": 3}, "d": 1}
    assert filled.describe().splitlines() == [
        "a.b=2 (auto: the model)",
        "a.c=3 (auto: the loop)",
        "d=1 (file)",
    ]


def test_window_and_precision_of_the_configuration_count() -> None:
    plugin = DeepSpeedPlugin({**ZERO, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}})
    config = plugin.configure(AcceleratorConfig(), {})
    assert (config.gradient_accumulation_steps, config.mixed_precision) == (4, "bf16")
    assert config.origins["mixed_precision"] == "DeepSpeed's configuration"
    said = AcceleratorConfig(
        gradient_accumulation_steps=2, origins={"gradient_accumulation_steps": "argument"}
    )
    with pytest.raises(ValueError, match=r"=2 \(argument\) contradicts .*=4 of DeepSpeed's"):
        plugin.configure(said, {})
    fp16 = AcceleratorConfig(mixed_precision="fp16", origins={"mixed_precision": "argument"})
    with pytest.raises(ValueError, match=r"'fp16' \(argument\) contradicts bf16.enabled=True"):
        plugin.configure(fp16, {})


def test_the_launch_fills_what_the_script_leaves_out() -> None:
    config = AcceleratorConfig(
        distributed_type="DEEPSPEED",
        launched={"deepspeed": {"zero_stage": 1, "gradient_clipping": 2.0}},
    )
    plugin = DeepSpeedPlugin(zero_stage=3)
    plugins = DeepSpeedPlugin.from_launch(plugin, config)
    assert plugins is not None
    assert plugins.active is plugin
    assert (plugin.zero_stage, plugin.gradient_clipping) == (3, 2.0)
    assert DeepSpeedPlugin.from_launch(None, AcceleratorConfig()) is None


def test_another_librarys_plugin_is_named() -> None:
    class DeepSpeedPlugin:  # as Accelerate's is called
        pass

    with pytest.raises(TypeError, match="another library"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())  # type: ignore[arg-type]


def test_stand_ins_take_no_steps() -> None:
    optimizer = DummyOptim([torch.zeros(1, requires_grad=True)], lr=0.1, betas=(0.9, 0.95))
    assert optimizer.defaults == {"lr": 0.1, "weight_decay": 0, "betas": (0.9, 0.95)}
    assert DummyScheduler(optimizer).warmup_num_steps == 0
    for one in (optimizer, DummyScheduler(optimizer)):
        with pytest.raises(RuntimeError, match="takes no steps"):
            one.step()


def test_a_lock_of_a_build_is_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    check_builds("deepspeed_shm_comm")
    printed = capsys.readouterr().err
    assert f"waits for {lock}" in printed
    assert "builds deepspeed_shm_comm" in printed
    os.utime(lock, (time.time() - 3600,) * 2)
    with pytest.raises(RuntimeError, match="remove the file"):
        check_builds()


@pytest.mark.parametrize("given", ["deepspeed_plugin", "deepspeed_plugins", "launch", "file"])
def test_no_deepspeed_is_an_error_that_says_what_to_install(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO), encoding="utf-8")
    options: dict[str, Any] = {
        "deepspeed_plugin": {"deepspeed_plugin": DeepSpeedPlugin()},
        "deepspeed_plugins": {"deepspeed_plugins": {"teacher": DeepSpeedPlugin()}},
        "file": {"deepspeed_plugin": DeepSpeedPlugin(str(path))},
    }.get(given, {})
    if given == "launch":
        monkeypatch.setenv("ACCEL_DISTRIBUTED_TYPE", "DEEPSPEED")
        monkeypatch.setenv("ACCEL_DEEPSPEED_CONFIG_FILE", str(path))
    with pytest.raises(ImportError, match=r"pip install 'accel-callbacks\[deepspeed\]'"):
        Accelerator(cpu=True, **options)
