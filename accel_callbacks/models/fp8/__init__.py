"""Linear layers in float8 by torchao: the precision ``"fp8"``, and weights that FSDP gathers in it.

`accel_callbacks.engine_options` has the line that registers it.
"""

from accel_callbacks.models.fp8.precision import FP8

__all__ = ["FP8"]
