"""The public names of `accel_callbacks.addons.hosts`, under the path that scripts import."""

from typing import TYPE_CHECKING

from accel_callbacks.addons.hosts import __dir__ as __dir__
from accel_callbacks.addons.hosts import __getattr__ as __getattr__

__all__ = ["NotInAPlainLoop", "from_lightning", "to_lightning", "to_transformers"]

if TYPE_CHECKING:
    from accel_callbacks.addons.hosts import NotInAPlainLoop as NotInAPlainLoop
    from accel_callbacks.addons.hosts import from_lightning as from_lightning
    from accel_callbacks.addons.hosts import to_lightning as to_lightning
    from accel_callbacks.addons.hosts import to_transformers as to_transformers
