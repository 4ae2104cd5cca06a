"""Small functions of Accelerate: what they return."""

from __future__ import annotations

import platform
import socket
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_callbacks.compat import helpers
from accel_callbacks.compat.environment import (
    check_os_kernel,
    convert_dict_to_env_variables,
    is_port_in_use,
    str_to_bool,
)
from accel_callbacks.compat.names import resolve


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
        self.second = torch.nn.Linear(1, 1)


MODEL = Block()
CALLS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("str_to_bool", ("YES",), 1),
    ("str_to_bool", ("off",), 0),
    ("str_to_bool", ("t", True), True),
    ("parse_flag_from_env", ("ACCEL_TEST_FLAG",), True),
    ("parse_flag_from_env", ("ACCEL_TEST_NONE",), False),
    ("parse_choice_from_env", ("ACCEL_TEST_FLAG",), "On"),
    ("parse_choice_from_env", ("ACCEL_TEST_NONE",), "no"),
    ("get_int_from_env", (["ACCEL_TEST_NONE", "ACCEL_TEST_NUMBER"], 1), 7),
    ("get_int_from_env", (["ACCEL_TEST_NONE"], 1), 1),
    ("are_libraries_initialized", ("torch", "no_such_library"), ["torch"]),
    ("merge_dicts", ({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}, "c": 4}), None),
    ("convert_bytes", (5,), "5 bytes"),
    ("convert_bytes", (1536,), "1.5 KB"),
    ("convert_bytes", (3 * 2**50,), "3.0 PB"),
    ("get_pretty_name", (Block,), "Block"),
    ("get_pretty_name", (MODEL,), "Block"),
    ("get_module_class_from_name", (MODEL, "ReLU"), torch.nn.ReLU),
    ("get_module_class_from_name", (MODEL, "Conv2d"), None),
    ("model_has_dtensor", (MODEL,), False),
    ("has_compiled_regions", (MODEL,), False),
    ("is_peft_model", (MODEL,), False),
    ("is_weights_only_available", (), True),
    ("is_xccl_available", (), False),
    ("is_pippy_available", (), True),
    ("is_tqdm_available", (), True),
    ("is_sagemaker_available", (), False),
    ("is_transformer_engine_mxfp8_available", (), False),
    ("ignorant_find_batch_size", (["a", torch.ones(3)],), 3),
    ("do_nothing", (1, 2), None),
    ("get_current_device_type", (), ("cuda", "MULTI_GPU")),
    ("check_cuda_p2p_ib_support", (), True),
    ("fsdp2_canonicalize_names", ({"_orig_mod.a._checkpoint_wrapped_module.w": 1},), {"a.w": 1}),
    ("find_first_last_linear_layers", (MODEL,), ("first.0", "second")),
    ("filter_linear_layers", (MODEL.second, "second", []), False),
    ("get_model_tp_size", (MODEL,), None),
    ("has_repeated_blocks", (MODEL,), False),
    ("is_rocm_available", (), False),
]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"), CALLS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(CALLS)]
)
def test_a_call_returns_what_it_does_there(monkeypatch, name, arguments, expected):
    monkeypatch.setenv("ACCEL_TEST_FLAG", "On")
    monkeypatch.setenv("ACCEL_TEST_NUMBER", "7")
    if name == "merge_dicts":
        expected = {"a": {"b": 1, "d": 3}, "c": 2}
    result = resolve("accelerate.utils", name)(*arguments)
    assert result == expected
    assert type(result) is type(expected)


def test_modules_come_after_those_inside_of_them():
    names = [name for name, _ in helpers.get_module_children_bottom_up(MODEL, return_fqns=True)]
    assert names == ["first.0", "first.1", "first", "second", ""]
    assert helpers.get_module_children_bottom_up(MODEL)[-1] is MODEL


def test_lines_of_an_environment_file():
    given = {"A": "1", "B": "two words", "C": "", "D": "x"}
    with pytest.warns(UserWarning, match="without 'B', 'C': its lines have no") as caught:
        assert convert_dict_to_env_variables(given) == ["A=1\n", "D=x\n"]
    assert "two words" not in str(caught[0].message)  # which may be a secret


@pytest.mark.parametrize(
    ("system", "release", "is_old"),
    [("Linux", "4.18.0-553.el8", True), ("Linux", "5.4.19+", True), ("Linux", "5.15+", False),
     ("Linux", "6.8.0-45-generic", False), ("Linux", "rolling", False), ("Darwin", "4.0.1", False)],
)  # fmt: skip
def test_a_kernel_under_which_processes_may_hang(monkeypatch, system, release, is_old):
    machine = SimpleNamespace(system=system, release=release)
    monkeypatch.setattr(platform, "uname", lambda: machine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_os_kernel()
    texts = [f"Linux {release} is older than 5.5.0, and processes may hang: update it."]
    assert [str(warning.message) for warning in caught] == (texts if is_old else [])


def test_a_truth_value_that_is_none():
    with pytest.raises(ValueError, match=r"invalid truth value maybe: use one of"):
        str_to_bool("maybe")


def test_a_port_that_is_listened_on():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        server.listen()
        port = server.getsockname()[1]
        assert is_port_in_use(port)
    assert not is_port_in_use(port)


def test_a_compiled_block_is_found():
    model = Block()
    model.second.compile(backend="eager")
    assert helpers.has_compiled_regions(model)
