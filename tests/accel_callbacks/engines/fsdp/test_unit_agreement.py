"""What a rank says that came to other gradients than the others, or than the last time."""

from __future__ import annotations

import pytest

from accel_callbacks.engines.fsdp.unit_agreement import UnitAgreement, _Unit
from accel_callbacks.engines.rank_agreement import END


@pytest.fixture
def agreement() -> UnitAgreement:
    agreement = UnitAgreement(fills=False)
    agreement._units.append(_Unit("heads", ["a.weight", "b.weight"]))
    return agreement


GRADIENTS = ("gradients", 0)


@pytest.mark.parametrize(
    ("mask", "before", "text"),
    [
        (0b11, 0b01, "'b.weight' has a gradient on rank 0, where it had none before"),
        (0b01, 0b11, "'b.weight' has no gradient on rank 0, where it had one before"),
        (0b10, 0b11, "'a.weight' has no gradient on rank 0, where it had one before"),
    ],
)
def test_a_rank_that_changes_what_it_uses_names_the_parameter(agreement, mask, before, text):
    agreement._next[END, END] = (*GRADIENTS, before)
    assert str(agreement._timeout_error((*GRADIENTS, mask))).startswith(text)


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (None, "rank 0 came to the backward of 'heads', and not all ranks did"),
        (("forward", 0, 1), ", where the forward of 'heads' came before, and not all ranks did"),
        (("forward", 0, 2), ", where the forward of 'heads' without gradients came before"),
        (END, ", where the end of backward came before"),
    ],
)
def test_a_rank_alone_names_the_unit_and_what_came_before(agreement, known, text):
    if known is not None:
        agreement._next[END, END] = known
    message = str(agreement._timeout_error(("backward", 0, 0)))
    assert text in message
    assert "ignored_modules" in message


@pytest.mark.parametrize(
    ("first", "second", "has", "lacks"), [(0b01, 0b11, 1, 0), (0b11, 0b01, 0, 1)]
)
def test_of_two_ranks_the_one_with_the_gradient_is_named(agreement, first, second, has, lacks):
    sides = [(0, (*GRADIENTS, first)), (1, (*GRADIENTS, second))]
    text = f"'b.weight' has a gradient on rank {has} and none on rank {lacks}"
    assert str(agreement._conflict_error(sides)).startswith(text)


def test_on_one_rank_nothing_is_compared_and_each_pass_is_followed(agreement):
    for _ in range(2):
        for event in (("forward", 0, 1), ("backward", 0, 0), (*GRADIENTS, 1)):
            agreement.follow(event)
        agreement.finish_backward()
    assert agreement._rounds == 0
    assert agreement._last == END
    assert agreement._next[(*GRADIENTS, 1), END] == ("forward", 0, 1)
