"""Options of fully sharded data parallelism (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from accel_callbacks.errors import nearest
from accel_callbacks.plugins.base import KwargsHandler, Launch
from accel_callbacks.plugins.option import Block, launched, scripted, switch_or_count

__all__ = ["FullyShardedDataParallelPlugin"]

#: FSDP1's strategies by their numbers, and what ``reshard_after_forward`` is in FSDP2.
_STRATEGIES = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": None,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
_WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATE_DICT_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_FLAGS = (
    "limit_all_gathers",
    "use_orig_params",
    "sync_module_states",
    "forward_prefetch",
    "cpu_ram_efficient_loading",
    "activation_checkpointing_offload",
    "no_sync",
)
# Of these a script that gives one has said what the other one would.
_SAME = ("sharding_strategy", "reshard_after_forward")
_WORDS = {"true": True, "false": False}
_COPIED = "checkpoints are copied to host memory as they need it"


@dataclass(frozen=True)
class FullyShardedDataParallelPlugin(KwargsHandler):
    """How FSDP2 (``torch.distributed.fsdp.fully_shard``) shards models.

    ``Accelerator(fsdp_plugin=...)``. An option that is None comes from ``accel launch``, else it
    has its default. The options are those of Accelerate, and ``no_sync``.

    Args:
        fsdp_version: 2. A version of 1 is trained as 2, with a warning.
        sharding_strategy: of FSDP1: ``"FULL_SHARD"`` is ``reshard_after_forward=True``,
            ``"SHARD_GRAD_OP"`` is False, and ``"HYBRID_SHARD"`` and ``"HYBRID_SHARD_ZERO2"`` also
            shard within each machine and replicate over machines.
        reshard_after_forward: True (default): gather a unit again for backward, which needs the
            least memory. False: keep it from forward to backward. An int: keep it sharded over so
            many ranks.
        backward_prefetch: has no effect.
        mixed_precision_policy: a ``torch.distributed.fsdp.MixedPrecisionPolicy``, a dict of its
            arguments, or ``"bf16"`` or ``"fp16"``. By default that of the Accelerator's
            ``mixed_precision="bf16"``: gather and compute in bfloat16, reduce gradients in float32.
        auto_wrap_policy: what is sharded as one unit: ``"TRANSFORMER_BASED_WRAP"`` (modules of the
            classes in ``transformer_cls_names_to_wrap``), ``"SIZE_BASED_WRAP"`` (modules of
            ``min_num_params``), ``"NO_WRAP"`` (the model as a whole), or a function of a module
            that returns True for a unit. By default the classes that the model names in
            ``_no_split_modules``, else its repeated blocks.
        cpu_offload: keep shards, gradients and optimizer states in host memory; off by default.
        ignored_modules: modules that are not sharded: the modules, or their names, or a regular
            expression for their names. Their gradients are averaged over the ranks.
        state_dict_type: has no effect.
        state_dict_config: has no effect.
        optim_state_dict_config: has no effect.
        limit_all_gathers: has no effect.
        use_orig_params: has no effect.
        param_init_fn: initializes a module that was built on the meta device.
        sync_module_states: take the weights of rank 0 on all ranks; on by default.
        forward_prefetch: gather the next unit before the forward of this one has begun; off by
            default.
        activation_checkpointing: compute activations again in backward.
        activation_checkpointing_offload: keep in host memory what they are computed from; off by
            default.
        cpu_ram_efficient_loading: load pretrained weights on rank 0 only.
        transformer_cls_names_to_wrap: names of classes, in a list or separated by commas.
        min_num_params: number of elements of a unit.
        no_sync: reduce gradients only at the end of a gradient window. Each rank then keeps whole
            gradients in between; by default they are reduced and sharded after each backward.

    Raises:
        ValueError: an option has an unknown value, or the strategy is ``"NO_SHARD"``.
        TypeError: an option has another type.

    Example:
        >>> from accel_callbacks import FullyShardedDataParallelPlugin
        >>> FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP").reshard
        False
    """

    block: ClassVar = Block(
        "fsdp_config", "FSDP", prefix="fsdp_", variables="ACCEL_FSDP_", valued=True
    )

    fsdp_version: int | str | None = launched(
        2,
        "version of FSDP; 1 is trained as 2",
        key="version",
        kind="int",
        least=1,
        most=2,
        passed=False,
    )
    sharding_strategy: str | int | Any = launched(
        "FULL_SHARD",
        "what is sharded, in the words of version 1",
        kind="str",
        choices=tuple(_STRATEGIES),
        renamed=dict(zip("12345", _STRATEGIES, strict=True)),
        foreign="FSDP_SHARDING_STRATEGY",
    )
    reshard_after_forward: bool | int | str | None = launched(
        "true",
        "whether weights are freed after forward, or the number of processes that then share them",
        kind="str",
        choices=("true", "false", *_STRATEGIES),
        numbers=True,
        convert=switch_or_count,
        foreign="FSDP_RESHARD_AFTER_FORWARD",
        question="Free weights after forward, and gather them again in backward?",
    )
    backward_prefetch: str | Any = launched(
        None,
        "what is gathered early in backward (version 1)",
        kind="str",
        choices=_PREFETCH,
        passed=False,
        idle="FSDP2 always gathers the next unit early in backward",
        usual="BACKWARD_PRE",
    )
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable[..., Any] | None = launched(
        None,
        "which modules are gathered as a unit; default: the blocks that a model repeats",
        kind="str",
        choices=_WRAP_POLICIES,
        foreign="FSDP_AUTO_WRAP_POLICY",
        question="Which modules are gathered as a unit?",
    )
    cpu_offload: bool | Any = launched(
        False,
        "keep weights in host memory",
        key="offload_params",
        kind="bool",
        foreign="FSDP_OFFLOAD_PARAMS",
        question="Keep weights in host memory, which is slow?",
    )
    ignored_modules: str | Iterable[Any] | None = launched(
        None, "names of modules that stay whole, as a regular expression", kind="str"
    )
    state_dict_type: str | Any = launched(
        None,
        "layout of checkpoints, which has one format here",
        kind="str",
        choices=_STATE_DICT_TYPES,
        passed=False,
        idle="checkpoints have one format, which any number of processes loads",
        usual="SHARDED_STATE_DICT",
    )
    state_dict_config: Any = scripted(None, idle=_COPIED, usual=None)
    optim_state_dict_config: Any = scripted(None, idle=_COPIED, usual=None)
    limit_all_gathers: bool | None = scripted(None, idle="gathers are always limited", usual=True)
    use_orig_params: bool | None = launched(
        True,
        "keep the weights' own names (version 1)",
        passed=False,
        idle="FSDP2 always keeps the weights' own names, types and groups",
        usual=True,
    )
    param_init_fn: Callable[[Any], None] | None = None
    sync_module_states: bool | None = launched(True, "take the weights of the first process on all")
    forward_prefetch: bool | None = launched(False, "gather the next unit early in forward")
    activation_checkpointing: bool | int | str | Any = launched(
        "false",
        "compute activations twice, to save memory; N: of every N-th block",
        kind="str",
        choices=("true", "false", "selective"),
        numbers=True,
        convert=switch_or_count,
        foreign="FSDP_ACTIVATION_CHECKPOINTING",
        question="Compute activations twice, to save memory?",
    )
    activation_checkpointing_offload: bool | None = launched(
        False,
        "keep in host memory what these blocks are computed from",
        foreign="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    )
    cpu_ram_efficient_loading: bool | None = launched(
        True, "load weights of transformers on one process only"
    )
    transformer_cls_names_to_wrap: str | Iterable[str] | None = launched(
        None,
        "classes that are units, such as BertLayer,T5Block (TRANSFORMER_BASED_WRAP)",
        key="transformer_layer_cls_to_wrap",
        kind="str",
        foreign="FSDP_TRANSFORMER_CLS_TO_WRAP",
        question="Their class names, such as BertLayer,T5Block?",
    )
    min_num_params: int | None = launched(
        100_000_000,
        "fewest weights of a unit (SIZE_BASED_WRAP)",
        least=0,
        foreign="FSDP_MIN_NUM_PARAMS",
        question="Fewest weights of a unit?",
    )
    no_sync: bool | None = launched(
        False, "reduce gradients at the end of a gradient window only, which takes more memory"
    )

    def __post_init__(self) -> None:
        if self.fsdp_version is not None and str(self.fsdp_version) not in ("1", "2"):
            raise ValueError(f"fsdp_version={self.fsdp_version!r} must be 2.")
        if isinstance(self.reshard_after_forward, str):
            self._read_reshard(self.reshard_after_forward)
        elif self.reshard_after_forward is not None:
            _check_int("reshard_after_forward", int(self.reshard_after_forward), least=0)
        self._read("sharding_strategy", list(_STRATEGIES))
        self._read("backward_prefetch", _PREFETCH)
        self._read("state_dict_type", _STATE_DICT_TYPES)
        if isinstance(self.auto_wrap_policy, str):
            self._read("auto_wrap_policy", _WRAP_POLICIES)
        elif self.auto_wrap_policy is not None and not callable(self.auto_wrap_policy):
            raise TypeError(
                f"auto_wrap_policy={self.auto_wrap_policy!r} must be one of {_WRAP_POLICIES} or a "
                "function of a module."
            )
        for name in _FLAGS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be True or False.")
        names = self.transformer_cls_names_to_wrap
        if names is not None:
            listed = names.split(",") if isinstance(names, str) else names
            classes = tuple(name.strip() for name in listed if name.strip())
            object.__setattr__(self, "transformer_cls_names_to_wrap", classes)
        if self.min_num_params is not None:
            _check_int("min_num_params", self.min_num_params, least=0)
        ignored = self.ignored_modules
        if ignored is not None and not isinstance(ignored, str):
            object.__setattr__(self, "ignored_modules", tuple(ignored))
        if self.sharding_strategy == "NO_SHARD":
            raise ValueError(
                "sharding_strategy='NO_SHARD' keeps a whole replica on each rank, which is "
                "DistributedDataParallel: leave the fsdp_plugin (--use_fsdp) out."
            )

    @classmethod
    def is_asked_by(cls, launch: Launch) -> bool:
        """Return whether a launch shards models, by its kind of run or by a size of the mesh."""
        mesh = launch.launched.get("parallelism", {})
        return super().is_asked_by(launch) or mesh.get("dp_shard_size", 1) > 1

    def with_launch(self, options: Mapping[str, Any]) -> FullyShardedDataParallelPlugin:
        """Return the plugin with options of the launch where the script says nothing."""
        if any(getattr(self, name) is not None for name in _SAME):
            options = {name: value for name, value in options.items() if name not in _SAME}
        return super().with_launch(options)

    def _read_reshard(self, text: str) -> None:
        """Read ``reshard_after_forward`` from a file or a variable, where it may be FSDP1's."""
        lowered = text.strip().lower()
        if lowered.upper() in _STRATEGIES:
            value: bool | int | None = None
            object.__setattr__(self, "sharding_strategy", lowered.upper())
        elif lowered in _WORDS:
            value = _WORDS[lowered]
        elif lowered.isdigit():
            value = int(lowered)
        else:
            raise ValueError(
                f"reshard_after_forward={text!r} must be True, False, or a number of ranks."
            )
        object.__setattr__(self, "reshard_after_forward", value)

    def _read(self, name: str, known: Iterable[str]) -> None:
        """Read an option of FSDP1: a member of torch's enum, its name, or its number from 1."""
        value, known = getattr(self, name), list(known)
        if value is None:
            return
        text = str(getattr(value, "name", value)).strip().upper()
        if text.isdigit() and 1 <= int(text) <= len(known):
            text = known[int(text) - 1]
        if text not in known:
            raise ValueError(
                f"{name}={value!r} is unknown; use one of {known}.{nearest(text, known)}"
            )
        object.__setattr__(self, name, text)

    @property
    def reshard(self) -> bool | int:
        """``reshard_after_forward``, or what ``sharding_strategy`` means by it; True by default."""
        if isinstance(self.reshard_after_forward, (bool, int)):
            return self.reshard_after_forward
        return bool(_STRATEGIES[str(self.sharding_strategy or "FULL_SHARD")])

    @property
    def is_hybrid(self) -> bool:
        """True if the model is sharded within each machine, and replicated over machines."""
        return str(self.sharding_strategy).startswith("HYBRID_SHARD")

    @property
    def offloads(self) -> bool:
        """True if shards are kept in host memory."""
        offload = self.cpu_offload
        if offload is None or isinstance(offload, bool):
            return bool(offload)
        # FSDP1's CPUOffload has the attribute; of FSDP2's policies only one offloads.
        return bool(
            getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy")
        )

    def notes(self) -> list[str]:
        """Return what is done in another way than asked for, for warnings.

        Example:
            >>> from accel_callbacks import FullyShardedDataParallelPlugin
            >>> FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True).notes()
            ['fsdp_version=1 is trained as FSDP2.']
        """
        notes = []
        if str(self.fsdp_version) == "1":
            notes.append("fsdp_version=1 is trained as FSDP2.")
        # An option of no effect asks for nothing where it says what is done anyway.
        idle = [
            f"{option.name}={getattr(self, option.name)!r} ({option.metadata['idle']})"
            for option in fields(self)
            if "idle" in option.metadata
            and getattr(self, option.name) not in (None, option.metadata["usual"])
        ]
        if idle:
            notes.append(f"FSDP2 has no use for these options: {'; '.join(idle)}.")
        return notes


def _check_int(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer.")
    if value < least:
        raise ValueError(f"{name}={value!r} must be at least {least}.")
