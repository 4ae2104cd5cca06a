"""The public names of `accel_callbacks.addons.hosts`, under the path that scripts import."""

# ruff: noqa: F401, F403 (all of it is for those who import this)

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_callbacks.addons.hosts import *
else:
    from accel_callbacks.addons.hosts import __all__, __dir__, __getattr__
