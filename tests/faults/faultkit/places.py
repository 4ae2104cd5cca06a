"""A prefix in a bucket, reached through a proxy that breaks things and past it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from checkpoint_io import load, save
from faultkit.proxy import Proxy, proxy_to
from faultkit.states import local_of, state_of, whole


@dataclass
class Place:
    """A prefix, seen through the proxy and past it."""

    server: Any
    proxy: Proxy
    prefix: str
    attempts: int = 4
    patience: float = 600.0  # for an answer, in seconds

    @property
    def url(self) -> str:
        return str(self.server.url(self.prefix))

    @property
    def through(self) -> dict[str, Any]:
        """Options of a client behind the proxy."""
        config = {
            "connect_timeout": 60,
            "read_timeout": self.patience,
            "retries": {"total_max_attempts": self.attempts},
        }
        return {
            **self.server.options,
            "endpoint_url": self.proxy.endpoint,
            "config_kwargs": config,
        }

    def give_up_soon(self) -> None:
        """Let the client give up what is stalled; it may also give up what is only slow."""
        self.patience, self.attempts = 2.0, 10

    def save(self, step: int, numel: int, through: bool = True) -> None:
        save(
            self.url,
            state_of(step, numel),
            local_state=local_of(step, 0),
            metadata={"run_id": "wire"},
            max_shard_size=numel * 5,
            storage_options=self.through if through else self.server.options,
        )

    def load(self, through: bool = False) -> int:
        options = self.through if through else self.server.options
        return whole(load(self.url, storage_options=options))[0]


@contextmanager
def broken_place(server: Any) -> Iterator[Place]:
    """Make a place behind a proxy that harms nothing yet."""
    with proxy_to(server.endpoint) as proxy:
        yield Place(server, proxy, uuid.uuid4().hex)


def cases(table: dict[str, Any], short: set[str]) -> list[Any]:
    """Return the names of a table, those outside the short run marked as slow."""
    return [pytest.param(name, marks=[] if name in short else [pytest.mark.slow]) for name in table]
