"""The trackers of a run: when they open and close, and in which row a value is.

``accel.log`` and ``accel.init_trackers`` enter by `Tracking`, which opens a hub of `loggers` late,
once the run has its id, and closes it with the status of the run. ``WindowRow`` makes one row of
what the micro-batches of a gradient window log; ``media`` has the methods for images and tables;
``general_tracker`` is Accelerate's interface, and ``adapted_tracker`` lets a hub call it.

Nothing here writes a file or calls a tool: the hub's threads do. ``log`` waits for no device. A
tracker's error ends no run, unless the options say so.
"""

from accel_callbacks.tracking.general_tracker import GeneralTracker, LoggerType, on_main_process
from accel_callbacks.tracking.trackers import Tracking

__all__ = ["GeneralTracker", "LoggerType", "Tracking", "on_main_process"]
