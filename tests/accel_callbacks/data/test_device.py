"""Bringing batches to the device: what is moved, in which order, and whose counts it has."""

from __future__ import annotations

import collections
import gc
import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, prepare_data_loader
from accel_callbacks.data.device import StreamFeed, device_feed, send_to_device
from accel_callbacks.data.sources import Delivery

META = torch.device("meta")
Point = collections.namedtuple("Point", "x y")


class Opaque:
    """An object with a ``to`` of its own, which takes a device only."""

    def __init__(self, place="host"):
        self.place = place

    def to(self, device):
        return Opaque(str(device))


class Eager(Opaque):
    """The same with Accelerate's way to call it."""

    def to(self, device, non_blocking=False):
        return Eager(f"{device}, {non_blocking}")


# --- send_to_device -------------------------------------------------------------------------


def test_everything_that_can_move_is_moved_and_the_rest_stays():
    @dataclass
    class Pair:
        left: torch.Tensor
        right: object

    batch = {"a": [torch.ones(1), "text"], "b": Point(torch.ones(2), Opaque()), 3: None}
    moved = send_to_device(batch, "meta")
    assert moved["a"][0].device == META
    assert moved["a"][1] == "text"
    assert type(moved["b"]) is Point
    assert moved["b"].x.device == META
    assert moved["b"].y.place == "meta"
    pair = send_to_device(Pair(torch.ones(1), (Eager(),)), "meta", non_blocking=True)
    assert pair.left.device == META
    assert pair.right[0].place == "meta, False", "a device without streams"
    assert send_to_device(Eager(), "cuda", non_blocking=True).place == "cuda, True"


@pytest.mark.parametrize("keys", ["labels", ["labels"], ("other", "labels")])
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_keys_that_are_skipped_stay_where_they_are_on_any_level(keys, kind):
    batch = [kind(labels=torch.ones(1), x=torch.ones(1), deep={"labels": torch.ones(1)})]
    moved = send_to_device(batch, "meta", skip_keys=keys)[0]
    assert type(moved) is kind
    assert list(moved) == ["labels", "x", "deep"]
    assert moved["x"].device == META
    assert moved["labels"].device.type == moved["deep"]["labels"].device.type == "cpu"


# --- the feed -------------------------------------------------------------------------------


class FakeModule:
    """Stands in for ``torch.cuda``: notes what happens on which stream."""

    def __init__(self):
        self.log = []
        self.inside = None
        self.streams = 0
        self.recorded = []

    def Stream(self, device):
        self.streams += 1
        return FakeStream("side", self)

    def current_stream(self, device):
        return FakeStream("main", self)

    @contextmanager
    def stream(self, stream):
        self.inside = stream.name
        yield
        self.inside = None


class FakeStream:
    def __init__(self, name, module):
        self.name, self.module = name, module

    def record_event(self):
        copies = sum(entry[0] == "event" for entry in self.module.log)
        self.module.log.append(("event", self.name, copies))
        return copies

    def wait_event(self, event):
        self.module.log.append(("wait", self.name, event))


def pairs(count, closed=None):
    try:
        for index in range(count):
            yield {"x": torch.full((2,), index), "box": Opaque()}, Delivery(index + 1, index + 1)
    finally:
        if closed is not None:
            closed.append(True)


@pytest.fixture
def module(monkeypatch):
    fake = FakeModule()

    def record_stream(tensor, stream):
        assert tensor.device == META
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise NotImplementedError("record_stream is for dense tensors, as on CUDA")
        fake.log.append(("record", stream.name))
        fake.recorded.append(tensor)

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return fake


def test_the_next_batch_is_copied_before_the_current_one_is_handed_over(module):
    feed = StreamFeed(META, module)(pairs(3))
    batch, delivery = next(feed)
    # Two copies are on their way; the stream that computes waits for the first one only.
    assert module.log == [
        ("event", "side", 0),
        ("event", "side", 1),
        ("wait", "main", 0),
        ("record", "main"),
    ]
    assert batch["x"].device == META
    assert batch["box"].place == "meta", "copied where it is used: its tensors are not known"
    assert delivery.real == 1, "the counts of its own batch"
    assert [delivery.real for _, delivery in feed] == [2, 3]
    assert module.log[-2:] == [("wait", "main", 2), ("record", "main")]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_feed_delivers_each_batch_once(module, count):
    fed = [delivery.real for _, delivery in StreamFeed(META, module)(pairs(count))]
    assert fed == list(range(1, count + 1))


def test_a_feed_that_is_left_closes_what_it_reads_from(module):
    closed = []
    feed = StreamFeed(META, module)(pairs(5, closed))
    next(feed)
    feed.close()
    assert closed == [True]


def test_an_error_of_the_dataset_passes_through_the_feed(module):
    def broken():
        yield from pairs(1)
        raise OSError("no such row")

    with pytest.raises(OSError, match="no such row"):
        list(StreamFeed(META, module)(broken()))


