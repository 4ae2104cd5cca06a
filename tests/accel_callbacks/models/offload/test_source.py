"""Reads of stored weights: every byte to its place, and never the bytes of another file."""

from __future__ import annotations

import errno
import os
import pickle
import random

import pytest
import torch

from accel_callbacks.models.offload import file_pages, source
from accel_callbacks.models.offload.contents import host_memory
from accel_callbacks.models.offload.source import (
    Reader,
    StoredTensor,
    StoredWeights,
    WeightReadError,
    plan_reads,
)
from checkpoint_io import save_model

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e4m3fn]


def stored(tmp_path, seed=0, files=2, count=12, step=1):
    """Return random bytes in files, and tensors in them in any order, with gaps and overlaps."""
    numbers = random.Random(seed)
    tensors = {}
    for k in range(files):
        (tmp_path / f"{k}.bin").write_bytes(numbers.randbytes(40_000))
    for k in range(count):
        dtype = numbers.choice(DTYPES)
        shape = numbers.choice([(), (0,), (7,), (5, 3), (900,)])
        begin = numbers.randrange(0, 30_000, step)
        path = str(tmp_path / f"{numbers.randrange(files)}.bin")
        tensors[f"t{k}"] = StoredTensor(path, begin, dtype, shape)
    return StoredWeights(tensors).identified()


def expected(one):
    with open(one.path, "rb") as file:
        file.seek(one.begin)
        return file.read(one.nbytes)


@pytest.mark.parametrize("how", ["buffered", "direct", "mapped"])
@pytest.mark.parametrize("step", [1, 64], ids=["anywhere", "aligned"])
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_is_in_its_place(tmp_path, monkeypatch, how, step, seed):
    monkeypatch.setattr(source, "_PIECE", 8192)
    monkeypatch.setattr(source, "_MAPPED", 8192)
    monkeypatch.setattr(source, "_GAP", 4096)
    weights = stored(tmp_path, seed, step=step)
    direct = how == "direct"
    reads = plan_reads(weights.tensors, direct, mapped=how == "mapped")
    assert bool(reads.pages) == (how == "mapped" and step == 64)
    if reads.pages and not file_pages.is_supported():
        pytest.skip("this system maps no pages into buffers")
    memory = host_memory(reads.nbytes)
    count = Reader(weights).fill(reads, memory)
    assert count >= reads.stored_bytes or direct
    for name, one in weights.tensors.items():
        at = reads.places[name]
        assert at % 64 == 0
        assert bytes(memory[at : at + one.nbytes].numpy()) == expected(one)
        assert bytes(weights.mapped(name).reshape(-1).view(torch.uint8).numpy()) == expected(one)


@pytest.mark.parametrize("how", ["direct", "mapped"])
def test_neighbors_in_a_file_are_read_at_once(monkeypatch, how):
    monkeypatch.setattr(source, "_GAP", 0)
    nbytes = 1 << 18  # more than a page of any system
    tensors = {
        f"t{k}": StoredTensor("weights.bin", k * nbytes, torch.uint8, (nbytes,))
        for k in (0, 4, 5, 6)
    }
    reads = plan_reads(tensors, how == "direct", mapped=how == "mapped")
    assert len(reads.pages if how == "mapped" else reads.pieces) == 2


def test_a_mapped_tensor_has_its_own_storage_and_does_not_write_to_the_file(tmp_path):
    weights = stored(tmp_path, step=64)
    name = next(name for name, one in weights.tensors.items() if one.nbytes)
    before = expected(weights.tensors[name])
    tensor = weights.mapped(name)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    tensor.reshape(-1).view(torch.uint8).zero_()
    assert expected(weights.tensors[name]) == before


maps_pages = pytest.mark.skipif(
    not file_pages.is_supported(), reason="this system maps no pages into buffers"
)


@maps_pages
def test_what_is_written_to_mapped_pages_does_not_reach_the_file(tmp_path):
    weights = stored(tmp_path, step=64)
    reads = plan_reads(weights.tensors, False, mapped=True)
    memory = host_memory(reads.nbytes)
    before = (tmp_path / "0.bin").read_bytes()
    reader = Reader(weights)
    reader.fill(reads, memory)
    memory.zero_()
    assert (tmp_path / "0.bin").read_bytes() == before
    reader.fill(reads, memory)  # and is gone with the next use
    for name, one in weights.tensors.items():
        at = reads.places[name]
        assert bytes(memory[at : at + one.nbytes].numpy()) == expected(one)


@maps_pages
@pytest.mark.parametrize("error", [errno.ENODEV, errno.EFAULT])
def test_where_pages_cannot_be_mapped_they_are_read(tmp_path, monkeypatch, error):
    def fails(*args):
        raise OSError(error, os.strerror(error))

    weights = stored(tmp_path, step=64)
    reads = plan_reads(weights.tensors, False, mapped=True)
    memory = host_memory(reads.nbytes)
    monkeypatch.setattr(file_pages, "map_pages", fails)
    Reader(weights).fill(reads, memory)
    for name, one in weights.tensors.items():
        at = reads.places[name]
        assert bytes(memory[at : at + one.nbytes].numpy()) == expected(one)


