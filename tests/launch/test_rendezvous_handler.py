"""The rendezvous of several machines: how often it looks at what they share."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from accel_callbacks.launch.rendezvous_handler import _frequent_looks
from tests.support.bound import BOUND


def test_it_looks_often_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where torch has other names for what is changed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=BOUND)
    parameters = RendezvousParameters("c10d", "127.0.0.1:0", "run", 1, 2, "127.0.0.1")
    backend = C10dRendezvousBackend(store, "run")
    handler: Any = dynamic.create_handler(store, backend, parameters)
    waits: list[Any] = []
    monkeypatch.setattr(dynamic, "_delay", waits.append)
    looks = []
    monkeypatch.setattr(backend, "get_state", lambda: looks.append(1))
    for _ in range(3):
        handler.num_nodes_waiting()
    assert len(looks) <= 1  # what was read is current for a second
    with _frequent_looks(handler):
        for _ in range(3):
            handler.num_nodes_waiting()
        assert len(looks) >= 3
        dynamic._delay(seconds=(0, 0.3))
        for _ in range(102):
            dynamic._delay(seconds=1)
    assert waits == [(0, 0.3), *[0.1] * 100, 1.0, 1.0]
    looks.clear()
    handler.num_nodes_waiting()
    assert not looks
    dynamic._delay(1)
    assert waits[-1] == 1
    handler.shutdown()


def test_it_waits_as_torch_does_where_the_names_are_others() -> None:
    delay = dynamic._delay
    with _frequent_looks(object()):
        assert dynamic._delay is delay
