"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket

# Below those that systems give to connections: one of these may be taken before a server listens.
_PORTS = range(10_000, 32_000)


def free_port() -> int:
    """Return a port at which nobody listens."""
    for port in random.SystemRandom().sample(_PORTS, 100):  # tests seed the other generator
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("none of 100 ports is free")
