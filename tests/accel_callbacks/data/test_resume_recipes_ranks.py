"""Scripts on two processes that resume by the recipes of Accelerate."""

from __future__ import annotations

import pytest

from accel_callbacks import ResumeError
from tests.support.resume_recipes import rest_of, resume, train

pytestmark = pytest.mark.distributed

# Each recipe with each place, and each of both with and without the alias.
CASES = [
    ("skip", "early", True),
    ("skip", "last batch of an epoch", False),
    ("continue", "early", False),
    ("continue", "in the second epoch", True),
    ("continue", "late", False),
    ("continue", "last batch of an epoch", True),
    ("none", "early", True),
    ("none", "late", False),
    ("none", "last batch of an epoch", False),
    ("none", "after an epoch", True),
    ("stateful", "in the second epoch", False),
    ("stateful", "last batch of an epoch", True),
]


def both(folder, recipe, place, alias):
    whole = train(None, "none", alias)
    expected = rest_of(whole, recipe, place, alias)
    try:
        return resume(folder, recipe, place, alias) == expected
    except ResumeError as error:
        return "after load_state were not trained on" in str(error) and expected is None


@pytest.mark.parametrize(("recipe", "place", "alias"), CASES)
def test_no_batch_is_lost_in_silence(pool, tmp_path, recipe, place, alias):
    assert pool.run(both, tmp_path, recipe, place, alias) == [True, True]
