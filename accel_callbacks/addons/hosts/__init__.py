"""Callbacks of other trainers in ours, and ours in theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {
    "NotInAPlainLoop": "host",
    "from_lightning": ".lightning.from_lightning",
    "to_lightning": ".lightning.to_lightning",
    "to_transformers": ".trainer.transformers",
}

# A type checker cannot compute it, and takes the imports below instead.
if not TYPE_CHECKING:
    __all__ = sorted(_HOME)

if TYPE_CHECKING:
    from accel_callbacks.addons.hosts.host import NotInAPlainLoop as NotInAPlainLoop
    from accel_callbacks.addons.lightning.from_lightning import (
        from_lightning as from_lightning,
    )
    from accel_callbacks.addons.lightning.to_lightning import to_lightning as to_lightning
    from accel_callbacks.addons.trainer.transformers import to_transformers as to_transformers


__getattr__, __dir__ = lazy_names(__name__, _HOME)
