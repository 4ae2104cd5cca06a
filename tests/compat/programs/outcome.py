"""What a program of this folder ends with: a digest of weights, and one line of JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch


def digest(weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of a module's state dict, or of tensors by name."""
    tensors = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
    sha256 = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha256.update(name.encode())
        # As bytes, since NumPy has no bfloat16.
        flat = tensor.detach().cpu().contiguous().flatten()
        sha256.update(flat.view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def report(**values: Any) -> None:
    """Print what is compared, on the first process, and end the process group."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(values), flush=True)
    if torch.distributed.is_initialized():  # a process with an open group may abort at its end
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
