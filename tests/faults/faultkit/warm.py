"""Everything dear to import, so that a forked victim has it already."""

import importlib
import pkgutil

import fsspec
import numpy as np
import s3fs
import torch
import torch.distributed.checkpoint
import torch.distributed.tensor

import checkpoint_io
import faultkit.groups

for _module in pkgutil.walk_packages(checkpoint_io.__path__, "checkpoint_io."):
    # some need an optional package that may be absent here
    try:
        importlib.import_module(_module.name)
    except ImportError:
        continue

torch.set_num_threads(1)

__all__ = ["faultkit", "fsspec", "np", "s3fs", "torch"]
