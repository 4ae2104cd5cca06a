"""Which driver a URL needs, and which names may be joined to one."""

from __future__ import annotations

EXTRAS = {
    "s3": "s3", "s3a": "s3",
    "gs": "gcs", "gcs": "gcs",
    "abfs": "azure", "abfss": "azure", "az": "azure", "adl": "azure",
    "sftp": "sftp", "ssh": "sftp",
}  # fmt: skip
OBJECT_STORES = frozenset(name for name, extra in EXTRAS.items() if extra != "sftp")


def protocol_of(url: str) -> str:
    """Return the part before `://`, "file" for a path."""
    return url.split("://", 1)[0] if "://" in url else "file"


def driver_advice(url: str) -> str:
    """Say which package to install for a URL."""
    protocol = protocol_of(url)
    if extra := EXTRAS.get(protocol):
        return f'{url} needs a storage driver: pip install "accel-callbacks[{extra}]"'
    return f"{url} needs the fsspec driver for {protocol}://; pip install the package that has it"


def child_name(name: str) -> str:
    """Refuse a name that would leave its folder."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"not a plain folder name: {name!r}")
    return name


def is_child_name(name: str) -> bool:
    """Say whether a listed name is one that `child_name` takes."""
    try:
        child_name(name)
    except ValueError:
        return False
    return True
