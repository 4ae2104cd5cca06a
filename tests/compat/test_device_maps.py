"""Device maps, bytes, indexes and log records that functions have by the alias."""

from __future__ import annotations

import logging
import platform
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accel_callbacks.utils
from accel_callbacks.compat.names import resolve
from accel_callbacks.utils import (
    compute_module_sizes,
    fallback_allocate,
    find_tied_parameters,
    get_module_size_with_ties,
)


def name(key: str) -> Any:
    return resolve("accelerate.utils", key)


def chain(*sizes: int) -> nn.Sequential:
    """Return layers of 8 bytes for each of their inputs, and 8 more."""
    return nn.Sequential(*(nn.Linear(size, 2) for size in sizes))


def device_map(model: nn.Module, memory: dict[Any, int], **options: Any) -> dict[str, Any]:
    return dict(name("infer_auto_device_map")(model, memory, **options))


def test_the_first_device_keeps_room_for_the_largest_layer_that_waits():
    model = chain(1, 2, 4)  # 16, 24 and 40 bytes
    assert device_map(model, {0: 79, 1: 64}) == {"0": 0, "1": 1, "2": 1}
    assert device_map(model, {0: 80, 1: 64}) == {"": 0}  # nothing waits after the last one


def test_a_module_that_does_not_fit_is_split_unless_its_class_is_named():
    model = nn.Sequential(chain(1, 1, 1), chain(1, 1, 1))  # 48 bytes each
    memory = {0: 95, "cpu": 1000}
    assert device_map(model, memory) == {"0": 0, "1.0": 0, "1.1": "cpu", "1.2": "cpu"}
    assert device_map(model, memory, no_split_module_classes="Sequential") == {"": "cpu"}


def test_tied_modules_go_together():
    model = chain(2, 4, 4, 2)
    model[3].weight = model[0].weight
    placed = device_map(model, {0: 72, "cpu": 1000})
    assert placed == {"0": 0, "3": 0, "1": "cpu", "2": "cpu"}


def test_a_device_that_would_be_empty_gets_a_later_layer(caplog):
    model = chain(9, 1, 9)  # 80, 16 and 80 bytes
    with caplog.at_level(logging.INFO, "accelerate.utils.modeling"):
        assert device_map(model, {0: 100}) == {"": "disk"}
    assert "insufficient memory" in caplog.text
    assert "0 (160 bytes)" in caplog.text
    caplog.clear()
    filled = device_map(model, {0: 100}, fallback_allocation=True)
    assert filled == {"1": 0, "0": "disk", "2": "disk"}
    assert not caplog.records


def test_buffers_of_offloaded_layers_need_an_accelerator():
    model = chain(2, 2, 2)
    model[1].register_buffer("table", torch.zeros(10))
    model[2].register_buffer("table", torch.zeros(10))
    memory = {0: 90, "cpu": 1000}
    with pytest.warns(UserWarning, match="pass offload_buffers=True"):
        placed = device_map(model, memory)
    assert placed == {"0": 0, "1": "cpu", "2": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_map(model, memory, offload_buffers=True) == placed


def test_parts_of_a_split_module_are_all_in_the_map(capsys):
    model = nn.Sequential(chain(1, 9))
    model[0].register_buffer("scale", torch.ones(1))
    model[0].register_parameter("shift", nn.Parameter(torch.ones(1)))
    placed = device_map(model, {0: 103, "cpu": 1000}, verbose=True, clean_result=False)
    assert placed == {"0.shift": 0, "0.0": 0, "0.1": 0, "0.scale": "cpu"}
    name("check_device_map")(model, placed)
    assert "0 is split" in capsys.readouterr().out


def test_a_module_that_fits_is_found_in_order() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(9, 9), nn.Linear(2, 1)), nn.Linear(1, 1))
    sizes = compute_module_sizes(model)
    children = list(model.named_children())
    name, module, rest = fallback_allocate(children, sizes, 12)
    assert (name, module) == ("0.1", model[0][1])
    assert [one for one, _ in rest] == ["0.0", "1"]
    assert fallback_allocate(children, sizes, 1) == (None, None, children)
    assert fallback_allocate(children, sizes, "much") == (None, None, children)
    assert fallback_allocate(children, sizes, "13B", ["Sequential"])[0] == "1"


