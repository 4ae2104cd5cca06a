"""Small disks of our own: on loop devices, which can lose power, and in memory, which fill up."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FS_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = struct.pack("I", 2)


class LoopDisk:
    """A filesystem on a loop device."""

    def __init__(self, image: Path, path: Path) -> None:
        self._image = image
        self.path = path

    def mount(self) -> None:
        """Mount it; skip the test where that is not allowed."""
        command = ["mount", "-o", "loop", str(self._image), str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no loop device can be mounted here: {done.stderr.strip()[:200]}")

    def unmount(self) -> None:
        """Unmount it; a victim that was just killed may hold it for a moment."""
        for _ in range(100):
            done = subprocess.run(["umount", str(self.path)], capture_output=True, text=True)
            if done.returncode == 0:
                return
            time.sleep(0.05)
        raise RuntimeError(f"cannot unmount {self.path}: {done.stderr}")

    def cut_power(self) -> None:
        """Stop the filesystem where it stands; nothing more reaches the disk."""
        import fcntl

        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, FS_IOC_SHUTDOWN, NO_LOG_FLUSH)
        finally:
            os.close(descriptor)

    def power_up(self) -> None:
        """Mount what is on the disk, as a reboot does."""
        self.unmount()
        self.mount()


@contextmanager
def loop_disk(folder: Path, kind: str, megabytes: int) -> Iterator[LoopDisk]:
    """Make a disk of a kind of filesystem; skip the test where the machine does not allow that."""
    _need_root()
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    image, path = folder / f"{kind}.img", folder / kind
    with image.open("wb") as file:
        file.truncate(megabytes * 2**20)
    subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True, capture_output=True)
    path.mkdir()
    disk = LoopDisk(image, path)
    disk.mount()
    try:
        yield disk
    finally:
        disk.unmount()
        image.unlink()


@contextmanager
def tiny_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Make a disk in memory that is soon full; skip the test where that is not allowed."""
    _need_root()
    path = folder / "tiny"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tiny", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()[:200]}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _need_root() -> None:
    """Skip the test unless this process may mount."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
