"""Saves in two steps, and what the commit does when another one is in the way."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_io.saver.save as job_module
from checkpoint_io import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointWarning,
    LeaseError,
    Manifest,
    SaveJob,
    UnsupportedStateError,
    load,
    prepare_save,
    read_manifest,
    save,
    verify,
)
from checkpoint_io.errors import UnsettledWriteError
from checkpoint_io.format.names import (
    MANIFEST,
    kind_of,
    objects_name,
    temporary_name,
    tensors_name,
)
from checkpoint_io.format.safetensors import DTYPES, NAMES
from checkpoint_io.storage.fsspec_store import FsspecStore
from checkpoint_io.storage.local import LocalStore
from checkpoint_io.storage.open import open_store
from tests.support import warm


def prepared(url: Any, state: dict[str, Any], **options: Any) -> SaveJob:
    return prepare_save(url, state, next_generation=lambda old: 1, **options)


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def named_by(manifest: Manifest) -> set[str]:
    return {MANIFEST, *(entry.name for entry in manifest.files)}


def test_a_save_has_the_number_that_it_is_given(tmp_path: Path) -> None:
    jobs = (prepare_save(tmp_path, {"n": 1}, next_generation=number) for number in (7, None, 2))
    assert [job.run().generation for job in jobs] == [7, 8, 2]


def test_a_new_folder_is_not_asked_for_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []
    usual = LocalStore.open

    def noted(self: LocalStore, name: str) -> Any:
        asked.append((name, (tmp_path / "c" / name).exists()))
        return usual(self, name)

    monkeypatch.setattr(LocalStore, "open", noted)
    save(tmp_path / "c", {"n": 1})
    assert asked == [(MANIFEST, True)]  # its own, which it reads back


def test_preparing_writes_nothing_and_takes_plain_values_over(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(3), "list": [1]}
    own, metadata = {"seen": [1]}, {"tags": ["a"]}
    job = prepared(tmp_path / "c", state, local_state=own, metadata=metadata)
    assert not (tmp_path / "c").exists()
    state["list"].append(2)
    own["seen"].append(2)
    metadata["tags"].append("b")
    state["w"].fill_(5)  # tensors are looked at when it runs
    manifest = job.run()
    loaded = load(tmp_path / "c")
    assert (loaded.state["list"], loaded.local_state) == ([1], {"seen": [1]})
    assert loaded.state["w"].tolist() == [5, 5, 5]
    assert manifest.metadata == {"tags": ["a"]}
    assert (manifest.id, job.url) == (job.save_id, str(tmp_path / "c"))


def test_copies_take_the_place_of_the_live_tensors(tmp_path: Path) -> None:
    model = {"w": torch.randn(40, 30).t(), "b": torch.arange(3), "h": torch.randn(5).half()}
    state = {"model": model, "tied": model["w"]}
    wanted = {key: tensor.clone() for key, tensor in model.items()}
    job = prepared(tmp_path, state, local_state={"rng": torch.arange(9)})
    assert len(job.tensors) == 4
    assert job.nbytes >= sum(tensor.nbytes for tensor in job.tensors)
    job.rebind([tensor.clone() for tensor in job.tensors])
    for tensor in model.values():
        tensor.zero_()
    job.run()
    loaded = load(tmp_path)
    assert all(torch.equal(loaded.state["model"][key], wanted[key]) for key in wanted)
    assert loaded.state["tied"] is loaded.state["model"]["w"]
    assert loaded.local_state is not None
    assert torch.equal(loaded.local_state["rng"], torch.arange(9))


@pytest.mark.parametrize(
    "others",
    [[], [torch.zeros(3), torch.zeros(3)], [torch.zeros(4)], [torch.zeros(3).int()]],
    ids=["none", "more", "shape", "dtype"],
)
def test_copies_that_are_not_copies_are_refused(tmp_path: Path, others: Any) -> None:
    job = prepared(tmp_path / "c", {"w": torch.ones(3)})
    with pytest.raises(ValueError, match="one tensor for each"):
        job.rebind(others)
    job.run()
    assert load(tmp_path / "c").state["w"].tolist() == [1, 1, 1]


def test_job_runs_once_and_on_any_thread(tmp_path: Path) -> None:
    job = prepared(tmp_path, {"w": torch.ones(3)})
    thread = threading.Thread(target=job.run)
    thread.start()
    thread.join()
    assert load(tmp_path).state["w"].tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="runs once"):
        job.run()


def test_unsupported_object_is_named_when_preparing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\['a'\]\[1\] is a builtins.object"):
        prepared(tmp_path / "c", {"a": [1, object()]})
    with pytest.raises(UnsupportedStateError, match=r"metadata\['a'\] is a tensor"):
        prepared(tmp_path / "c", {}, metadata={"a": torch.ones(1)})
    with pytest.raises(ValueError, match="a size is"):
        prepared(tmp_path / "c", {}, max_shard_size="5 apples")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("limit", [1, 5000, "1MB", "5GB"])
def test_every_kind_of_tensor_in_files_of_any_size(tmp_path: Path, limit: Any) -> None:
    """Many at once, empty ones, strides, views that are not their bytes; each dtype."""
    state: dict[str, Any] = {"dtypes": {}}
    for name, dtype in DTYPES.items():
        bits = torch.randint(0, 2, (6, 16), dtype=torch.uint8)
        state["dtypes"][name] = [
            bits.view(dtype),
            bits[0].clone().view(dtype)[::2],
            bits[1].clone().view(dtype)[::16],
            torch.empty(0, 4, dtype=dtype),
        ]
    complex_one = torch.randn(9, 2, dtype=torch.complex64)
    state["lazy"] = [complex_one.conj(), complex_one.imag, complex_one.conj().imag, complex_one]
    state["shapes"] = [torch.randn(3, 5).t(), torch.tensor(2.5), torch.randn(1, 1).expand(4, 3)]
    state["lazy"].append(torch._neg_view(torch.ones(5)))
    state["large"] = [torch.randn(700, 1100).t(), torch.randn(300_001), torch.zeros(0)]
    if limit == "5GB":  # copied in pieces that end inside of a part; a row is more than a piece
        bits = torch.arange(34_000_000, dtype=torch.int32).to(torch.uint8)
        state["large"] += [torch.randn(2200, 2100).t(), bits.reshape(17_000_000, 2).t()]
    manifest = save(tmp_path, state, max_shard_size=limit)
    assert len(manifest.files) >= (2 if limit == "5GB" else 5)
    verify(tmp_path)
    loaded = load(tmp_path).state

    def raw(tensor: torch.Tensor) -> bytes:
        # a new tensor, because one of a single element is contiguous with any stride
        whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        return bytes(whole.reshape(-1).view(torch.uint8).numpy())

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return (a.dtype, a.shape) == (b.dtype, b.shape) and raw(a) == raw(b)
        items = a.items() if isinstance(a, dict) else enumerate(a)
        return all(same(value, b[key]) for key, value in items)

    assert same(state, loaded)
    stored = {NAMES[t.dtype] for values in state["dtypes"].values() for t in values}
    assert stored == {entry.dtype for entry in manifest.tensors.values()}


def test_nothing_is_kept_alive_by_a_save(tmp_path: Path) -> None:
    """Without the help of the garbage collector, which may come much later."""

    def views() -> int:
        return sum(1 for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == (3, 1, 7))

    weight = torch.ones(3, 1, 7)
    gc.collect()
    gc.disable()
    try:
        save(tmp_path, {"w": weight, "more": {"list": [weight]}}, local_state={"w": weight})
        assert views() == 1
    finally:
        gc.enable()


def test_files_open_with_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    manifest = save(tmp_path, {"w": torch.arange(6.0).reshape(2, 3), 'q"\n\u00fc': torch.ones(1)})
    with safe_open(tmp_path / manifest.files[0].name, "pt") as file:
        assert set(file.keys()) == {"w", 'q"\n\u00fc'}
        assert torch.equal(file.get_tensor("w"), torch.arange(6.0).reshape(2, 3))


def test_second_save_of_this_process_waits_its_turn(tmp_path: Path) -> None:
    """While one save commits, another one comes to the same place."""
    seen: list[str] = []

    def in_the_middle(previous: Manifest | None) -> int:
        with pytest.raises(CheckpointConflictError, match="another") as caught:
            save(tmp_path, {"who": "second"})
        seen.append(str(caught.value))
        return 1

    prepare_save(tmp_path, {"who": "first"}, next_generation=in_the_middle).run()
    assert seen
    assert load(tmp_path).state == {"who": "first"}
    assert files_in(tmp_path) == named_by(read_manifest(tmp_path))
    save(tmp_path, {"who": "third"})
    assert load(tmp_path).state == {"who": "third"}


def test_slower_save_loses_where_there_are_no_locks() -> None:
    """The other one commits between our first look and our commit."""
    url = "memory://test-job/race"

    def in_the_middle(previous: Manifest | None) -> int:
        save(url, {"who": "faster", "w": torch.ones(3)})
        return 1

    save(url, {"who": "old"})
    with pytest.raises(CheckpointConflictError):
        prepare_save(url, {"who": "slow", "w": torch.zeros(9)}, next_generation=in_the_middle).run()
    check_alone(url, "faster")


def check_alone(url: str, who: str) -> None:
    import fsspec

    verify(url)
    assert load(url).state["who"] == who
    names = {path.rsplit("/", 1)[-1] for path in fsspec.filesystem("memory").ls(url, detail=False)}
    assert names == named_by(read_manifest(url))


class Behind:
    """A store through which another save comes just after our commit, conditions or not."""

    def __init__(self, store: Any, url: str) -> None:
        self._store, self._other = store, url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def replace(self, name: str, data: bytes, temporary: str, expected: str | None = None) -> None:
        self._store.replace(name, data, temporary, expected)
        if self._other:
            url, self._other = self._other, ""
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(job_module, "open_store", OPEN_STORE)
                save(url, {"who": "other", "w": torch.ones(3)})


OPEN_STORE = job_module.open_store


def test_store_that_lets_two_commit_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://test-job/ignorant"
    monkeypatch.setattr(job_module, "open_store", lambda u, o: Behind(OPEN_STORE(u, o), url))
    with pytest.raises(CheckpointConflictError, match="another save wrote"):
        save(url, {"who": "ours", "w": torch.zeros(9)})
    check_alone(url, "other")


KILLED = """
import os, signal, sys, torch
from checkpoint_io import prepare_save
def die(previous):
    os.kill(os.getpid(), signal.SIGKILL)
