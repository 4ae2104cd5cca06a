"""Adapters on an offloaded base, on two processes."""

from __future__ import annotations

import pytest

from accel_callbacks.callbacks import EMA
from tests.accel_callbacks.models.offload.adapted import (
    adapted,
    dispatched,
    prepared,
    resident,
    saved,
    train,
    weights,
)
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def run(folder: str, base: str, offloaded: bool):
    model = adapted(dispatched(base)) if offloaded else resident()
    accel, *objects = prepared(
        model,
        gradient_accumulation_steps=3,
        timeout=BOUND,
        callbacks=[EMA(decay=0.5)],
    )
    seen = train(accel, *objects, epochs=2)
    path = accel.save_state(f"{folder}/end", trainable_only=True)
    accel.load_state(path)
    found = weights(accel.unwrap_model(objects[0]))
    accel.end_training()
    return seen, {name: one.tolist() for name, one in found.items()}


def test_each_rank_fetches_the_base_and_adapters_are_averaged(pool, tmp_path):
    base = saved(tmp_path / "base")
    here = pool.run(run, str(tmp_path / "here"), base, False)
    there = pool.run(run, str(tmp_path / "there"), base, True)
    assert here == there
    assert here[0][1] == here[1][1]


def prepare(base: str):
    prepared(dispatched(base), timeout=BOUND)


def test_a_base_that_is_not_frozen_is_refused(pool, tmp_path):
    base = saved(tmp_path / "base")
    for kind, text in pool.outcomes(prepare, base):
        assert kind == "ValueError"
        assert "is offloaded and requires a gradient, which would be lost" in text
