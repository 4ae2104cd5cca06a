"""The network interface that gloo takes on several machines, so that it agrees with NCCL's."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

__all__ = ["gloo_variables", "interface_towards"]

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def gloo_variables(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which gloo takes the right interface; empty if it cannot be told.

    gloo alone takes the address that the name of the machine leads to: 127.0.1.1 by the
    ``/etc/hosts`` of Debian, or a card from which other machines cannot be reached. So it follows
    ``NCCL_SOCKET_IFNAME`` if that names interfaces, else the route to the main machine.

    Args:
        address: of the main machine.
        environment: of this process; a ``GLOO_SOCKET_IFNAME`` in it is kept.
    """
    if "GLOO_SOCKET_IFNAME" in environment or not hasattr(socket, "if_nameindex"):
        return {}
    existing = [name for _, name in socket.if_nameindex()]
    routed = interface_towards(address, existing)
    asked = environment.get("NCCL_SOCKET_IFNAME", "")
    if not asked or asked.startswith("^"):  # those that NCCL leaves out
        return {} if routed is None else {"GLOO_SOCKET_IFNAME": routed}
    prefixes = tuple(filter(None, asked.removeprefix("=").split(",")))
    named = [name for name in existing if name.startswith(prefixes)]
    if len(named) > 1:
        named = [name for name in named if name == routed]
    return {"GLOO_SOCKET_IFNAME": named[0]} if named else {}


def interface_towards(address: str, existing: Sequence[str]) -> str | None:
    """Return the interface with the route to a machine, None without one, or if it is loopback.

    Nothing is sent.

    Args:
        address: its address or name.
        existing: the interfaces of this machine.
    """
    if sys.platform != "linux":
        return None
    with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(address), 1))
        source = probe.getsockname()[0]
        if not ipaddress.ip_address(source).is_loopback:
            return next((name for name in existing if _address_of(name, probe) == source), None)
    return None


def _address_of(name: str, probe: socket.socket) -> str | None:
    """Return the first IPv4 address of an interface, None without one."""
    if sys.platform == "win32":
        return None
    import fcntl

    with suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", os.fsencode(name)))
        return socket.inet_ntoa(answer[20:24])
    return None
