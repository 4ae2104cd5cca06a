"""A store that keeps what arrives damaged: the manifest before is there until a whole one is."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from checkpoint_io import CheckpointError, load, save
from checkpoint_io.errors import CheckpointConflictError
from checkpoint_io.storage.fsspec_store import Driver, FsspecStore
from checkpoint_io.storage.retry import RetryPolicy


class Careless(MemoryFileSystem):
    """A store in memory that damages what is put, and says nothing."""

    protocol = "careless"
    pattern, times = "", 0  # which files, and how many puts of them

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.rpartition("://")[2])

    def harm(self, path: str) -> None:
        if self.pattern and self.pattern in path and Careless.times > 0:
            Careless.times -= 1
            held = bytearray(self.store[path].getvalue())
            held[len(held) // 2] ^= 4
            self.store[path].seek(0)
            self.store[path].write(bytes(held))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode=mode, **kwargs)
        self.harm(self._strip_protocol(path))


class Copying(Careless):
    """Such an object store, which copies by itself."""

    protocol = ("gs", "careless-gs")


class Renaming(Careless):
    """Such a filesystem, which renames in one step."""

    protocol = ("sftp", "careless-sftp")

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super().open(path, mode, **kwargs)
        if mode == "wb":
            close = file.close

            def close_and_harm() -> None:
                file.close = close  # the collector closes it once more
                close()
                self.harm(self._strip_protocol(path))

            file.close = close_and_harm
        return file

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.store[self._strip_protocol(path2)] = self.store.pop(self._strip_protocol(path1))


KINDS = {"careless": Careless, "careless-gs": Copying, "careless-sftp": Renaming}


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    fsspec.register_implementation(request.param, KINDS[request.param], clobber=True)
    yield f"{request.param}://{uuid.uuid4().hex}"
    Careless.pattern, Careless.times = "", 0


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(step)), "step": step}


def names(url: str) -> set[str]:
    fs, path = fsspec.core.url_to_fs(url)
    return {one.rsplit("/", 1)[-1] for one in fs.find(path)}


def put(url: str, step: int) -> None:
    save(url, state(step), metadata={"run_id": "one"})


@pytest.mark.parametrize("times", [1, 2])
def test_a_manifest_that_arrives_damaged_is_put_again(url: str, times: int) -> None:
    put(url, 1)
    Careless.pattern, Careless.times = "manifest", times
    put(url, 2)
    assert Careless.times == 0
    assert load(url).state["step"] == 2
    assert len(names(url)) == 3  # no temporary file is left


def test_manifests_that_arrive_damaged_each_time_leave_the_checkpoint_before(url: str) -> None:
    put(url, 1)
    before = names(url)
    # Where it is put in place, the one before can be put back as soon as a put arrives whole.
    Careless.pattern, Careless.times = "manifest", 3 if url.startswith("careless:") else 999
    if url.startswith("careless:"):
        spared = Careless.pipe_file
        with pytest.MonkeyPatch.context() as patch:
            old = fsspec.core.url_to_fs(url)[0].cat_file(f"{url}/manifest.json")

            def spare_the_old(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
                harm = Careless.times
                Careless.times = 0 if value == old else harm
                spared(self, path, value, **kwargs)
                Careless.times = harm if value == old else Careless.times

            patch.setattr(Careless, "pipe_file", spare_the_old)
            with pytest.raises(CheckpointError, match=r"arrives damaged each time.*back in place"):
                put(url, 2)
    else:
        with pytest.raises(CheckpointError, match=r"arrives damaged each time.*before is kept"):
            put(url, 2)
    Careless.times = 0
    assert load(url).state["step"] == 1
    assert names(url) == before
    put(url, 3)
    assert load(url).state["step"] == 3


def test_a_first_manifest_that_arrives_damaged_each_time_is_removed(url: str) -> None:
    Careless.pattern, Careless.times = "manifest", 999
    with pytest.raises(CheckpointError, match="arrives damaged each time"):
        put(url, 1)
    assert not [name for name in names(url) if name.startswith("manifest")]


def test_the_manifest_of_another_save_is_a_conflict_and_no_damage() -> None:
    """It lands between our put and the look at it: it is whole, and stays."""
    fsspec.register_implementation("careless", Careless, clobber=True)
    ours, theirs = f"careless://{uuid.uuid4().hex}", f"careless://{uuid.uuid4().hex}"
    put(theirs, 9)
    filesystem = fsspec.filesystem("careless")
    other = filesystem.cat_file(f"{theirs}/manifest.json")
    put(ours, 1)
    store = FsspecStore(Driver(filesystem, RetryPolicy()), ours, ours)
    whole = filesystem.cat_file(f"{ours}/manifest.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Careless, "harm", lambda self, path: MemoryFileSystem.pipe_file(self, path, other)
        )
        with pytest.raises(CheckpointConflictError):
            store.replace("manifest.json", whole, "t", expected=store.token("manifest.json"))
    assert filesystem.cat_file(f"{ours}/manifest.json") == other
