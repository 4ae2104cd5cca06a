"""Loops of unusual shapes that resume to the weights of the unbroken run, on two processes."""

from __future__ import annotations

import pytest

from tests.accel_callbacks.loop.test_resume_exactly import accumulated

pytestmark = pytest.mark.distributed


def both(folder, done, own):
    accumulated(folder, done, None, own)
    return accumulated(folder, None, done, own) == accumulated(None, None, None, own)


@pytest.mark.parametrize(("done", "own"), [(4, False), (5, True)])
def test_gradients_that_a_script_accumulates_by_itself_are_saved(pool, tmp_path, done, own):
    assert pool.run(both, tmp_path, done, own) == [True, True]
