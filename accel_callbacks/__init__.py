"""Lightning-style callbacks, trackers and safe checkpoints for plain PyTorch loops.

Every name below is imported from its module when it is first used, so that importing this
package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

__version__ = "0.1.0"

_HOME = {
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "Accelerator": "accelerator",
    "AcceleratorConfig": "config",
    "AcceleratorState": "handles",
    "Callback": "callbacks",
    "DataLoaderShard": "data.loader",
    "DistributedType": "state",
    "PartialState": "handles",
    "ProjectConfiguration": "config",
    "RemoteError": "errors",
    "ResumeError": "errors",
    "Topology": "state",
    "TrainingRun": "run",
    "broadcast": "collectives",
    "broadcast_object": "collectives",
    "gather": "collectives",
    "gather_object": "collectives",
    "is_main_process": "process",
    "last_process_only": "process",
    "local_main_process_first": "process",
    "local_main_process_only": "process",
    "main_process_first": "process",
    "main_process_only": "process",
    "on_local_process": "process",
    "on_process": "process",
    "pad_across_processes": "collectives",
    "reduce": "collectives",
    "send_to_device": "data.device",
    "set_seed": "rng",
    "synchronize": "process",
}

__all__ = [*sorted(_HOME), "__version__"]

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator as Accelerator
    from accel_callbacks.callbacks import Callback as Callback
    from accel_callbacks.collectives import broadcast as broadcast
    from accel_callbacks.collectives import broadcast_object as broadcast_object
    from accel_callbacks.collectives import gather as gather
    from accel_callbacks.collectives import gather_object as gather_object
    from accel_callbacks.collectives import pad_across_processes as pad_across_processes
    from accel_callbacks.collectives import reduce as reduce
    from accel_callbacks.config import AcceleratorConfig as AcceleratorConfig
    from accel_callbacks.config import ProjectConfiguration as ProjectConfiguration
    from accel_callbacks.data.device import send_to_device as send_to_device
    from accel_callbacks.data.loader import DataLoaderShard as DataLoaderShard
    from accel_callbacks.errors import RemoteError as RemoteError
    from accel_callbacks.errors import ResumeError as ResumeError
    from accel_callbacks.handles import AcceleratorState as AcceleratorState
    from accel_callbacks.handles import PartialState as PartialState
    from accel_callbacks.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from accel_callbacks.process import is_main_process as is_main_process
    from accel_callbacks.process import last_process_only as last_process_only
    from accel_callbacks.process import local_main_process_first as local_main_process_first
    from accel_callbacks.process import local_main_process_only as local_main_process_only
    from accel_callbacks.process import main_process_first as main_process_first
    from accel_callbacks.process import main_process_only as main_process_only
    from accel_callbacks.process import on_local_process as on_local_process
    from accel_callbacks.process import on_process as on_process
    from accel_callbacks.process import synchronize as synchronize
    from accel_callbacks.rng import set_seed as set_seed
    from accel_callbacks.run import TrainingRun as TrainingRun
    from accel_callbacks.scheduler import AcceleratedScheduler as AcceleratedScheduler
    from accel_callbacks.state import DistributedType as DistributedType
    from accel_callbacks.state import Topology as Topology


__getattr__, __dir__ = lazy_names(__name__, _HOME)
