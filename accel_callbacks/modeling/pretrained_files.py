"""The configuration files that transformers' ``from_pretrained`` reads beside the weights."""

from __future__ import annotations

import json
from typing import Any

import torch

from accel_callbacks.modeling.original_class import class_of

__all__ = ["pretrained_files"]


def pretrained_files(model: torch.nn.Module) -> dict[str, str]:
    """Return the configuration of a transformers model by file name, as JSON; of others nothing.

    Args:
        model: as the user built it. The wrapper of a PEFT model has other names of weights than
            its configuration is of.

    Example:
        >>> import torch
        >>> from accel_callbacks.modeling.pretrained_files import pretrained_files
        >>> pretrained_files(torch.nn.Linear(1, 1))
        {}
    """
    config: Any = vars(model).get("config")
    if not hasattr(config, "to_json_string") or not hasattr(model, "save_pretrained"):
        return {}
    fields = {**json.loads(config.to_json_string()), "architectures": [class_of(model).__name__]}
    files = {"config.json": json.dumps(fields, indent=2, sort_keys=True)}
    generation: Any = vars(model).get("generation_config")
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string()
    return files
