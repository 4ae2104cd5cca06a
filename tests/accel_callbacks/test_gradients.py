"""Gradients times a factor: one kernel for those of a device and dtype, and the odd ones too."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel_callbacks.gradients import multiply_gradients


class Operations(TorchDispatchMode):
    """Count the operations that torch dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def parameters(dtype: torch.dtype, count: int = 5) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(n + 1, dtype=dtype)) for n in range(count)]
    for n, one in enumerate(made):
        one.grad = torch.linspace(-1, 1, one.numel(), dtype=dtype) + n
    return made


@pytest.mark.parametrize("factor", [0.3, torch.tensor(0.3, dtype=torch.float64)], ids=str)
def test_gradients_of_a_dtype_are_multiplied_together_and_bit_for_bit_alike(factor):
    made = [*parameters(torch.float32), *parameters(torch.bfloat16)]
    made.append(torch.nn.Parameter(torch.ones(1)))  # without a gradient
    wanted = []
    for one in made[:-1]:
        alone = one.grad.clone()
        if isinstance(factor, torch.Tensor):
            alone.mul_(factor.to(one.dtype))
        else:
            torch._foreach_mul_([alone], factor)
        wanted.append(alone)
    with Operations() as seen:
        multiply_gradients(torch.optim.SGD(made), factor)
    assert seen.counts.pop("_foreach_mul_") == 2
    casts = {name: n for name, n in seen.counts.items() if "copy" in name}
    assert sum(casts.values()) <= 2  # the factor, once for each dtype
    assert "mul_" not in seen.counts
    for one, product in zip(made, wanted, strict=False):
        assert torch.equal(one.grad, product)
    assert made[-1].grad is None


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=str)
def test_sparse_gradients_among_dense_ones(factor):
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    line = torch.nn.Linear(2, 1)
    line(torch.ones(1, 2)).sum().backward()
    multiply_gradients(torch.optim.SGD([*table.parameters(), *line.parameters()]), factor)
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0.0, 1.0, 0.0, 0.5]
    assert line.weight.grad.tolist() == [[0.5, 0.5]]


class Odd(torch.Tensor):
    """A subclass with a rule of its own, as DTensor is: foreach kernels refuse a mixed list."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert "_foreach" not in getattr(func, "__name__", "")
        return super().__torch_function__(func, types, args, kwargs)


def test_subclasses_of_tensors_are_multiplied_one_by_one():
    plain, odd = torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Odd)
    plain.grad = torch.ones(2)
    odd.requires_grad_()
    odd.grad = torch.ones(2).as_subclass(Odd)
    multiply_gradients(torch.optim.SGD([plain, odd]), torch.tensor(3.0))
    assert plain.grad.tolist() == [3.0, 3.0]
    assert odd.grad.tolist() == [3.0, 3.0]
