"""Rendezvous of torch's launcher whose stores listen at one address, and not on all interfaces."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accel_callbacks.distributed.tcp_store import (
    TCPStore,
    is_loopback,
    local_address_towards,
    serve_store,
    uses_libuv,
)

__all__ = ["listen_at_one_address"]

_PREFIX = "accel-"
_DEFAULT_PORTS = {"static": 29500, "c10d": 29400}  # those of torch


def listen_at_one_address(config: Any) -> None:
    """Change torch's ``LaunchConfig`` so that its stores listen at one address.

    On one machine that is a loopback address, unless another one was named; on several it is the
    address of the rendezvous, and of this machine in the same network. Rendezvous by etcd or by a
    file stay as they are.
    """
    backend = config.rdzv_backend
    if backend not in _DEFAULT_PORTS or config.rdzv_configs.get("store_type", "tcp") != "tcp":
        return
    config.rdzv_backend = _PREFIX + backend
    rendezvous_handler_registry.register(config.rdzv_backend, _create_handler)


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Serve the store if this machine is to, and make torch's own handler, which then uses it."""
    backend = params.backend.removeprefix(_PREFIX)
    host, port = _endpoint(params.endpoint, _DEFAULT_PORTS[backend])
    one_machine = params.max_nodes == 1
    if backend == "static":
        serves: bool | None = params.config.get("rank") == 0
    else:
        serves = True if one_machine else params.get_as_bool("is_host")
    server, endpoint = None, params.endpoint
    if serves is not False:
        # Without is_host the machine with the address serves; torch may know it by its name.
        server = serve_store(host, port, one_machine=one_machine, announces=serves is True)
    if server is not None and port == 0:
        host, port = server.host, server.port
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    parameters = RendezvousParameters(
        backend,
        endpoint,
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        **params.config,
    )
    if uses_libuv():
        inner = get_rendezvous_handler(parameters)
    else:
        inner = _handler_without_libuv(parameters, host, port, _is_here(host, port, serves))
    if backend == "static":
        return _Served(inner, server)
    return _StoreOfEachAttempt(inner, server, _own_address(params, host, port), one_machine)


def _handler_without_libuv(
    params: RendezvousParameters, host: str, port: int, serves: bool
) -> RendezvousHandler:
    """Make torch's handler over a store of ours: its own asks for libuv (pytorch#196855)."""
    if params.backend == "static":
        handler: Any = get_rendezvous_handler(params)
        handler._store = TCPStore(
            host,
            port,
            params.max_nodes,
            serves,
            timeout=handler.timeout,
            multi_tenant=True,
            use_libuv=False,
        )
        return handler  # type: ignore[no-any-return]
    seconds = params.get_as_int("read_timeout", 60) or 60
    store = TCPStore(
        host,
        port,
        is_master=serves,
        multi_tenant=True,
        timeout=timedelta(seconds=seconds),
        use_libuv=False,
    )
    return create_handler(store, C10dRendezvousBackend(store, params.run_id), params)


def _is_here(host: str, port: int, known: bool | None) -> bool:
    """Return whether this machine is to serve the store: as known, or because it is the host."""
    if known is not None:
        return known
    try:
        return local_address_towards(host, port) == socket.gethostbyname(host)
    except OSError:
        return False


def _endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Split ``HOST:PORT``, of which both may be missing, as torch does."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isdecimal():
        host, port = text.strip(), str(default_port)
    return host.strip("[]") or "localhost", int(port)


def _own_address(params: RendezvousParameters, host: str, port: int) -> str | None:
    """Return the address at which other machines reach this one; None if it is not known."""
    if params.local_addr or params.max_nodes == 1:
        return params.local_addr or "127.0.0.1"
    address = local_address_towards(host, port)
    if address is None or (is_loopback(address) and not is_loopback(host)):
        return None
    return address


class _Served(RendezvousHandler):
    """A handler of torch, kept together with the store that it uses."""

    def __init__(self, inner: RendezvousHandler, server: TCPStore | None) -> None:
        self._inner = inner
        self._server = server

    def get_backend(self) -> str:
        return _PREFIX + self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        return self._inner.next_rendezvous()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


class _StoreOfEachAttempt(_Served):
    """A rendezvous by c10d, with a new store for the processes of each attempt.

    torch's handler either keeps one store for all attempts, in which gloo would read the addresses
    of the previous one, or lets rank 0 serve it, on all interfaces.
    """

    def __init__(
        self,
        inner: RendezvousHandler,
        server: TCPStore | None,
        address: str | None,
        one_machine: bool,
    ) -> None:
        super().__init__(inner, server)
        self._address = address or socket.getfqdn()
        self._one_machine = one_machine
        self._attempt: TCPStore | None = None
        self._alone: RendezvousInfo | None = None  # of the first attempt on one machine

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._alone or self._inner.next_rendezvous()
        if self._inner.use_agent_store:  # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=0 of the user
            return info
        # No other machine can join: torch would look at its own stack for 0.1 s, for its log.
        self._alone = info if self._one_machine else None
        self._attempt = None  # ends the store of the previous attempt
        port = None
        if info.rank == 0:
            self._attempt = serve_store(self._address, 0, one_machine=self._one_machine)
            if self._attempt is None:
                self._attempt = TCPStore(
                    self._address, 0, is_master=True, multi_tenant=True, use_libuv=uses_libuv()
                )
            port = self._attempt.port
        # torch has written an address of its own under the same keys.
        notes = dist.distributed_c10d.PrefixStore("accel_callbacks", info.store)
        place = RendezvousStoreInfo.build(info.rank, notes, self._address, server_port=port)
        return RendezvousInfo(info.store, info.rank, info.world_size, place)
