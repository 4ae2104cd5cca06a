"""Engines, a folder each: the ways in which ranks train one model.

`accel_callbacks.engine_options` has the table that says when each is taken, and imports the one
that is. Its `strategy.py` is a subclass of `Strategy`; `gradients.py` and `states.py` beside it are
its `Gradients` and `StateAccess`, where they differ from those of one device.

The files of this folder itself are what engines share: `sharding.py`, `sharded_gradients.py` and
`sharded_states.py` (shards in place of parameters: FSDP, tensor and pipeline parallelism),
`shared_buffers.py` (buffers of rank 0), `rank_agreement.py` and `replica_agreement.py` (ranks do
the same, in the same order), `checks.py` (models that no engine can train), `advice.py` (errors of
torch that say too little).

An engine imports no other engine but to build on it (FSDP and pipelines on tensor parallelism), and
makes no choice by the class of another. All ranks make the same collectives in the same order: an
error that one rank alone may raise comes before the first of them, or goes to all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_callbacks._lazy import lazy_names

if TYPE_CHECKING:
    from accel_callbacks.engine_options import create_strategy as create_strategy
    from accel_callbacks.engine_options import find_device as find_device
    from accel_callbacks.engine_options import register_engine as register_engine
    from accel_callbacks.engines.ddp.strategy import DDP as DDP
    from accel_callbacks.engines.deepspeed.strategy import DeepSpeed as DeepSpeed
    from accel_callbacks.engines.fsdp.strategy import FSDP as FSDP
    from accel_callbacks.engines.pipeline.strategy import PipelineParallel as PipelineParallel
    from accel_callbacks.engines.tensor.strategy import TensorParallel as TensorParallel
    from accel_callbacks.engines.xla.strategy import XLA as XLA
    from accel_callbacks.plugins.engine_request import EngineRequest as EngineRequest
    from accel_callbacks.strategy.base import Sequences as Sequences
    from accel_callbacks.strategy.base import Strategy as Strategy
    from accel_callbacks.strategy.data_ranks import DataRanks as DataRanks
    from accel_callbacks.strategy.gradients import Gradients as Gradients
    from accel_callbacks.strategy.single_device import SingleDevice as SingleDevice
    from accel_callbacks.strategy.state_access import StateAccess as StateAccess

__all__ = [
    "DDP",
    "FSDP",
    "XLA",
    "DataRanks",
    "DeepSpeed",
    "EngineRequest",
    "Gradients",
    "PipelineParallel",
    "Sequences",
    "SingleDevice",
    "StateAccess",
    "Strategy",
    "TensorParallel",
    "create_strategy",
    "find_device",
    "register_engine",
]

# A run has one engine, and each imports parts of torch of its own.
_HOME = {
    "DDP": "ddp.strategy",
    "DataRanks": ".strategy.data_ranks",
    "DeepSpeed": "deepspeed.strategy",
    "EngineRequest": ".plugins.engine_request",
    "FSDP": "fsdp.strategy",
    "Gradients": ".strategy.gradients",
    "PipelineParallel": "pipeline.strategy",
    "Sequences": ".strategy.base",
    "SingleDevice": ".strategy.single_device",
    "StateAccess": ".strategy.state_access",
    "Strategy": ".strategy.base",
    "TensorParallel": "tensor.strategy",
    "XLA": "xla.strategy",
    **dict.fromkeys(("create_strategy", "find_device", "register_engine"), ".engine_options"),
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
