"""bfloat16: the range of fp32, so no loss scaling."""

from __future__ import annotations

import torch

from accel_callbacks.precision.amp import Autocast

__all__ = ["BF16"]


class BF16(Autocast):
    """Autocast to bfloat16.

    Example:
        >>> import torch
        >>> from accel_callbacks.precision import BF16
        >>> model = BF16(torch.device("cpu")).wrap(torch.nn.Linear(2, 2))
        >>> model(torch.ones(1, 2)).dtype
        torch.float32
    """

    name = "bf16"
    dtype = torch.bfloat16
