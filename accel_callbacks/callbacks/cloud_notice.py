"""Notices of clouds that a machine will be taken back, read from the machine's metadata address."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from accel_callbacks.errors import nearest

__all__ = ["PROVIDERS", "CloudNotices", "Notice"]

_ADDRESS = "http://169.254.169.254"  # link-local: it is answered by the machine's own host
_VARIABLE = "ACCEL_METADATA_ADDRESS"
_EVERY = 3.0  # seconds between two requests; AWS asks for one in five at least
_SHORTEST = 30.0 - _EVERY  # seconds that are left at least where a notice has no time
_TIMEOUT = 2.0  # seconds for each part of an answer, and for all of it
_LONGEST = 64 * 1024  # bytes of an answer
_Fetch = Callable[..., bytes | None]  # of a path; None for "404 Not Found"


class Notice(NamedTuple):
    """What a cloud has said.

    Args:
        provider: its name, for messages.
        seconds: that are left.

    Example:
        >>> from accel_callbacks.callbacks.cloud_notice import Notice
        >>> print(Notice("AWS", 118.2))
        AWS spot notice, 118 s left
    """

    provider: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.provider} spot notice, {self.seconds:.0f} s left"


def _aws(fetch: _Fetch) -> Notice | None:
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = fetch("/latest/api/token", lifetime, method="PUT") or b""
    header = {"X-aws-ec2-metadata-token": token.decode("ascii").strip()}
    answer = fetch("/latest/meta-data/spot/instance-action", header)
    if answer is None:
        return None
    at = datetime.fromisoformat(str(json.loads(answer)["time"]).replace("Z", "+00:00"))
    return Notice("AWS", _seconds_until(at))


def _gce(fetch: _Fetch) -> Notice | None:
    answer = fetch("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if answer is None or answer.strip() not in (b"TRUE", b"FALSE"):
        raise ValueError(f"its answer is {answer!r:.80}")
    return Notice("GCE", _SHORTEST) if answer.strip() == b"TRUE" else None


def _azure(fetch: _Fetch) -> Notice | None:
    header = {"Metadata": "true"}
    answer = fetch("/metadata/scheduledevents?api-version=2020-07-01", header)
    for event in json.loads(answer or b"{}").get("Events", ()):
        if event["EventType"] not in ("Preempt", "Terminate"):
            continue
        # Those of the other machines of a scale set come too.
        name = fetch("/metadata/instance/compute/name?api-version=2021-02-01&format=text", header)
        if name is not None and name.decode().strip() not in event["Resources"]:
            continue
        at = event.get("NotBefore")  # empty once it has begun
        return Notice("Azure", _seconds_until(parsedate_to_datetime(at)) if at else _SHORTEST)
    return None


#: How the notice of each cloud is read.
PROVIDERS: Mapping[str, Callable[[_Fetch], Notice | None]] = {
    "aws": _aws,
    "gce": _gce,
    "azure": _azure,
}


def _seconds_until(at: datetime) -> float:
    at = at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
    return max(0.0, (at - datetime.now(timezone.utc)).total_seconds())


class CloudNotices:
    """Asks the metadata address of the machine for a notice every few seconds, on a thread.

    Without a proxy, and following no redirect, so that a request goes to that address only. If it
    does not answer as expected that is said once, and it is asked again.

    Args:
        providers: names in ``PROVIDERS``.
        address: in place of that of the clouds, or of the variable ``ACCEL_METADATA_ADDRESS``.

    Raises:
        ValueError: no cloud has the name, or the address is no URL of http.

    Example:
        >>> from accel_callbacks.callbacks.cloud_notice import CloudNotices
        >>> CloudNotices(["aws"], "http://127.0.0.1:8080").address
        'http://127.0.0.1:8080'
    """

    def __init__(self, providers: Iterable[str], address: str | None = None) -> None:
        self.providers = tuple(providers)
        for name in self.providers:
            if name not in PROVIDERS:
                hint = nearest(name, PROVIDERS)
                raise ValueError(f"notices={name!r}: use one of {', '.join(PROVIDERS)}.{hint}")
        self.address = (address or os.environ.get(_VARIABLE) or _ADDRESS).rstrip("/")
        if not self.address.startswith(("http://", "https://")):
            raise ValueError(f"the metadata address {self.address!r} must begin with http://.")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
        self._warned: set[str] = set()
        self._stopped = threading.Event()

    def start(self, received: Callable[[Notice], None]) -> None:
        """Start the thread, which ends with the first notice.

        Args:
            received: called with it on the thread.
        """
        self._stopped = stopped = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(received, stopped), name="accel-notices", daemon=True
        )
        thread.start()

    def stop(self) -> None:
        """End the thread; a request that is under way is not waited for."""
        self._stopped.set()

    def _watch(self, received: Callable[[Notice], None], stopped: threading.Event) -> None:
        while not stopped.is_set():
            for name in self.providers:
                notice = self.ask(name)
                if notice is not None and not stopped.is_set():
                    received(notice)
                    return
            stopped.wait(_EVERY)

    def ask(self, provider: str) -> Notice | None:
        """Return the notice of a cloud, None if there is none or it does not answer."""
        try:
            return PROVIDERS[provider](self._fetch)
        except Exception as error:  # whatever comes back, training goes on
            if provider not in self._warned:
                self._warned.add(provider)
                print(
                    f"[accel] no notice of {provider!r} can be read from {self.address} "
                    f"({type(error).__name__}: {error}); it is asked again every {_EVERY:.0f} s. "
                    "On a machine that is not of that cloud, leave notices= out.",
                    file=sys.stderr,
                    flush=True,
                )
            return None

    def _fetch(self, path: str, headers: Mapping[str, str], method: str = "GET") -> bytes | None:
        """Return the answer of the address, None for "404 Not Found"."""
        url, deadline = self.address + path, time.monotonic() + _TIMEOUT
        request = urllib.request.Request(url, headers=dict(headers), method=method)
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as response:
                parts: list[bytes] = []
                while part := response.read1(_LONGEST):
                    parts.append(part)
                    if sum(map(len, parts)) > _LONGEST:
                        raise ValueError(f"its answer has more than {_LONGEST} bytes")
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"its answer takes more than {_TIMEOUT:.0f} s")
                return b"".join(parts)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
            raise


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: it is an error."""

    def redirect_request(self, *args: Any) -> None:
        """Return no request."""
