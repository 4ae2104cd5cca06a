"""Adapters: callbacks of other worlds in ours, and ours in theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {
    "NotInAPlainLoop": "missing",
    "from_lightning": "lightning_inward",
    "to_lightning": "lightning_outward",
    "to_transformers": "transformers_outward",
}

__all__ = ["NotInAPlainLoop", "from_lightning", "to_lightning", "to_transformers"]

if TYPE_CHECKING:
    from accel_callbacks.callbacks.adapters.missing import NotInAPlainLoop as NotInAPlainLoop
    from accel_callbacks.integrations.lightning.from_lightning import (
        from_lightning as from_lightning,
    )
    from accel_callbacks.integrations.lightning.to_lightning import to_lightning as to_lightning
    from accel_callbacks.integrations.transformers import (
        to_transformers as to_transformers,
    )


__getattr__, __dir__ = lazy_names(__name__, _HOME)
