"""Trackers: one small protocol in front of JSONL files, TensorBoard and Weights & Biases.

Usable in any script. Importing this package imports no tool, nor torch, nor numpy.
"""

from loggers.base import RunInfo, Scalar, Status, Tracker
from loggers.config import flat_config, plain_config
from loggers.guard import TrackerReport
from loggers.hub import TrackerHub
from loggers.jsonl import JSONLTracker, read_jsonl
from loggers.null import NullTracker
from loggers.registry import TrackerSpec, available_trackers, create, register_tracker
from loggers.tensorboard import TensorBoardTracker
from loggers.values import flatten
from loggers.wandb import WandBTracker

__all__ = [
    "JSONLTracker",
    "NullTracker",
    "RunInfo",
    "Scalar",
    "Status",
    "TensorBoardTracker",
    "Tracker",
    "TrackerHub",
    "TrackerReport",
    "TrackerSpec",
    "WandBTracker",
    "available_trackers",
    "create",
    "flat_config",
    "flatten",
    "plain_config",
    "read_jsonl",
    "register_tracker",
]
