"""The key-value store of a rendezvous, served at one address instead of on all interfaces."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:  # torch.distributed does not re-export it for type checkers
    from torch._C._distributed_c10d import TCPStore
else:
    TCPStore = getattr(dist, "TCPStore", None)  # missing in a torch without distributed

__all__ = ["TCPStore", "is_loopback", "local_address_towards", "serve_store", "uses_libuv"]

_BACKLOG = 4096  # the kernel lowers it to its own limit


def serve_store(
    host: str,
    port: int,
    *,
    one_machine: bool,
    announces: bool = True,
) -> TCPStore | None:
    """Serve a store at an address of this machine; return None if that is impossible.

    torch's own server listens on all interfaces, and launchers unpickle what they read from it. A
    store that torch makes in this process for the same port uses this server, so that nothing else
    listens: keep what is returned until then.

    Args:
        host: the address or name by which other processes reach the store.
        port: 0 for a free one.
        one_machine: all processes run on this machine, so a name may stand for a loopback address.
            On several machines it must not, as other machines resolve it to another address.
        announces: print a line if ``host`` is no address of this machine, as torch's own server
            then listens on all interfaces.

    Returns:
        The store, or None if the port is taken or the host is no address of this machine.

    Example:
        >>> from accel_callbacks.distributed.tcp_store import serve_store
        >>> store = serve_store("127.0.0.1", 0, one_machine=True)
        >>> store.host, store.port > 0
        ('127.0.0.1', True)
    """
    if sys.platform == "win32":  # torch takes over a socket by its descriptor, which Windows lacks
        return None
    for family, address in _addresses(host, one_machine):
        try:
            listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            continue
        number: int = listener.getsockname()[1]
        return TCPStore(
            address,
            number,
            is_master=True,
            timeout=dist.distributed_c10d.default_pg_timeout,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
            use_libuv=uses_libuv(),
        )
    if announces:
        at_port = f" at port {port}" if port else ""
        print(
            f"[accel] the store{at_port} listens on all interfaces, as {host} is no address of "
            "this machine that others could reach: give an address, or keep others out by a "
            "firewall",
            file=sys.stderr,
            flush=True,
        )
    return None


def uses_libuv() -> bool:
    """Return whether stores use libuv, as torch's own rendezvous chooses.

    torch for Windows is built without it, and a store that asks for it is an error there. Most of
    torch's launcher asks for it nevertheless, whatever ``USE_LIBUV`` says (pytorch#196855).
    """
    default = "0" if sys.platform == "win32" else "1"
    return os.environ.get("USE_LIBUV", default) == "1"


def _addresses(host: str, one_machine: bool) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of a host at which other processes can reach it, IPv4 first."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    pairs: list[tuple[socket.AddressFamily, str]] = [
        (family, str(place[0])) for family, _, _, _, place in entries
    ]
    pairs.sort(key=lambda pair: pair[0] != socket.AF_INET)
    if one_machine or is_loopback(host):
        return pairs
    # Debian's /etc/hosts gives a machine's own name a loopback address, that others do not see.
    return [(family, address) for family, address in pairs if not is_loopback(address)]


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine wherever it is looked up.

    Example:
        >>> from accel_callbacks.distributed.tcp_store import is_loopback
        >>> [is_loopback(host) for host in ("localhost", "127.0.1.1", "::1", "node0", "10.0.0.1")]
        [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address_towards(host: str, port: int) -> str | None:
    """Return the address of this machine from which it reaches a host, None without a route.

    Nothing is sent.
    """
    try:
        entries = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    for family, kind, protocol, _, place in entries:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                address: str = probe.getsockname()[0]
        except OSError:
            continue
        return address
    return None
