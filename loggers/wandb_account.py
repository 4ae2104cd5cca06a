"""Whether W&B has an account to log to, and whether its server answers."""

from __future__ import annotations

import http.client
import netrc
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

__all__ = ["mode_of", "unreachable"]

_DECIDED = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_LONGEST_ASK = 10.0  # seconds; a server that takes longer to say anything is down


def mode_of(wandb: Any) -> str | None:
    """Return the mode that fits where the user gave none; None leaves it to ``wandb.init``.

    Without credentials that would ask for some, or fail. Nobody is asked here.
    """
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on"):
        return "disabled"  # newer releases do not look at it any more
    if any(os.environ.get(name) for name in _DECIDED):
        return None
    settings = wandb.setup().settings
    if settings.mode not in (None, "online") or getattr(settings, "api_key", None):
        return None
    return None if _in_netrc(str(settings.base_url)) else "offline"


def unreachable(wandb: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return why the server that ``wandb.init`` would talk to does not answer, or None.

    A ``wandb.init`` that fails leaves the run's id taken in W&B's own process, so it is asked
    before. Any answer is one: what a server thinks of the credentials is not known yet.
    """
    settings = wandb.setup().settings.model_copy()
    settings.update_from_settings(arguments["settings"])
    if (arguments.get("mode") or settings.mode) not in (None, "online", "shared"):
        return None
    proxies = ("http_proxy", "https_proxy", "x_proxies")
    if any(getattr(settings, name, None) for name in proxies):
        return None  # only W&B knows this way
    return _silence(str(settings.base_url), min(float(settings.init_timeout), _LONGEST_ASK))


def _silence(url: str, seconds: float) -> str | None:
    """Return why nothing answers at a URL within some seconds, or None if something does."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return None
    except (urllib.error.HTTPError, http.client.HTTPException):
        return None
    except urllib.error.URLError as error:
        # Certificates that only W&B is told of, for example, are no silence.
        quiet = isinstance(error.reason, OSError) and type(error.reason).__module__ != "ssl"
        return f"{url}: {error.reason}" if quiet else None
    except OSError as error:
        return f"{url}: {error}"


def _in_netrc(base_url: str) -> bool:
    """Say whether ``wandb login`` has left a key for this server."""
    paths = (os.environ.get("NETRC") or "~/.netrc", "~/_netrc")
    hosts = {urlsplit(base_url).netloc, "api.wandb.ai"}
    for path in map(os.path.expanduser, paths):
        try:
            entries = netrc.netrc(path)
        except (OSError, netrc.NetrcParseError):
            continue
        if any(host in entries.hosts for host in hosts):
            return True
    return False
