"""Trackers: one small protocol in front of JSONL files, TensorBoard and Weights & Biases.

Usable in any script. Importing this package imports no tool, nor torch, nor numpy.
"""

from loggers.base import MEDIA, RunInfo, Scalar, Status, Tracker, media
from loggers.choosing import ConfiguredTracker, configured_tracker, installed_trackers
from loggers.clearml import ClearMLTracker
from loggers.comet import CometTracker
from loggers.config import flat_config, plain_config
from loggers.console import ConsoleTracker
from loggers.csv_file import CSVTracker, read_csv
from loggers.dvclive import DVCLiveTracker
from loggers.guard import TrackerReport
from loggers.hub import TrackerHub
from loggers.jsonl import JSONLTracker, read_jsonl
from loggers.mlflow import MLflowTracker
from loggers.null import NullTracker
from loggers.options import NanPolicy, TrackerConfig
from loggers.registry import (
    TrackerSpec,
    available_trackers,
    check_name,
    create,
    register_tracker,
)
from loggers.swanlab import SwanLabTracker
from loggers.tensorboard import TensorBoardTracker
from loggers.trackio import TrackioTracker
from loggers.values import flatten
from loggers.wandb import WandBTracker

__all__ = [
    "MEDIA",
    "CSVTracker",
    "ClearMLTracker",
    "CometTracker",
    "ConfiguredTracker",
    "ConsoleTracker",
    "DVCLiveTracker",
    "JSONLTracker",
    "MLflowTracker",
    "NanPolicy",
    "NullTracker",
    "RunInfo",
    "Scalar",
    "Status",
    "SwanLabTracker",
    "TensorBoardTracker",
    "Tracker",
    "TrackerConfig",
    "TrackerHub",
    "TrackerReport",
    "TrackerSpec",
    "TrackioTracker",
    "WandBTracker",
    "available_trackers",
    "check_name",
    "configured_tracker",
    "create",
    "flat_config",
    "flatten",
    "installed_trackers",
    "media",
    "plain_config",
    "read_csv",
    "read_jsonl",
    "register_tracker",
]