def test_tied_modules_count_with_a_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    sizes = compute_module_sizes(model)
    assert (sizes["0"], sizes["1"]) == (24, 8)
    rest = [("1", model[1])]
    assert get_module_size_with_ties(["1.weight"], 24, sizes, rest) == (32, ["1"], [model[1]])
    assert get_module_size_with_ties(["1.weight"], 24, sizes, []) == (24, [], [])
    groups = find_tied_parameters(model)
    assert fallback_allocate(list(model.named_children()), sizes, 31, None, groups)[0] == "1"


def test_a_bool_counts_as_a_bit():
    assert name("dtype_byte_size")(torch.bool) == 1 / 8
    assert name("dtype_byte_size")(torch.bfloat16) == 2
    assert accel_callbacks.utils.dtype_byte_size(torch.bool) == 1


def test_an_entry_of_an_index_is_dtype_and_shape_and_its_file_is_still_checked(tmp_path):
    index = name("offload_weight")(torch.ones(2, 3), "w", tmp_path, {})
    assert index == {"w": {"dtype": "float32", "shape": [2, 3]}}
    name("save_offload_index")(index, tmp_path)
    (tmp_path / "w.dat").write_bytes(bytes(24))
    weights = name("OffloadedWeightsLoader")(save_folder=tmp_path)
    with pytest.raises(Exception, match="holds other bytes"):
        weights["w"]


def test_what_is_unused_in_a_checkpoint_is_a_record(tmp_path, caplog):
    path = tmp_path / "model.safetensors"
    name("save")({"weight": torch.ones(1, 1), "bias": torch.ones(1), "more": torch.ones(1)}, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        name("load_checkpoint_in_model")(nn.Linear(1, 1), path)
    [record] = caplog.records
    assert record.name == "accelerate.utils.modeling"
    assert record.levelname == "WARNING"
    assert "were not used when" in record.message
    assert "more" in record.message


def test_records_are_those_of_functions_under_foreign_names_alone(monkeypatch, caplog):
    old = SimpleNamespace(release="5.4.0-1-generic", system="Linux")
    monkeypatch.setattr(platform, "uname", lambda: old)
    name("check_os_kernel")()
    lines = name("convert_dict_to_env_variables")({"A": "1", "B": "<2"})
    assert lines == ["A=1\n"]
    assert [record.name for record in caplog.records] == [
        "accelerate.utils.other",
        "accelerate.utils.environment",
    ]
    assert name("check_os_kernel") is resolve("accelerate.utils.other", "check_os_kernel")


def test_a_map_with_other_names_is_a_warning():
    with pytest.warns(UserWarning, match="device_map keys do not match any submodules.*'other'"):
        name("check_device_map")(nn.Linear(1, 1), {"": "cpu", "other": 0})


def test_other_warnings_are_passed_on_and_errors_lose_none(caplog):
    from accel_callbacks.compat.records import log_warnings

    def fail() -> None:
        warnings.warn("to be logged", stacklevel=1)
        warnings.warn("late", DeprecationWarning, stacklevel=1)
        raise ValueError("wrong")

    call = log_warnings(fail, "accelerate.other")
    with pytest.warns(DeprecationWarning, match="late"), pytest.raises(ValueError, match="wrong"):
        call()
    assert [record.message for record in caplog.records] == ["to be logged"]


def test_tensors_that_share_memory_are_saved_once_where_that_is_asked_for(tmp_path, caplog):
    shared = torch.ones(2)
    name("save")({"a": shared, "b": shared}, tmp_path / "all")
    assert not caplog.records
    assert set(load_file(tmp_path / "all")) == {"a", "b"}
    name("save")({"a": shared, "b": shared}, tmp_path / "once", safe_serialization=True)
    [record] = caplog.records
    assert "Removed shared tensor" in record.message
    assert "'b'" in record.message
    assert set(load_file(tmp_path / "once")) == {"a"}