prepare_save(
    sys.argv[1], {"w": torch.ones(9)}, metadata={"run_id": sys.argv[2]}, next_generation=die
).run()
"""


def test_next_save_of_the_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    save(tmp_path, {"step": 1}, metadata={"run_id": "mine"})
    for run_id in ("mine", "theirs"):
        dead = warm.run([sys.executable, "-c", KILLED, str(tmp_path), run_id], check=False)
        assert dead.returncode < 0
    litter = files_in(tmp_path) - named_by(read_manifest(tmp_path))
    assert len(litter) == 4
    (tmp_path / "notes.txt").write_text("the user's")
    (tmp_path / temporary_name("ab" * 8)).write_text("of nobody known")
    save(tmp_path, {"step": 2}, metadata={"run_id": "mine"})
    left = files_in(tmp_path) - named_by(read_manifest(tmp_path))
    assert "notes.txt" in left
    assert len(left & litter) == 2
    assert all(b"theirs" in (tmp_path / name).read_bytes() for name in left & litter)
    assert load(tmp_path).state == {"step": 2}


def test_run_without_a_name_removes_nothing_of_others(tmp_path: Path) -> None:
    litter = {tensors_name("ab" * 8, 0, 1), objects_name("ab" * 8, None)}
    for name in litter:
        (tmp_path / name).write_bytes(b"")
    save(tmp_path, {"step": 1})
    assert files_in(tmp_path) == litter | named_by(read_manifest(tmp_path))


def test_error_of_the_callers_generation_leaves_nothing(tmp_path: Path) -> None:
    def fails(previous: Manifest | None) -> int:
        raise OSError("no list")

    job = prepare_save(tmp_path, {"w": torch.ones(3)}, next_generation=fails)
    with pytest.raises(CheckpointError, match=r"nothing was committed.*no list"):
        job.run()
    assert files_in(tmp_path) == set()


def test_generation_sees_what_is_replaced(tmp_path: Path) -> None:
    seen: list[Any] = []

    def choose(previous: Manifest | None) -> int:
        seen.append(previous and (previous.id, previous.generation))
        return 7 + len(seen)

    first = prepare_save(tmp_path, {"w": torch.ones(3)}, next_generation=choose).run()
    second = prepare_save(tmp_path, {"w": torch.ones(3)}, next_generation=choose).run()
    assert seen == [None, (first.id, 8)]
    assert second.generation == 9
    assert save(tmp_path, {}).generation == 10


def test_what_names_the_run_is_taken_back_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is interrupted, the next save of the run still knows whose files are left."""
    taken: list[str] = []
    monkeypatch.setattr(LocalStore, "remove_many", lambda store, names: taken.extend(names))

    def refuse(previous: Manifest | None) -> int:
        raise ValueError("no generation")

    state = {"a": torch.ones(700), "b": torch.ones(700)}
    with pytest.raises(ValueError, match="no generation"):
        prepare_save(tmp_path, state, next_generation=refuse, max_shard_size="3kB").run()
    # Each rank takes back its own files, then rank 0 those that it sees: here the same ones.
    assert [kind_of(name) for name in taken] == ["tensors", "tensors", "objects"] * 2


