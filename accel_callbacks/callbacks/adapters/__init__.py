"""The public names of `accel_callbacks.integrations`, under the path that scripts import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

_HOME = {
    "NotInAPlainLoop": "host",
    "from_lightning": "lightning.from_lightning",
    "to_lightning": "lightning.to_lightning",
    "to_transformers": "transformers",
}

__all__ = ["NotInAPlainLoop", "from_lightning", "to_lightning", "to_transformers"]

if TYPE_CHECKING:
    from accel_callbacks.integrations.host import NotInAPlainLoop as NotInAPlainLoop
    from accel_callbacks.integrations.lightning.from_lightning import (
        from_lightning as from_lightning,
    )
    from accel_callbacks.integrations.lightning.to_lightning import to_lightning as to_lightning
    from accel_callbacks.integrations.transformers import to_transformers as to_transformers


__getattr__, __dir__ = lazy_names("accel_callbacks.integrations", _HOME)
