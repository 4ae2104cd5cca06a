"""The TCP sockets at which a process and its descendants listen, read from Linux's /proc."""

from __future__ import annotations

import ipaddress
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"


def listening(root: int) -> list[str]:
    """Return the addresses at which a process and its descendants listen, sorted, one a socket."""
    inodes: set[str] = set()
    family = descendants(root)
    for pid in family:
        inodes |= sockets_of(pid)
    # the sockets of the network that the process is in, which may be a namespace
    lines = (
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{root}/net/{table}").read_text().splitlines()[1:]
    )
    return sorted(address_of(line[1]) for line in lines if line[3] == LISTEN and line[9] in inodes)


def descendants(root: int) -> list[int]:
    children = defaultdict(list)
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            state = Path(f"/proc/{int(entry)}/stat").read_text()
            children[int(state.rpartition(")")[2].split()[1])].append(int(entry))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def sockets_of(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if target.startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return found


def address_of(text: str) -> str:
    """Read `0100007F:1F90`: 32-bit words in the order of bytes of this machine."""
    words = bytes.fromhex(text.partition(":")[0])
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return str(ipaddress.ip_address(packed))