def test_interrupt_while_writing_takes_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several files at once; the interrupt reaches one of the threads that write."""
    import checkpoint_io.saver.writer as writer

    real = writer.host_pieces

    def interrupted(tensor: torch.Tensor) -> Any:
        if tensor.numel() == 700_001:
            raise KeyboardInterrupt
        return real(tensor)

    monkeypatch.setattr(writer, "host_pieces", interrupted)
    save(tmp_path, {"step": 1})
    before = files_in(tmp_path)
    state = {f"w{n}": torch.ones(700_000 + n) for n in range(6)}
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, state, max_shard_size="3MB")
    assert files_in(tmp_path) == before
    assert load(tmp_path).state == {"step": 1}


@pytest.mark.parametrize("call", [1, 2])
def test_a_save_that_may_not_write_commits_nothing(tmp_path: Path, call: int) -> None:
    """Before its first file, and before its manifest."""
    save(tmp_path, {"step": 1})
    there = files_in(tmp_path)
    seen: list[set[str]] = []

    def before_write() -> None:
        seen.append(files_in(tmp_path))
        if len(seen) == call:
            raise LeaseError("another run has it")

    with pytest.raises(LeaseError, match="another run has it"):
        prepared(tmp_path, {"step": 2}, before_write=before_write).run()
    assert len(seen) == call
    assert seen[0] == there
    assert files_in(tmp_path) == there
    assert load(tmp_path).state == {"step": 1}


class Commits:
    """A `replace` that takes effect or not, and raises; then the manifest may be unreadable."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kind: Any,
        error: BaseException,
        *,
        takes_effect: bool = False,
        readable: bool = True,
    ) -> None:
        replace, opened = kind.replace, kind.open

        def failing(store: Any, *args: Any, **options: Any) -> None:
            if takes_effect:
                replace(store, *args, **options)
            if not readable:
                monkeypatch.setattr(kind, "open", broken)
            raise error

        def broken(store: Any, name: str) -> Any:
            if name == MANIFEST:
                raise OSError("the network is down")
            return opened(store, name)

        monkeypatch.setattr(kind, "replace", failing)


