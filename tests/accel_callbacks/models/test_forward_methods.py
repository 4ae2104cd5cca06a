"""Several forward methods of a model on one process: the plain model's, in the precision."""

from __future__ import annotations

import copy

import pytest
import torch

from accel_callbacks import Accelerator


class Coder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(2, 2)
        self.outside = torch.nn.Linear(2, 1)
        self.seen: list[torch.dtype] = []

    def encode(self, x):
        y = self.inside(x)
        self.seen.append(y.dtype)
        return y

    def forward(self, x):
        y = self.encode(x)
        self.seen.append(y.dtype)
        return self.outside(y)

    def describe(self):
        """Say what it is."""
        return "a coder"


X = torch.ones(1, 2)


def bf16() -> Accelerator:
    return Accelerator(cpu=True, mixed_precision="bf16")


def test_b6_without_marks_a_method_is_the_plain_models():
    model = bf16().prepare(Coder())
    assert model.encode(X).dtype is torch.float32
    assert model.seen == [torch.float32]
    assert model.describe() == "a coder"


def test_b6_a_marked_method_runs_in_the_precision_and_returns_fp32():
    model = bf16().prepare(Coder(), forward_methods=["encode"])
    assert model.encode(X).dtype is torch.float32
    assert model.seen == [torch.bfloat16]
    assert model.describe() == "a coder"


def test_b6_a_marked_method_that_the_forward_calls_is_not_cast_in_between():
    model = bf16().prepare(Coder(), forward_methods="encode")
    assert model(X).dtype is torch.float32
    assert model.seen == [torch.bfloat16] * 2


def test_b6_after_an_error_a_marked_method_runs_in_the_precision_again():
    model = bf16().prepare(Coder(), forward_methods=["encode"])
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    model.encode(X)
    assert model.seen == [torch.bfloat16]


def test_b6_in_full_precision_a_marked_method_is_left_alone():
    model = Coder()
    before = dict(vars(model))
    prepared = Accelerator(cpu=True).prepare(model, forward_methods=["encode"])
    assert prepared is model
    assert vars(prepared) == before


def test_b6_methods_may_be_marked_in_a_second_prepare():
    accel = bf16()
    model = accel.prepare(Coder())
    assert accel.prepare_model(model, forward_methods=["encode"]) is model
    model.encode(X)
    assert model.seen == [torch.bfloat16]


def test_b6_unwrap_model_gives_the_plain_methods_back():
    accel = bf16()
    model = accel.prepare(Coder(), forward_methods=["encode"])
    plain = accel.unwrap_model(model, keep_fp32_wrapper=False)
    plain(X)
    assert plain.seen == [torch.float32] * 2
    assert not {"encode", "forward"} & vars(plain).keys()


def test_b6_a_copy_has_marked_methods_of_its_own():
    model = bf16().prepare(Coder(), forward_methods=["encode"])
    twin = copy.deepcopy(model)
    twin(X)
    twin.encode(X)
    assert (model.seen, twin.seen) == ([], [torch.bfloat16] * 3)


def test_b6_of_several_models_each_takes_the_methods_that_it_has():
    model, other = bf16().prepare(Coder(), torch.nn.Linear(2, 2), forward_methods=["encode"])
    model.encode(other(X))
    assert model.seen == [torch.bfloat16]


def test_b6_compiled_models_run_marked_methods_too():
    accel = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="eager")
    model = accel.prepare(Coder(), forward_methods=["encode"])
    assert model(X).dtype is model.encode(X).dtype is torch.float32
    assert set(model.seen) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("encod", "Coder has no method 'encod'. Did you mean 'encode'?"),
        ("inside", "Coder has no method 'inside'"),
        ("forward", "'forward' is a method of torch.nn.Module itself"),
    ],
)
def test_b6_a_name_that_is_no_method_is_refused_before_anything_changes(name, words):
    model = Coder()
    with pytest.raises(ValueError, match="forward_methods") as caught:
        bf16().prepare(model, forward_methods=[name])
    assert words in str(caught.value)
    assert "forward" not in vars(model)
