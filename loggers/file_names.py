"""Names of files that Linux, macOS and Windows accept and keep apart."""

from __future__ import annotations

import hashlib
import re
from urllib.parse import quote

__all__ = ["file_name", "portable_path"]

_LONGEST = 120  # file systems allow 255 bytes, including step, number and suffix
_UNPORTABLE = re.compile(r'[<>:"|?*\\\x00-\x1f]')
# Windows takes these for devices, in any case and with any suffix.
_DEVICE = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])( *\..*)?", re.IGNORECASE
)


def file_name(name: str) -> str:
    """Return any text as one component of a path or URL, the same in every run.

    APFS and NTFS take names that differ in case for one, so a name with capital letters ends with
    a digest of itself. Other texts that differ have other names as well.

    >>> file_name("val/loss"), file_name("..."), file_name("aux")
    ('val=2Floss', '=..=2E', '=aux')
    >>> file_name("Loss").casefold() == file_name("loss").casefold()
    False
    """
    plain = quote(name, safe=" ").replace("%", "=")  # percent signs are special in URLs
    if len(plain) > _LONGEST:
        plain = f"{plain[:_LONGEST]}-{_digest(name, 6)}"
    elif re.search("[A-Z]", name):
        plain = f"{plain}=-{_digest(name, 3)}"  # no escape of `quote` looks like this
    return _mend(plain)


def portable_path(name: str) -> str:
    """Return a name with slashes as a relative path, below which every system can write.

    >>> portable_path("../val//loss"), portable_path("p:50/aux"), portable_path("a. ")
    ('val/loss', 'p=3A50/=aux', 'a.=20')
    """
    parts = (part for part in name.split("/") if part not in ("", ".", ".."))
    return "/".join(_mend(_UNPORTABLE.sub(_escape, part)) for part in parts) or "_"


def _mend(part: str) -> str:
    """Return a component that is no device, no ``..``, and does not end in a dot or space."""
    if part[-1:] in (".", " "):  # Windows drops these
        marked = "=" if part.strip(". ") == "" else ""
        return f"{marked}{part[:-1]}={ord(part[-1]):02X}"
    return f"={part}" if not part or _DEVICE.fullmatch(part) else part


def _escape(match: re.Match[str]) -> str:
    return f"={ord(match[0]):02X}"


def _digest(name: str, size: int) -> str:
    return hashlib.blake2b(name.encode(), digest_size=size).hexdigest()
