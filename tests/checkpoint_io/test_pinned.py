"""Tensors of a device are read through a few pinned pieces, ahead of the writing of files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpoint_io import load, save
from checkpoint_io.format import pinned, safetensors
from checkpoint_io.format.pinned import PIECES
from checkpoint_io.format.safetensors import host_pieces


class Device:
    """Stands in for torch.cuda: copies happen only when the end of one is waited for."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.most_ahead = 0

    def copy_(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.queue.append((target, source))
        self.most_ahead = max(self.most_ahead, len(self.queue) - self.done)

    def current_stream(self, device: torch.device) -> Device:
        return self

    def Event(self) -> Event:
        return Event(self)


class Event:
    """The end of the copies that were in the queue when it was recorded."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: Device) -> None:
        self.end = len(stream.queue)

    def synchronize(self) -> None:
        for target, source in self.device.queue[self.device.done : self.end]:
            REAL_COPY(target, source)
        self.device.done = max(self.device.done, self.end)


REAL_COPY = torch.Tensor.copy_
PIECE = 64


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Tensors seem to be on the stand-in; memory is not pinned, and noted."""
    fake = Device()
    monkeypatch.setattr(safetensors, "streams_of", lambda place: fake)
    monkeypatch.setattr(safetensors, "_is_ready", lambda tensor: False)
    monkeypatch.setattr(safetensors, "PIECE", PIECE)
    monkeypatch.setattr(safetensors, "_READ_AHEAD_FROM", 1)
    monkeypatch.setattr(pinned, "pinned_memory", plain_memory)
    monkeypatch.setattr(
        torch.Tensor,
        "copy_",
        lambda target, source, non_blocking=False: fake.copy_(target, source, non_blocking),
    )
    return fake


def plain_memory(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 255, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


TENSORS = {
    "many pieces": torch.arange(200.0),
    "one piece": torch.arange(3.0),
    "exactly two": torch.arange(2 * PIECE, dtype=torch.uint8),
    "bf16": torch.arange(333.0).bfloat16(),
    "bool": torch.arange(150) % 3 == 0,
    "complex, conjugate": torch.complex(torch.arange(90.0), torch.ones(90)).conj(),
    "0-d": torch.tensor(3.0),
    "transposed": torch.arange(300.0).reshape(20, 15).t(),
    "rows larger than a piece": torch.arange(160.0).reshape(2, 80)[:, ::2],
}


@pytest.mark.parametrize("name", sorted(TENSORS))
def test_pieces_are_the_bytes_of_the_tensor_once_they_are_handed_out(device, name):
    tensor = TENSORS[name]
    read = b""
    for piece in host_pieces(tensor):
        assert len(piece) <= PIECE
        read += bytes(piece)
    assert read == bytes_of(tensor)


def test_copies_run_ahead_of_the_reader_in_a_few_pieces(device, monkeypatch):
    made = []

    def counted(nbytes: int) -> torch.Tensor:
        made.append(plain_memory(nbytes))
        return made[-1]

    monkeypatch.setattr(pinned, "pinned_memory", counted)
    pieces = host_pieces(torch.arange(200.0))
    next(pieces)
    assert (len(device.queue), device.done) == (PIECES, 1), "two are on their way"
    next(pieces)
    assert (len(device.queue), device.done) == (PIECES + 1, 2)
    assert len(list(pieces)) == -(-800 // PIECE) - 2
    assert len(made) == PIECES
    assert device.most_ahead <= PIECES


def test_without_pinned_memory_pieces_are_read_all_the_same(device, monkeypatch):
    monkeypatch.setattr(pinned, "pinned_memory", lambda nbytes: None)
    tensor = torch.arange(200.0)
    assert b"".join(map(bytes, host_pieces(tensor))) == bytes_of(tensor)


def test_a_checkpoint_that_is_read_in_pieces_is_the_same(device, monkeypatch, tmp_path):
    state: dict[str, Any] = {
        name: tensor for name, tensor in TENSORS.items() if not tensor.is_conj()
    }
    save(tmp_path / "c", state)
    assert device.done == len(device.queue) > 0
    monkeypatch.undo()
    read = load(tmp_path / "c").state
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)


def test_what_is_on_the_host_is_not_copied_at_all():
    tensor = torch.arange(5_000_000.0)
    (piece,) = host_pieces(tensor)
    before = bytes(piece[:4])
    tensor[0] = 9.0
    assert bytes(piece[:4]) != before, "the memory of the tensor itself"


def test_devices_that_copy_on_streams():
    assert pinned.streams_of(torch.device("cpu")) is None
    assert pinned.streams_of(torch.device("meta")) is None
    assert pinned.streams_of(torch.device("cuda")) is torch.cuda