def fill(weights, reader=None, mapped=False):
    reads = plan_reads(weights.tensors, False, mapped=mapped and file_pages.is_supported())
    (reader or Reader(weights)).fill(reads, host_memory(reads.nbytes))


def one_file(tmp_path):
    path = tmp_path / "shard.safetensors"
    save_model({"a": torch.arange(500.0), "b": torch.arange(500.0)}, str(tmp_path))
    (path,) = tmp_path.glob("*.safetensors")
    return path, StoredWeights.of_checkpoint(str(tmp_path))


def test_a_file_that_is_written_to_is_an_error_also_after_pickling(tmp_path):
    path, weights = one_file(tmp_path)
    reader = Reader(weights)
    fill(weights, reader)
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    os.utime(path, ns=(0, 7))
    for again in (reader, Reader(weights), Reader(pickle.loads(pickle.dumps(weights)))):
        with pytest.raises(WeightReadError, match="changed since the model was dispatched"):
            fill(weights, again)
    with pytest.raises(WeightReadError, match="changed since"):
        weights.mapped("a")


def test_a_file_with_another_header_is_an_error_whatever_its_time(tmp_path):
    path, weights = one_file(tmp_path)
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"c"'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(WeightReadError, match="header"):
        fill(weights)


def test_a_file_that_is_replaced_while_it_is_open_is_read_to_its_end(tmp_path):
    path, weights = one_file(tmp_path)
    reader = Reader(weights)
    fill(weights, reader)
    other = tmp_path / "other"
    other.write_bytes(bytes(path.stat().st_size))
    os.replace(other, path)
    reads = plan_reads(weights.tensors, False)
    memory = host_memory(reads.nbytes)
    reader.fill(reads, memory)
    at = reads.places["b"]
    assert torch.equal(memory[at : at + 2000].view(torch.float32), torch.arange(500.0))
    with pytest.raises(WeightReadError, match="changed since"):
        fill(weights)  # who opens it now finds the other one


def test_a_truncated_file_names_the_tensor(tmp_path):
    path, weights = one_file(tmp_path)
    os.truncate(path, path.stat().st_size - 100)
    unchecked = StoredWeights(weights.tensors)
    with pytest.raises(WeightReadError, match=r"b in .*safetensors: truncated"):
        fill(unchecked)
    with pytest.raises(WeightReadError, match=r"truncated, b ends at"):
        unchecked.mapped("b")


@maps_pages
def test_a_file_that_ends_before_the_pages_to_map_names_the_tensor(tmp_path):
    path = tmp_path / "0.bin"
    path.write_bytes(bytes(40_960))
    unchecked = StoredWeights({"a": StoredTensor(str(path), 8192, torch.uint8, (40_960,))})
    with pytest.raises(WeightReadError, match=r"a in .*0.bin: truncated, it ends at byte 40960"):
        fill(unchecked, mapped=True)


def test_a_missing_file_says_what_to_do(tmp_path):
    path, weights = one_file(tmp_path)
    path.unlink()
    with pytest.raises(WeightReadError, match="put the file back"):
        fill(weights)


def test_an_error_of_the_disk_names_tensor_file_and_byte(tmp_path, monkeypatch):
    path, weights = one_file(tmp_path)

    def broken(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(source, "_readv", broken)
    message = rf"a in {path}: Input/output error at byte \d+: check the disk"
    with pytest.raises(WeightReadError, match=message):
        fill(weights)


def test_without_descriptors_open_files_are_closed(tmp_path, monkeypatch):
    weights = stored(tmp_path, files=4, count=20)
    open_files, most = set(), 2
    really_open, really_close = os.open, os.close

    def scarce(path, *args, **options):
        if len(open_files) >= most:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        found = really_open(path, *args, **options)
        open_files.add(found)
        return found

    def closed(descriptor):
        open_files.discard(descriptor)
        really_close(descriptor)

    monkeypatch.setattr(os, "open", scarce)
    monkeypatch.setattr(os, "close", closed)
    reader = Reader(weights)
    fill(weights, reader)
    assert len(open_files) == most
    reader.close()
    most = 0
    with pytest.raises(WeightReadError, match=r"Too many open files: raise the limit"):
        fill(weights)


def test_without_direct_reads_the_file_is_read_through_the_cache(tmp_path, monkeypatch):
    weights = stored(tmp_path)
    reads = plan_reads(weights.tensors, True)
    really_open = os.open

    def refuses(path, flags, *args, **options):
        if flags & source._DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return really_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuses)
    memory = host_memory(reads.nbytes)
    Reader(weights).fill(reads, memory)
    for name, one in weights.tensors.items():
        at = reads.places[name]
        assert bytes(memory[at : at + one.nbytes].numpy()) == expected(one)
