"""Experiment trackers behind one small protocol: files, TensorBoard, Weights & Biases and others.

Usable in any script, by a `TrackerHub`: its ``log`` queues a row, a thread reads tensors from their
devices about twice a second (``queue``), and one thread a tracker delivers them (``worker``), with
retries. A new tracker is a subclass of `Tracker`, and a line in ``registry``.

Importing this package imports neither a tool nor torch nor numpy. The thread that trains never
waits for a device or a tool here, but for a ``lossless`` tracker that is far behind. No error of a
tool reaches it unless ``strict`` is set, and no row is lost without being counted.
"""

from loggers.base import MEDIA, NullTracker, RunInfo, Scalar, Status, Tracker, media
from loggers.config import NanPolicy, TrackerConfig
from loggers.hub import TrackerHub
from loggers.registry import (
    ConfiguredTracker,
    TrackerSpec,
    available_trackers,
    check_name,
    configured_tracker,
    create,
    installed_trackers,
    register_tracker,
)
from loggers.trackers.clearml import ClearMLTracker
from loggers.trackers.comet import CometTracker
from loggers.trackers.console import ConsoleTracker
from loggers.trackers.csv import CSVTracker, read_csv
from loggers.trackers.dvclive import DVCLiveTracker
from loggers.trackers.jsonl import JSONLTracker, read_jsonl
from loggers.trackers.mlflow import MLflowTracker
from loggers.trackers.swanlab import SwanLabTracker
from loggers.trackers.tensorboard import TensorBoardTracker
from loggers.trackers.trackio import TrackioTracker
from loggers.trackers.wandb import WandBTracker
from loggers.values import flat_config, flatten, plain_config
from loggers.worker import TrackerReport

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
