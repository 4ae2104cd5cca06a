"""The public names of `accel_callbacks.models.offload`, under the path that scripts import."""

# ruff: noqa: F401, F403 (all of it is for those who import this)

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_callbacks.models.offload import *
else:
    from accel_callbacks.models.offload import __all__, __dir__, __getattr__
