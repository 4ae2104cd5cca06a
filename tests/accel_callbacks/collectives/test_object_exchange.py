"""Objects of any size among ranks, also where the group serves no tensors of the CPU."""

from __future__ import annotations

import os
from unittest import mock

import pytest

from accel_callbacks import Accelerator
from accel_callbacks.collectives import objects
from accel_callbacks.collectives.objects import exchange, send_object

pytestmark = pytest.mark.distributed
# Of the texts: some of them pickled just below, at and above the size of a short message.
LENGTHS = (0, 1, *range(990, 1020), 5000, 300_000)


def each_length(serves_cpu: bool) -> list[int]:
    Accelerator(cpu=True)
    rank, wrong = int(os.environ["RANK"]), []
    with mock.patch.object(objects, "serves_cpu", return_value=serves_cpu):
        for length in LENGTHS:
            texts = ["a" * length, "bc"]
            for order in (texts, texts[::-1]):  # the long one is of rank 0, and of rank 1
                sent = [send_object(order[rank], source) for source in (0, 1)]
                if exchange(order[rank]) != order or sent != order:
                    wrong.append(length)
    return wrong


@pytest.mark.parametrize("serves_cpu", [True, False])
def test_objects_arrive_at_any_length(pool, serves_cpu):
    assert pool.run(each_length, serves_cpu) == [[], []]


def passes_a_lambda(serves_cpu: bool) -> list[str]:
    Accelerator(cpu=True)
    rank, errors = int(os.environ["RANK"]), []
    with mock.patch.object(objects, "serves_cpu", return_value=serves_cpu):
        value = (lambda: None) if rank == 1 else rank
        for collective in (exchange, lambda passed: send_object(passed, 1)):
            try:
                collective(value)
            except TypeError as error:
                errors.append(str(error).partition(",")[0])
        errors.append(str(exchange(rank)))  # the ranks are still in step
    return errors


@pytest.mark.parametrize("serves_cpu", [True, False])
def test_what_cannot_be_pickled_is_raised_on_all(pool, serves_cpu):
    complaint = "process 1 passed an object that cannot be sent"
    expected = [complaint, complaint, "[0, 1]"]
    assert pool.run(passes_a_lambda, serves_cpu) == [expected] * 2
