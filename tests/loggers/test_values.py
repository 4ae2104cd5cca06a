from __future__ import annotations

import argparse
import dataclasses
import enum
import fractions
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loggers.values import copy_to_host, flat_config, flatten, plain_config, to_host


class CountingTensor(torch.Tensor):
    """A tensor that counts how often it is copied to the host."""

    reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.numpy):
            CountingTensor.reads += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1),
        (3, 3),
        (2**70, 2**70),
        (0.5, 0.5),
        (fractions.Fraction(1, 4), 0.25),
        ("text", "text"),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), 1),
        (np.array(2), 2),
        (np.str_("a"), "a"),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(7), 7),
        (torch.tensor(False), 0),
        (torch.tensor(1.5, requires_grad=True), 1.5),
    ],
)
def test_leaf(value: Any, expected: Any) -> None:
    flat = flatten({"a": {"b": value}}, lambda key: None)
    assert flat == {"a/b": expected}
    assert type(flat["a/b"]) is type(expected)


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        object(),
        1j,
        b"x",
        np.ones(1),
        np.complex64(1),
        torch.ones(1),
        torch.ones(2, 2),
        torch.tensor(1j),
        torch.tensor(1.0, device="meta"),
    ],
)
def test_anything_else_names_the_key(value: Any) -> None:
    with pytest.raises(TypeError, match="'train/grads'"):
        flatten({"train": {"ok": 1, "grads": value}}, lambda key: None)


def test_bad_keys() -> None:
    with pytest.raises(TypeError, match="keys are str"):
        flatten({"a": {3: 1.0}}, lambda key: None)
    with pytest.raises(ValueError, match="'a/b' twice"):
        flatten({"a/b": 1.0, "a": {"b": 2.0}}, lambda key: None)
    with pytest.raises(TypeError, match="dict"):
        flatten([("a", 1.0)], lambda key: None)  # type: ignore[arg-type]


def test_none_is_reported_and_left_out() -> None:
    seen: list[str] = []
    assert flatten({"a": None, "b": {"c": None, "d": 1}}, seen.append) == {"b/d": 1}
    assert seen == ["a", "b/c"]


def test_all_tensors_of_a_device_are_read_in_one_copy() -> None:
    CountingTensor.reads = 0
    rows: list[dict[str, Any]] = [
        {"f32": torch.tensor(i + 0.5).as_subclass(CountingTensor), "n": i} for i in range(50)
    ]
    rows.append({"f16": torch.tensor(0.25, dtype=torch.float16).as_subclass(CountingTensor)})
    rows.append({"count": torch.tensor(2**40 + 1).as_subclass(CountingTensor)})
    rows.append({"flag": torch.tensor(True).as_subclass(CountingTensor)})
    assert to_host(rows) == []
    assert CountingTensor.reads == 1
    assert rows[7] == {"f32": 7.5, "n": 7}
    assert rows[50:] == [{"f16": 0.25}, {"count": 2**40 + 1}, {"flag": 1}]
    assert type(rows[51]["count"]) is int


def test_a_device_that_fails_loses_only_its_own_values() -> None:
    rows: list[dict[str, Any]] = [{"gone": torch.empty((), device="meta"), "kept": 1.0}]
    errors = to_host(rows)
    assert rows == [{"kept": 1.0}]
    assert len(errors) == 1


def test_copy_keeps_nan_and_order() -> None:
    read = copy_to_host(
        [torch.tensor(3), torch.tensor(math.nan), torch.tensor(4), torch.tensor(5.0)]
    )
    assert read[0] == 3
    assert math.isnan(read[1])
    assert read[2:] == [4, 5.0]


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Optim:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


class Opaque:
    pass


def test_any_config_becomes_plain_json() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    plain = plain_config(
        {
            "optim": Optim(),
            "args": argparse.Namespace(seed=None, flag=True),
            "path": Path("data"),
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "color": Color.RED,
            "cls": Optim,
            "set": {"b", "a"},
            "np": np.float32(0.5),
            "tensor0": torch.tensor(2),
            "tensor": torch.ones(2, 3),
            "opaque": Opaque(),
            3: "int key",
            "loop": loop,
        }
    )
    json.dumps(plain)
    del plain["loop"]
    here = Optim.__module__
    assert plain == {
        "optim": {"lr": 0.1, "betas": [0.9, 0.99]},
        "args": {"seed": None, "flag": True},
        "path": "data",
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "color": "RED",
        "cls": f"{here}.Optim",
        "set": ["a", "b"],
        "np": 0.5,
        "tensor0": 2,
        "tensor": "torch.Tensor(shape=[2, 3])",
        "opaque": f"{here}.Opaque",
        "3": "int key",
    }


def test_config_of_other_shapes() -> None:
    assert flat_config(Optim()) == {"lr": 0.1, "betas": "[0.9, 0.99]"}  # type: ignore[arg-type]
    assert flat_config({"a": {}, "b": {"c": True}}) == {"a": "{}", "b/c": True}
    with pytest.raises(TypeError, match="vars"):
        plain_config([1])  # type: ignore[arg-type]
