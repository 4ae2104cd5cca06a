"""Options of Megatron-LM, and what each is in the engines of this library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from accel_callbacks.plugins.base import KwargsHandler
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.option import Block, SettingsError, launched, options_of
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.plugins.parallelism_handlers import TorchTensorParallelConfig
from checkpoint_io.warning import warn

__all__ = ["MegatronLMPlugin"]

#: Why an option has no effect.
IDLE = (
    "the model, the loop and its optimizer are the script's; the docs, 'Move from a Megatron-LM "
    "config', have what serves instead"
)
_NONE = "has no effect"
_IDLE: dict[str, Any] = {"passed": False, "idle": IDLE}
_CLIP = (
    "the loop clips: accel.clip_grad_norm_(model.parameters(), "
    "accel.state.megatron_lm_plugin.gradient_clipping)"
)
_LOOP = (
    "there is no adapter to the training loop of Megatron-LM: write it into the script's own loop, "
    "and leave the option out"
)
_EXPERTS = "experts are not shared out: leave it out, and each rank has all experts"
_DATASETS = "its data sets come from its own loaders: make a Dataset, and prepare its DataLoader"
# Plugins that arrange the ranks too: their arguments, and what says the same here.
_SHARDS = "use_distributed_optimizer or use_custom_fsdp"
_RIVALS = {
    "parallelism": ("parallelism_config", "tp_degree and context_parallel_size"),
    "fsdp": ("fsdp_plugin", _SHARDS),
    "deepspeed": ("deepspeed_plugin", _SHARDS),
}
#: Why an option is refused that asks for something.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), _EXPERTS),
    "megatron_dataset_flag": _DATASETS,
    **dict.fromkeys(("custom_train_step_class", "custom_train_step_kwargs"), _LOOP),
    **dict.fromkeys(("custom_model_provider_function", "custom_prepare_model_function"), _LOOP),
    **dict.fromkeys(("custom_get_batch_function", "custom_loss_function"), _LOOP),
    "custom_megatron_datasets_provider_function": _LOOP,
}
_DEGREES = ("tp_degree", "pp_degree", "context_parallel_size")


@dataclass(frozen=True)
class MegatronLMPlugin(KwargsHandler):
    """Options of Megatron-LM, with the names that Accelerate has for them.

    ``Accelerator(megatron_lm_plugin=...)``. Nothing of Megatron-LM is imported: the options choose
    engines of this library, for the loop and the model of the script. What each does, and what
    serves in place of those without effect, is in the docs, "Move from a Megatron-LM config". An
    option that is None comes from ``accel launch``, else it has its default.

    Args:
        tp_degree: ranks that share each layer, 1 by default.
        pp_degree: ranks of a pipeline, of which each has some layers; 1 by default.
        use_custom_fsdp: shard weights, gradients and optimizer states; off by default.
        overlap_cpu_optimizer_d2h_h2d: has no effect.
        no_load_optim: has no effect.
        eod_mask_loss: has no effect.
        no_save_optim: has no effect.
        optimizer_cpu_offload: keep shards and optimizer states in host memory; off by default.
        use_precision_aware_optimizer: has no effect.
        decoder_last_pipeline_num_layers: has no effect.
        recompute_granularity: what is computed again in backward: ``"full"`` for all of a block,
            ``"selective"`` for all but matrix products and attention; nothing by default.
        recompute_method: ``"uniform"`` or ``"block"``, with one meaning here.
        recompute_num_layers: has one meaning here.
        attention_backend: has no effect.
        expert_model_parallel_size: 1.
        context_parallel_size: ranks that share each sequence, 1 by default.
        attention_dropout: has no effect.
        hidden_dropout: has no effect.
        attention_softmax_in_fp32: has no effect.
        expert_tensor_parallel_size: 1.
        calculate_per_token_loss: has no effect.
        use_rotary_position_embeddings: has no effect.
        num_micro_batches: batches of one optimizer step, 1 by default.
        gradient_clipping: for the loop, which clips; 1.0 by default.
        sequence_parallelism: cut sequences between the blocks over the ranks of ``tp_degree``; off
            by default.
        recompute_activations: the same as ``recompute_granularity="selective"``.
        use_distributed_optimizer: shard optimizer states, and weights outside of forward and
            backward, over the ranks with different data; off by default.
        pipeline_model_parallel_split_rank: has no effect.
        num_layers_per_virtual_pipeline_stage: has no effect.
        is_train_batch_min: has no effect.
        train_iters: has no effect.
        train_samples: has no effect.
        weight_decay_incr_style: has no effect.
        start_weight_decay: has no effect.
        end_weight_decay: has no effect.
        lr_decay_style: has no effect.
        lr_decay_iters: has no effect.
        lr_decay_samples: has no effect.
        lr_warmup_iters: has no effect.
        lr_warmup_samples: has no effect.
        lr_warmup_fraction: has no effect.
        min_lr: has no effect.
        consumed_samples: has no effect.
        no_wd_decay_cond: has no effect.
        scale_lr_cond: has no effect.
        lr_mult: has no effect.
        megatron_dataset_flag: False.
        seq_length: has no effect.
        encoder_seq_length: has no effect.
        decoder_seq_length: has no effect.
        tensorboard_dir: has no effect.
        set_all_logging_options: has no effect.
        eval_iters: has no effect.
        eval_interval: has no effect.
        return_logits: has no effect.
        custom_train_step_class: None.
        custom_train_step_kwargs: None.
        custom_model_provider_function: None.
        custom_prepare_model_function: None.
        custom_megatron_datasets_provider_function: None.
        custom_get_batch_function: None.
        custom_loss_function: None.
        other_megatron_args: has no effect.

    Raises:
        ValueError: an option asks for what is not there, such as
            ``expert_model_parallel_size=2``, or has an unknown
            value.
        TypeError: an option has another type.

    Example:
        >>> from accel_callbacks import MegatronLMPlugin
        >>> plugin = MegatronLMPlugin(tp_degree=2, use_distributed_optimizer=True)
        >>> plugin.arrange(8)["parallelism"].get_mesh()
        (('dp_shard', 'tp'), (4, 2))
    """

    block: ClassVar = Block(
        "megatron_lm_config",
        "Megatron-LM",
        prefix="megatron_lm_",
        variables="ACCEL_MEGATRON_LM_",
        valued=True,
    )

    tp_degree: int | None = launched(
        1, "processes of tensor parallelism", least=1, foreign="MEGATRON_LM_TP_DEGREE"
    )
    pp_degree: int | None = launched(
        1, "processes of a pipeline", least=1, foreign="MEGATRON_LM_PP_DEGREE"
    )
    use_custom_fsdp: bool | None = launched(False, "shard with Megatron-LM's own FSDP")
    overlap_cpu_optimizer_d2h_h2d: bool | None = launched(False, _NONE, **_IDLE)
    no_load_optim: bool | None = launched(False, _NONE, **_IDLE)
    eod_mask_loss: bool | None = launched(False, _NONE, **_IDLE)
    no_save_optim: bool | None = launched(False, _NONE, **_IDLE)
    optimizer_cpu_offload: bool | None = launched(False, "keep the optimizer's states on the host")
    use_precision_aware_optimizer: bool | None = launched(False, _NONE, **_IDLE)
    decoder_last_pipeline_num_layers: int | None = launched(None, _NONE, least=1, **_IDLE)
    recompute_granularity: str | None = launched(
        None, "what is computed twice", choices=("full", "selective")
    )
    recompute_method: str | None = launched(
        None, "which layers are computed twice", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = launched(
        1, "layers of a unit that is computed twice", least=1
    )
    attention_backend: Any = launched(None, _NONE, kind="str", **_IDLE)
    expert_model_parallel_size: int | None = launched(
        None, "only 1", least=1, passed=False, refused=_EXPERTS
    )
    context_parallel_size: int | None = launched(1, "processes of context parallelism", least=1)
    attention_dropout: float | None = launched(None, _NONE, least=0, most=1, **_IDLE)
    hidden_dropout: float | None = launched(None, _NONE, least=0, most=1, **_IDLE)
    attention_softmax_in_fp32: bool | None = launched(False, _NONE, **_IDLE)
    expert_tensor_parallel_size: int | None = launched(
        None, "only 1", least=1, passed=False, refused=_EXPERTS
    )
    calculate_per_token_loss: bool | None = launched(False, _NONE, **_IDLE)
    use_rotary_position_embeddings: bool | None = launched(False, _NONE, **_IDLE)
    num_micro_batches: int | None = launched(
        1, "micro-batches of a batch", least=1, foreign="MEGATRON_LM_NUM_MICRO_BATCHES"
    )
    gradient_clipping: float | None = launched(
        1.0, "largest norm of the gradients; 0 for none", least=0
    )
    sequence_parallelism: bool | None = launched(False, "shard sequences")
    recompute_activations: bool | None = launched(False, "compute selected activations twice")
    use_distributed_optimizer: bool | None = launched(
        False,
        "shard the optimizer's states",
        foreign="MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER",
    )
    # Those that no launch gives: without effect, or refused.
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: Any = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: Any = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: Mapping[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, reason in REFUSED.items():
            value = getattr(self, name)
            if value is True or value not in (None, False, 1):
                raise ValueError(f"MegatronLMPlugin({name}={value!r}): {reason}.")
        for option in options_of(type(self)):
            name, value = option.attribute, getattr(self, option.attribute)
            if value is None or option.idle:
                continue
            if option.kind == "bool" and not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be True or False.")
            if option.kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r} must be an integer.")
            if option.kind == "int" and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
            if option.choices and value not in option.choices:
                raise ValueError(f"{name}={value!r} is unknown; use one of {option.choices}.")

    @classmethod
    def check_launch(cls, block: Mapping[str, Any], processes: int) -> None:
        """Raise SettingsError unless the degrees divide the processes of a launch."""
        degrees = {f"megatron_lm_{name}": block[f"megatron_lm_{name}"] for name in _DEGREES}
        group = math.prod(degrees.values())
        if processes % group:
            shown = ", ".join(f"{name}: {degree}" for name, degree in degrees.items())
            raise SettingsError(
                f"megatron_lm_config: {shown} arrange groups of {group} processes, and this launch "
                f"has {processes}: give degrees whose product divides {processes}, or "
                f"--num_processes {group}"
            )

    def notes(self) -> str:
        """Return what is left to the script, for a warning; empty if there is nothing.

        Example:
            >>> from accel_callbacks import MegatronLMPlugin
            >>> MegatronLMPlugin(tp_degree=2).notes()
            ''
            >>> MegatronLMPlugin(seq_length=512).notes().partition(":")[0]
            "Megatron-LM's loop is not run, and these options do nothing by themselves"
        """
        notes = [f"{name}={value!r}" for name, value in self._idle_options().items()]
        if self.gradient_clipping:
            notes.append(f"gradient_clipping={self.gradient_clipping!r} ({_CLIP})")
        start = "Megatron-LM's loop is not run, and these options do nothing by themselves: "
        return f"{start}{', '.join(notes)}: {IDLE}." if notes else ""

    def _idle_options(self) -> dict[str, Any]:
        """Return the options without effect that ask for something."""
        names = [one.name for one in fields(self) if not one.metadata]
        names += [option.attribute for option in options_of(type(self)) if option.idle]
        whole_layers = (self.tp_degree or 1) == 1
        if whole_layers:
            names.append("sequence_parallelism")
        if whole_layers and not self._shards:
            names.append("optimizer_cpu_offload")
        if self.recompute_granularity != "full":
            names += ["recompute_method", "recompute_num_layers"]
        usual = type(self)().filled()
        return {
            name: getattr(self, name)
            for name in names
            if getattr(self, name) not in (None, getattr(usual, name))
        }

    @property
    def _shards(self) -> bool:
        return bool(self.use_distributed_optimizer or self.use_custom_fsdp)

    @property
    def activation_checkpointing(self) -> bool | str:
        """Policy of activation checkpointing; False for none."""
        if self.recompute_granularity == "full":
            return True
        selective = self.recompute_granularity == "selective" or self.recompute_activations
        return "selective" if selective else False

    def configure(self, config: Any, beside: Mapping[str, Any]) -> Any:
        """Return the options of the run, with ``num_micro_batches`` batches for a step.

        Raises:
            ValueError: other plugins arrange the ranks too, or ``gradient_accumulation_steps`` is
                another number above 1.
        """
        for group, (name, instead) in _RIVALS.items():
            if group in beside:
                raise ValueError(
                    f"{name} (an argument, or from the launch) and the options of Megatron-LM both "
                    f"arrange the ranks: leave it out, and give {instead}; or leave those of "
                    "Megatron-LM out."
                )
        steps, chosen = self.num_micro_batches, config.gradient_accumulation_steps
        if steps is None or steps in (1, chosen):
            return config
        name = "gradient_accumulation_steps"
        if chosen > 1:
            raise ValueError(
                f"{name}={chosen} ({config.origins.get(name, 'default')}) and num_micro_batches="
                f"{steps} of Megatron-LM both say how many batches make one optimizer step: give "
                "one of them."
            )
        origins = {**config.origins, name: "num_micro_batches of Megatron-LM"}
        return replace(config, gradient_accumulation_steps=steps, origins=origins)

    def arrange(self, world_size: int) -> Mapping[str, Any]:
        """Return the plugins of the engines that the options choose; warn of those without effect.

        Layers that are cut have no replicas, so their data axis is sharded in any case.

        Args:
            world_size: number of ranks.

        Raises:
            ValueError: the degrees do not divide the number of ranks.

        Example:
            >>> from accel_callbacks import MegatronLMPlugin
            >>> MegatronLMPlugin().arrange(2)["parallelism"].get_mesh()
            (('dp_replicate',), (2,))
        """
        tp, pp, cp = (getattr(self, name) or 1 for name in _DEGREES)
        group = tp * cp * pp
        if world_size % group:
            stages = f"pp_degree={pp}, " if pp > 1 else ""
            raise ValueError(
                f"MegatronLMPlugin(tp_degree={tp}, {stages}context_parallel_size={cp}) arranges "
                f"groups of {group} ranks, and this run has {world_size}: give degrees whose "
                f"product divides {world_size}, or `accel launch --num_processes {group}`."
            )
        if notes := self.notes():
            warn(notes)
        data = world_size // group
        shards = data * cp > 1 and (self._shards or tp * pp > 1)
        words = "proposed_sequence" if self.sequence_parallelism else "proposed"
        parallelism = ParallelismConfig(
            dp_replicate_size=1 if shards else data,
            dp_shard_size=data if shards else 1,
            tp_size=tp,
            pp_size=pp,
            cp_size=cp,
            sp_size=1,
            tp_handler=TorchTensorParallelConfig(plan=words) if tp > 1 else None,
        )
        if not shards:
            return {"parallelism": parallelism}
        fsdp = FullyShardedDataParallelPlugin(
            reshard_after_forward=bool(self.use_custom_fsdp),
            cpu_offload=bool(self.optimizer_cpu_offload),
        )
        return {"parallelism": parallelism, "fsdp": fsdp}

    def filled(self) -> MegatronLMPlugin:
        """Return the options with their defaults in place of None, for scripts that read them.

        Example:
            >>> from accel_callbacks import MegatronLMPlugin
            >>> MegatronLMPlugin().filled().gradient_clipping
            1.0
        """
        return self.with_launch({one.attribute: one.default for one in options_of(type(self))})
