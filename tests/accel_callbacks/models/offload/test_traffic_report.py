"""The report says what is alive."""

from __future__ import annotations

import gc

import pytest
import torch

from accel_callbacks.models.offload.residence import onloaded
from accel_callbacks.models.offload.traffic_report import report
from tests.accel_callbacks.models.offload.adapted import pretrained, saved, words
from tests.accel_callbacks.models.offload.attached import attached

BATCH = torch.stack(words(3))


def alive():
    """Return the bytes of all storages that tensors of the process lead to, by their pointers."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor) and one.is_cpu and type(one).__name__ != "AbsentWeight":
            storage = one.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def nbytes(tensors):
    return sum(one.nbytes for one in tensors)


@pytest.fixture
def plain():
    return pretrained().requires_grad_(False)


def test_what_it_says_is_alive(plain, tmp_path):
    folder = saved(tmp_path)
    before = alive()
    model, offload = attached(
        plain, folder, offloaded=["blocks", "start"], held=["blocks.1"], ahead=0
    )
    with torch.no_grad():
        model(BATCH)
    said = report(model)
    blocks = [nbytes(block.parameters()) for block in plain.blocks]
    assert dict(said.resident) == {"cpu": plain.embedding.weight.nbytes}
    assert said.held == blocks[1]
    assert said.on_disk == blocks[0] + blocks[2] + blocks[3] + plain.start.nbytes
    new = {key: size for key, size in alive().items() if key not in before}
    weights = sum(said.resident.values()) + said.held + said.window + said.staging + said.escaped
    assert sum(new.values()) == weights
    assert said.window <= said.window_limit
    assert said.traffic.peak <= said.window_limit
    with onloaded(model):
        during = report(model)
        assert during.window == offload.window.nbytes > said.window_limit
        assert during.resident == said.resident


def test_bytes_read_are_the_bytes_of_the_weights(plain, tmp_path):
    model, offload = attached(plain, saved(tmp_path), ahead=0)
    offload._limit = 0
    with torch.no_grad():
        model(BATCH)
    traffic = report(model).traffic
    assert traffic.bytes_read == nbytes(plain.parameters()) + plain.embedding.weight.nbytes
    assert (traffic.hits, traffic.misses, traffic.fetches) == (0, 7, 7)


def test_buffers_that_somebody_keeps_are_counted_until_he_lets_go(plain, tmp_path):
    model, _ = attached(plain, saved(tmp_path))
    kept = []
    for block in model.blocks:
        with onloaded(block):
            kept.append(block.up.weight[:1])
    model(BATCH)
    said = report(model)
    assert said.traffic.escapes == 4
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in kept}
    assert said.escaped == sum(storages.values())
    kept.clear()
    assert report(model).escaped == 0


def test_a_part_of_a_model_and_a_table(plain, tmp_path):
    model, _ = attached(plain, saved(tmp_path), held=["blocks.1"])
    model(BATCH)
    assert report(model.blocks[1]).on_disk == 0
    assert report(model.blocks[2]).on_disk == nbytes(plain.blocks[2].parameters())
    table = report(model).table()
    assert "read through the page cache" in table
    for word in ("held", "on disk", "window on cpu", "limit", "peak", "hits and misses", "waited"):
        assert word in table
    assert report(torch.nn.Linear(3, 1)).table() == "resident on cpu            16 B"