def test_without_streams_or_without_non_blocking_batches_are_just_moved():
    assert device_feed(torch.device("cpu")) is None
    assert device_feed(torch.device("cpu"), non_blocking=False) is None
    for non_blocking in (True, False):
        feed = device_feed(META, non_blocking)
        assert not isinstance(feed, StreamFeed)
        assert [batch["x"].device for batch, _ in feed(pairs(2))] == [META, META]


def test_all_passes_over_all_loaders_copy_on_one_stream(module):
    for _ in range(3):
        assert len(list(StreamFeed(META, module)(pairs(2)))) == 2
    assert module.streams == 1, "the caching allocator keeps memory by stream"


def fed(module, *batches):
    source = ((batch, Delivery(1, 1)) for batch in batches)
    return [batch for batch, _ in StreamFeed(META, module)(source)]


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["COO", "CSR", "CSC", "BSR", "jagged"],
)
def test_tensors_of_several_parts_are_moved_where_they_are_used(module, make):
    ((moved,),) = fed(module, [make()])
    assert moved.device == META
    assert moved.layout is make().layout
    assert module.recorded == [], "record_stream takes dense tensors alone"


class Encoding(collections.UserDict):
    """As a BatchEncoding of transformers: a mapping whose ``to`` changes it in place."""

    def __init__(self, data, note="note"):
        super().__init__(data)
        self.note = note

    def to(self, device, non_blocking=False):
        self.data = {
            key: one.to(device) if isinstance(one, torch.Tensor) else one
            for key, one in self.data.items()
        }
        return self


def test_a_mapping_with_a_way_to_move_is_copied_ahead_and_the_datasets_own_stays(module):
    own = Encoding({"x": torch.ones(2), "deep": [torch.ones(1)], "words": ["a"]})
    feed = StreamFeed(META, module)((one, Delivery(1, 1)) for one in [own, own])
    batch, _ = next(feed)
    assert module.log[2:] == [("wait", "main", 0), ("record", "main"), ("record", "main")]
    assert type(batch) is Encoding
    assert (batch.note, batch["words"]) == ("note", ["a"])
    assert batch["x"].device == batch["deep"][0].device == META
    assert own["x"].device.type == own["deep"][0].device.type == "cpu"


def test_an_object_is_moved_where_it_is_used(module):
    class Hidden(Opaque):
        def to(self, device):
            module.log.append(("moved", module.inside))
            return super().to(device)

    assert [one[0].place for one in fed(module, [Hidden()], [Hidden()])] == ["meta", "meta"]
    assert [entry for entry in module.log if entry[0] == "moved"] == [("moved", None)] * 2


def test_a_batch_is_freed_without_the_garbage_collector(module):
    collector = gc.isenabled()
    gc.disable()
    try:
        feed = StreamFeed(META, module)(pairs(3))
        batch, _ = next(feed)
        alive = weakref.ref(batch["x"])
        module.recorded.clear()
        del batch
        next(feed)
        next(feed)
        module.recorded.clear()
        assert alive() is None
    finally:
        if collector:
            gc.enable()


# --- in a loader ----------------------------------------------------------------------------


def counted(loader):
    return [
        (batch.shape[0], loader.real, loader.position, loader.left, loader.batch_index)
        for batch in loader
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loader_that_copies_ahead_tells_the_counts_of_the_batch_it_delivers(module, rank):
    def make():
        return prepare_data_loader(DataLoader(range(7), 2), num_processes=2, process_index=rank)

    plain, fed = make(), make()
    fed._feed = StreamFeed(META, module)
    assert counted(fed) == counted(plain)
    assert fed.state_dict() == plain.state_dict()


def test_a_state_is_the_one_after_the_batch_that_was_delivered(module):
    def make():
        loader = prepare_data_loader(DataLoader(range(9), 2, shuffle=True), data_seed=1)
        loader.trained = True
        return loader

    plain = [batch.tolist() for batch in make()]
    for k in range(1, 5):
        fed = make()
        fed._feed = StreamFeed(META, module)
        iterator = iter(fed)
        for _ in range(k):
            next(iterator)
        resumed = make()
        resumed.load_state_dict(fed.state_dict())
        assert [batch.tolist() for batch in resumed] == plain[k:]


def test_device_placement_and_put_on_device_decide_whether_batches_are_moved():
    loader = DataLoader(range(4), 2)
    moved = prepare_data_loader(loader, device="meta", put_on_device=True)
    assert {batch.device.type for batch in moved} == {"meta"}
    left = prepare_data_loader(loader, device="meta")
    assert {batch.device.type for batch in left} == {"cpu"}
    accel = Accelerator(cpu=True)
    # On the CPU nothing is wrapped around the batches.
    assert accel.prepare(loader)._feed is None


def test_no_batch_is_kept_after_it_was_delivered(module):
    alive = []
    for batch, _ in StreamFeed(META, module)(pairs(4)):
        module.recorded.clear()
        alive = [one for one in alive if one() is not None]
        assert len(alive) <= 1
        alive.append(weakref.ref(batch["x"]))
        del batch
