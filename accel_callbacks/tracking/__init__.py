"""Trackers of a run."""

from accel_callbacks.tracking.general_tracker import GeneralTracker, LoggerType, on_main_process
from accel_callbacks.tracking.trackers import Tracking

__all__ = ["GeneralTracker", "LoggerType", "Tracking", "on_main_process"]
