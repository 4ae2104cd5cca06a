"""Copies to an accelerator: in which order they are started, with a device that keeps a record."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from accel_callbacks.models.offload import residence
from accel_callbacks.models.offload.contents import Filler
from accel_callbacks.models.offload.device_copies import (
    DeviceCopies,
    PinnedBuffers,
    _allocate_pinned,
    device_copies,
)
from accel_callbacks.models.offload.window import Window
from tests.accel_callbacks.models.offload.adapted import pretrained, saved, words
from tests.accel_callbacks.models.offload.attached import attached


class Stream:
    def __init__(self, name, log):
        self.name = name
        self._log = log

    def wait_event(self, event):
        self._log.append(("wait", self.name, event.number))


class Device:
    """A torch module of a device whose memory is that of the host, with a record of all calls."""

    def __init__(self):
        self.log = []
        self._numbers = itertools.count()
        self._current = Stream("compute", self.log)

    def Stream(self, device):
        return Stream("copy", self.log)

    def current_stream(self, device):
        return self._current

    def stream(self, stream):
        self.log.append(("on", stream.name))
        return torch.no_grad()

    def Event(self):
        event = SimpleNamespace(number=next(self._numbers))
        event.record = lambda stream: self.log.append(("record", stream.name, event.number))
        event.synchronize = lambda: self.log.append(("synchronize", event.number))
        return event


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None, raising=False)
    return made


def test_a_copy_is_behind_what_used_the_memory_and_before_what_uses_it(device):
    copies = DeviceCopies(torch.device("cpu"), device)

    def fill(unit, memory, after):
        return copies.copy([(memory, torch.full_like(memory, unit))], after)

    opened = Window([8] * 4, fill, copies.allocate, limit=16, copies=copies)
    for unit in (0, 1, 2):
        assert opened.acquire(unit).tolist() == [unit] * 8
        device.log.append(("compute", unit))
        opened.release(unit)
    opened.close()
    log = device.log
    for unit in (0, 1, 2):
        copied = copied_event(log, unit)
        # The computation is behind the copy ...
        assert log.index(("wait", "compute", copied)) < log.index(("compute", unit))
    # ... and the copy of 2, to the memory of 0, behind an event after the computation with 0.
    marks = [n for kind, name, n in filter(of("record"), log) if name == "compute"]
    waits = [n for kind, name, n in filter(of("wait"), log) if name == "copy"]
    assert set(marks[:3]) <= set(waits) <= set(marks)
    assert log.index(("record", "compute", marks[2])) > log.index(("compute", 0))


def of(kind):
    return lambda entry: entry[0] == kind


def copied_event(log, unit):
    return [n for kind, name, n in filter(of("record"), log) if name == "copy"][unit]


def test_a_pinned_buffer_is_read_into_after_the_copy_from_it_has_ended(device):
    buffers = PinnedBuffers(100)
    copies = DeviceCopies(torch.device("cpu"), device)
    seen = []
    for _ in range(4):
        host = buffers.next()
        assert host.data_ptr() % 4096 == 0
        seen.append(host.data_ptr())
        buffers.give(host, copies.copy([(torch.empty(100, dtype=torch.uint8), host)], []))
    assert (seen[0], seen[1]) == (seen[2], seen[3])
    assert len(set(seen)) == 2
    ends = [entry[2] for entry in device.log if entry[0] == "record"]
    assert [entry[1] for entry in device.log if entry[0] == "synchronize"] == ends[:2]
    position = device.log.index(("synchronize", ends[0]))
    assert position < device.log.index(("record", "copy", ends[2]))


def test_a_model_on_such_a_device_is_the_resident_one(device, monkeypatch, tmp_path):
    copies = DeviceCopies(torch.device("cpu"), device)
    monkeypatch.setattr(residence, "device_copies", lambda of: copies)
    plain = pretrained()
    monkeypatch.setattr(residence.Offload, "_is_in_place", lambda self, name: False)
    model, offload = attached(plain, saved(tmp_path), held=["blocks.1", "start"])
    batch = torch.stack(words(3))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(batch), plain(batch))
    assert offload.staging_bytes > 0
    assert offload.traffic.fetches > 6
    # All units are copied whole: one event a fetch, on the copy stream.
    ends = [entry for entry in device.log if entry[:2] == ("record", "copy")]
    assert len(ends) == offload.traffic.fetches
    offload.window.close()


@pytest.mark.parametrize("nbytes", [1, 4096, 5000])
def test_memory_begins_at_a_page(nbytes):
    memory = _allocate_pinned(nbytes)
    assert memory.nbytes == nbytes
    assert memory.data_ptr() % 4096 == 0
    memory.fill_(7)  # all of it is there
    assert int(memory.sum(dtype=torch.int64)) == 7 * nbytes


def test_without_streams_copies_are_waited_for(tmp_path):
    assert device_copies(torch.device("cpu")) is None
    assert device_copies(torch.device("mps")) is None
    _, offload = attached(pretrained(), saved(tmp_path))
    filler = Filler(offload._contents, offload.stored, {}, lambda count: None)
    memory = torch.empty(offload._contents[2].nbytes, dtype=torch.uint8)
    assert filler(2, memory) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_model_is_the_resident_one(tmp_path):
    device = torch.device("cuda", 0)
    plain = pretrained()
    model, offload = attached(plain, saved(tmp_path), held=["blocks.1", "start"], device=device)
    plain.to(device)
    batch = torch.stack(words(3)).to(device)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(model(batch), plain(batch))
    x = torch.randn(5, 16, device=device, requires_grad=True)
    y = x.detach().requires_grad_()
    for blocks, inputs in ((model.blocks, x), (plain.blocks, y)):
        for block in blocks:
            inputs = block(inputs)
        inputs.square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert all(one.is_pinned() for one in offload.held.values())
    assert offload.staging_bytes > 0
