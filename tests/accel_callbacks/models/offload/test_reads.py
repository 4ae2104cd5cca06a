"""Tensors reach their places in a buffer, however they lie in their files."""

from __future__ import annotations

import os
import random
import sys

import pytest
import torch

from accel_callbacks.models.offload import source
from accel_callbacks.models.offload.source import (
    Reader,
    StoredTensor,
    StoredWeights,
    WeightReadError,
    plan_reads,
)
from checkpoint_io.storage.buffers import aligned

SIZE = 200_000


def laid_out(files, choices: random.Random) -> dict[str, StoredTensor]:
    """Return tensors of odd sizes at odd places, neighbors and with gaps."""
    found = {}
    for path in files:
        position = choices.randrange(200)
        for number in range(choices.randrange(1, 12)):
            nbytes = choices.choice([3, 64, 100, 5000, choices.randrange(1, 30_000)])
            if position + nbytes > SIZE:
                break
            found[f"{path} {number}"] = StoredTensor(path, position, torch.uint8, (nbytes,))
            position += nbytes + choices.choice([0, 0, 0, 8, 5000])
    return found


def memory_for(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(aligned(max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


@pytest.mark.parametrize("direct", [False, True])
def test_random_layouts_in_small_pieces(direct, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_PIECE", 8192)  # so that moves go over the ends of reads
    contents = {str(tmp_path / name): os.urandom(SIZE) for name in "ab"}
    for path, content in contents.items():
        with open(path, "wb") as file:
            file.write(content)
    choices = random.Random(0)
    for _ in range(15):
        tensors = laid_out(contents, choices)
        reads = plan_reads(tensors, direct)
        reader = Reader(StoredWeights(tensors).identified())
        memory = memory_for(reads.nbytes)
        read = reader.fill(reads, memory)
        reader.close()
        assert read >= reads.stored_bytes
        for name, stored in tensors.items():
            at = reads.places[name]
            assert at % 64 == 0
            found = bytes(memory[at : at + stored.nbytes].numpy())
            assert found == contents[stored.path][stored.begin : stored.begin + stored.nbytes]


def test_bytes_are_counted_once_though_two_threads_read(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_PIECE", 4096)
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    tensors = {"one": StoredTensor(str(path), 0, torch.uint8, (SIZE,))}
    reads, counted = plan_reads(tensors, False), []
    read = Reader(StoredWeights(tensors).identified(), counted.append)
    assert read.fill(reads, memory_for(reads.nbytes)) == SIZE
    assert sum(counted) == SIZE
    assert len(counted) > 40


def test_the_first_of_several_failed_reads_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_PIECE", 4096)
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    tensors = {"one": StoredTensor(str(path), 0, torch.uint8, (SIZE,))}
    weights, reads = StoredWeights(tensors).identified(), plan_reads(tensors, False)
    os.truncate(path, 10_000)
    with pytest.raises(WeightReadError, match="file"):
        Reader(StoredWeights(tensors)).fill(reads, memory_for(reads.nbytes))
    with pytest.raises(WeightReadError, match="has changed"):
        Reader(weights).fill(reads, memory_for(reads.nbytes))


@pytest.mark.skipif(sys.platform != "linux", reason="what the kernel says of memory")
def test_buffers_ask_for_huge_pages():
    memory = memory_for(8 << 20)
    address, flags, here = memory.data_ptr(), "", False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first and ":" not in first:
                low, high = (int(part, 16) for part in first.split("-"))
                here = low <= address < high
            elif here and line.startswith("VmFlags"):
                flags = line
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("a kernel without huge pages")
    assert " hg" in flags
