"""The search for a batch size that fits, on one process."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    RemoteError,
    find_executable_batch_size,
)
from accel_callbacks.addons.tuning.executable_batch_size import should_reduce_batch_size


def out_of_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)  # the real error of the real allocator


def remote(text: str) -> RemoteError:
    trace = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    {text}\n'
    return RemoteError(rank=1, where="a block", details=trace + text)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no more"),
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(h)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        remote("torch.OutOfMemoryError: CUDA out of memory."),
        remote("MemoryError"),
        RemoteError(rank=1, where="a block", details="MemoryError"),
    ],
)
def test_these_errors_say_that_memory_ran_out(error):
    assert should_reduce_batch_size(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("CUDA out of memory"),
        RemoteError(
            rank=1,
            where="a block",
            details='Traceback:\n  File "a.py", line 1\n    fail("out of memory")\nKeyError: 1',
        ),
    ],
)
def test_these_do_not(error):
    assert not should_reduce_batch_size(error)


def test_the_allocators_own_error_is_one():
    with pytest.raises(RuntimeError) as caught:
        out_of_memory()
    assert should_reduce_batch_size(caught.value)


def sizes_until(limit: int, **options) -> list[int]:
    """The sizes that are tried where memory is enough for ``limit``."""
    tried = []

    @find_executable_batch_size(**options)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > limit:
            out_of_memory()

    train()
    return tried


def test_the_size_shrinks_by_a_tenth_until_it_fits():
    assert sizes_until(100) == [128, 115, 103, 92]
    assert sizes_until(3, starting_batch_size=5) == [5, 4, 3]


def test_the_reducer_is_used_with_parentheses_too():
    assert sizes_until(1, starting_batch_size=8, reduce_batch_size_fn=lambda n: n // 2) == [
        8,
        4,
        2,
        1,
    ]
    following = iter([5, 2])  # as in Accelerate, where it gets no argument
    options = {"starting_batch_size": 8, "reduce_batch_size_fn": lambda: next(following)}
    assert sizes_until(2, **options) == [8, 5, 2]


def test_it_decorates_without_parentheses_and_as_a_call():
    def train(batch_size, factor, *, plus=0):
        """Train."""
        if batch_size > 100:
            raise MemoryError
        return batch_size * factor + plus

    found = find_executable_batch_size(train)
    assert found(2, plus=1) == 92 * 2 + 1
    assert found(2, plus=1) == 92 * 2 + 1  # a call begins anew
    assert (found.__name__, found.__doc__) == ("train", "Train.")
    assert find_executable_batch_size(train, 10)(1) == 10
    assert find_executable_batch_size(functools.partial(train, factor=3), 10)() == 30


def test_it_decorates_methods():
    class Trainer:
        @find_executable_batch_size(starting_batch_size=4)
        @staticmethod
        def train(batch_size, more):
            return batch_size + more

    assert Trainer.train(1) == 5


def test_no_size_left_is_an_error_that_says_so():
    with pytest.raises(RuntimeError, match=r"reached zero: memory .*allocate memory.*model"):
        sizes_until(0, starting_batch_size=2)
    with pytest.raises(RuntimeError, match=r"reached zero.*no attempt.*starting_batch_size than 0"):
        sizes_until(0, starting_batch_size=0)


@pytest.mark.parametrize("wrong", [8, 9, -1, 4.0, None, "4"])
def test_a_reducer_must_give_something_smaller(wrong):
    with pytest.raises(ValueError, match=r"reduce_batch_size_fn gave .* after 8 failed"):
        sizes_until(1, starting_batch_size=8, reduce_batch_size_fn=lambda n: wrong)


def test_other_errors_are_raised_as_they_are():
    tried = []

    @find_executable_batch_size
    def train(batch_size):
        tried.append(batch_size)
        raise KeyError("a column")

    with pytest.raises(KeyError, match="a column"):
        train()
    assert tried == [128]


def test_the_batch_size_in_the_call_is_an_error_that_shows_the_call():
    @find_executable_batch_size
    def train(batch_size, model):
        raise AssertionError("never called")

    for call in (lambda: train(32, "model"), lambda: train("model", batch_size=32), train):
        with pytest.raises(TypeError, match=r"first argument of train\(batch_size, model\)"):
            call()


def test_what_a_failed_attempt_held_is_freed_before_the_next():
    held = []

    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size):
        assert [ref() for ref in held] == [None] * len(held)
        activations = torch.ones(batch_size)
        circle = [activations]
        circle.append(circle)  # only the garbage collector frees it
        held.append(weakref.ref(activations))
        if batch_size > 1:
            out_of_memory()
        return batch_size

    assert train() == 1
    assert len(held) == 3


def test_the_search_with_an_accelerator_trains_in_the_end():
    accel = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        accel.free_memory()
        model = torch.nn.Linear(1, 1)
        data = torch.utils.data.DataLoader(torch.ones(16, 1), batch_size)
        model, optimizer, data = accel.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), data
        )
        for batch in data:
            accel.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            if accel.current_run.global_step == 2 and batch_size > 4:
                out_of_memory()
        return batch_size

    assert train() == 4
    assert accel.current_run.global_step == 4
    assert [len(group) for group in (accel.models, accel.optimizers, accel.loaders)] == [1] * 3