def place_of(kind: Any, tmp_path: Path) -> str:
    return str(tmp_path) if kind is LocalStore else f"memory://commits-{tmp_path.name}"


LOST = ConnectionError("no answer")
REFUSED = CheckpointError("the store says no: nothing was committed")
UNSETTLED = UnsettledWriteError("it may arrive yet")


@pytest.mark.parametrize(
    ("kind", "error", "options", "says"),
    [
        # A rename is done or not, and so is what a store has answered.
        (LocalStore, OSError("the disk is full"), {}, "nothing was committed"),
        (FsspecStore, REFUSED, {}, "nothing was committed"),
        # A request whose answer is lost may be executed later.
        (FsspecStore, LOST, {}, "could not be checked, so nothing was removed"),
        (FsspecStore, UNSETTLED, {}, "could not be checked, so nothing was removed"),
        (FsspecStore, REFUSED, {"readable": False}, "could not be checked"),
        (LocalStore, OSError("full"), {"readable": False}, "could not be checked"),
    ],
)
def test_a_commit_that_fails_removes_files_only_if_nobody_can_come_to_name_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    error: Exception,
    options: dict[str, bool],
    says: str,
) -> None:
    url = place_of(kind, tmp_path)
    save(url, {"w": torch.zeros(3)})
    store = open_store(url)
    before = set(store.sizes())
    with monkeypatch.context() as patched:
        Commits(patched, kind, error, **options)
        with pytest.raises(CheckpointError, match=says):
            save(url, {"w": torch.ones(3)})
    left = {name for name in store.sizes() if kind_of(name)} - before
    assert bool(left) is (says != "nothing was committed")
    assert load(url).state["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize("kind", [LocalStore, FsspecStore])
def test_an_error_after_the_commit_is_none_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    url = place_of(kind, tmp_path)
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # older files are kept on a disk
        Commits(patched, kind, LOST, takes_effect=True)
        manifest = save(url, {"w": torch.ones(3)})
    assert manifest == read_manifest(url)
    assert load(url).state["w"].tolist() == [1.0] * 3


def test_an_interrupt_after_the_commit_is_raised_and_the_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = place_of(FsspecStore, tmp_path)
    with monkeypatch.context() as patched:
        Commits(patched, FsspecStore, KeyboardInterrupt(), takes_effect=True)
        with pytest.raises(KeyboardInterrupt):
            save(url, {"w": torch.ones(3)})
    assert load(url).state["w"].tolist() == [1.0] * 3
