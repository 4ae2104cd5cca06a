"""Reads of stored weights: every byte to its place, and never the bytes of another file."""

from __future__ import annotations

import errno
import os
import pickle
import random

import pytest
import torch

from accel_callbacks.models.offload import source
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


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("step", [1, 64], ids=["anywhere", "aligned"])
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_is_in_its_place(tmp_path, monkeypatch, direct, step, seed):
    monkeypatch.setattr(source, "_PIECE", 8192)
    monkeypatch.setattr(source, "_GAP", 4096)
    weights = stored(tmp_path, seed, step=step)
    reads = plan_reads(weights.tensors, direct)
    memory = host_memory(reads.nbytes)
    count = Reader(weights).fill(reads, memory)
    assert count >= reads.stored_bytes or direct
    for name, one in weights.tensors.items():
        at = reads.places[name]
        assert at % 64 == 0
        assert bytes(memory[at : at + one.nbytes].numpy()) == expected(one)
        assert bytes(weights.mapped(name).reshape(-1).view(torch.uint8).numpy()) == expected(one)


def test_neighbors_in_a_file_are_read_at_once(monkeypatch):
    monkeypatch.setattr(source, "_GAP", 0)
    nbytes = 1 << 18  # more than a page of any system
    tensors = {
        f"t{k}": StoredTensor("weights.bin", k * nbytes, torch.uint8, (nbytes,))
        for k in (0, 4, 5, 6)
    }
    assert len(plan_reads(tensors, True).pieces) == 2


def test_a_mapped_tensor_has_its_own_storage_and_does_not_write_to_the_file(tmp_path):
    weights = stored(tmp_path, step=64)
    name = next(name for name, one in weights.tensors.items() if one.nbytes)
    before = expected(weights.tensors[name])
    tensor = weights.mapped(name)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    tensor.reshape(-1).view(torch.uint8).zero_()
    assert expected(weights.tensors[name]) == before


def fill(weights, reader=None):
    reads = plan_reads(weights.tensors, False)
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


def test_a_missing_file_says_what_to_do(tmp_path):
    path, weights = one_file(tmp_path)
    path.unlink()
    with pytest.raises(WeightReadError, match="put the file back"):
        fill(weights)


def test_an_error_of_the_disk_names_tensor_file_and_byte(tmp_path, monkeypatch):
    path, weights = one_file(tmp_path)

    def broken(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(source, "_pread_into", broken)
    message = rf"a in {path}: Input/output error at byte \d+: check the disk"
    with pytest.raises(WeightReadError, match=message):
        fill(weights)


def test_no_more_files_are_open_than_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(Reader, "_MOST_FILES", 2)
    weights = stored(tmp_path, files=4, count=20)
    open_files, most = set(), 0
    really_open, really_close = os.open, os.close

    def opened(path, *args, **options):
        nonlocal most
        found = really_open(path, *args, **options)
        open_files.add(found)
        most = max(most, len(open_files))
        return found

    def closed(descriptor):
        open_files.discard(descriptor)
        really_close(descriptor)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "close", closed)
    reader = Reader(weights)
    monkeypatch.setattr(source, "_AT_ONCE", 1)
    fill(weights, reader)
    assert most == 2
    reader.close()
    assert not open_files


def test_without_descriptors_an_error_says_so(tmp_path, monkeypatch):
    weights = stored(tmp_path)

    def none_left(path, *args, **options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(os, "open", none_left)
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
