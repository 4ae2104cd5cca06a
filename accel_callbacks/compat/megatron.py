"""Options of Megatron-LM, and what each is in the engines of this library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, make_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

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
#: Why an option is refused that asks for something.
REFUSAL = (
    "experts are not shared out, and the loop and the data sets of Megatron-LM are not run: leave "
    "it out; the docs, 'Move from a Megatron-LM config', have what serves instead"
)
_CLIP = (
    "the loop clips: accel.clip_grad_norm_(model.parameters(), "
    "accel.state.megatron_lm_plugin.gradient_clipping)"
)
#: Options without effect that a config file may have, and the kinds of their values.
_IDLE_KEYS = {
    "overlap_cpu_optimizer_d2h_h2d": "bool",
    "no_load_optim": "bool",
    "eod_mask_loss": "bool",
    "no_save_optim": "bool",
    "use_precision_aware_optimizer": "bool",
    "decoder_last_pipeline_num_layers": "int",
    "attention_backend": "str",
    "attention_dropout": "float",
    "hidden_dropout": "float",
    "attention_softmax_in_fp32": "bool",
    "calculate_per_token_loss": "bool",
    "use_rotary_position_embeddings": "bool",
}
#: All options without effect; the other ones are in scripts alone.
WITHOUT_EFFECT = (
    *_IDLE_KEYS,
    *("pipeline_model_parallel_split_rank", "num_layers_per_virtual_pipeline_stage"),
    *("is_train_batch_min", "train_iters", "train_samples", "weight_decay_incr_style"),
    *("start_weight_decay", "end_weight_decay", "lr_decay_style", "lr_decay_iters"),
    *("lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
    *("min_lr", "consumed_samples", "no_wd_decay_cond", "scale_lr_cond", "lr_mult"),
    *("seq_length", "encoder_seq_length", "decoder_seq_length", "tensorboard_dir"),
    *("set_all_logging_options", "eval_iters", "eval_interval", "return_logits"),
    "other_megatron_args",
)
_EXPERTS = ("expert_model_parallel_size", "expert_tensor_parallel_size")
#: Options that are refused unless they ask for nothing.
REFUSED = (
    *_EXPERTS,
    *("megatron_dataset_flag", "custom_train_step_class", "custom_train_step_kwargs"),
    *("custom_model_provider_function", "custom_prepare_model_function"),
    *("custom_megatron_datasets_provider_function", "custom_get_batch_function"),
    "custom_loss_function",
)
#: Plugins that arrange the ranks too, by their group: their arguments.
_RIVALS = {
    "parallelism": "parallelism_config",
    "fsdp": "fsdp_plugin",
    "deepspeed": "deepspeed_plugin",
}
_DEGREES = ("tp_degree", "pp_degree", "context_parallel_size")


def _declare_unmapped() -> type[Any]:
    """Return a dataclass with the options that no engine reads, which are keywords."""
    declarations: dict[str, Any] = {
        name: field(default=None) for name in (*WITHOUT_EFFECT, *REFUSED)
    }
    for name, kind in _IDLE_KEYS.items():
        default = False if kind == "bool" else None
        declarations[name] = launched(default, "has no effect", kind=kind, passed=False, idle=IDLE)
    for name in _EXPERTS:
        declarations[name] = launched(
            None, "only 1", kind="int", least=1, passed=False, refused=REFUSAL
        )
    return make_dataclass(
        "Unmapped",
        [(name, Any, declaration) for name, declaration in declarations.items()],
        bases=(KwargsHandler,),
        frozen=True,
        kw_only=True,
    )


if TYPE_CHECKING:
    _Unmapped = KwargsHandler
else:
    _Unmapped = _declare_unmapped()


@dataclass(frozen=True)
class MegatronLMPlugin(_Unmapped):
    """Options of Megatron-LM, with the names that Accelerate has for them.

    ``Accelerator(megatron_lm_plugin=...)``. Nothing of Megatron-LM is imported: the options choose
    engines of this library, for the loop and the model of the script. What each does, and what
    serves in place of those without effect, is in the docs, "Move from a Megatron-LM config". An
    option that is None comes from ``accel launch``, else it has its default.

    All other options of Accelerate's plugin are keywords: those without effect are named in a
    warning, and those that ask for experts, data sets or a loop are refused.

    Args:
        tp_degree: ranks that share each layer, 1 by default.
        pp_degree: ranks of a pipeline, of which each has some layers; 1 by default.
        use_custom_fsdp: shard weights, gradients and optimizer states; off by default.
        optimizer_cpu_offload: keep shards and optimizer states in host memory; off by default.
        recompute_granularity: what is computed again in backward: ``"full"`` for all of a block,
            ``"selective"`` for all but matrix products and attention; nothing by default.
        recompute_method: ``"uniform"`` or ``"block"``, with one meaning here.
        recompute_num_layers: has one meaning here.
        context_parallel_size: ranks that share each sequence, 1 by default.
        num_micro_batches: batches of one optimizer step, 1 by default.
        gradient_clipping: for the loop, which clips; 1.0 by default.
        sequence_parallelism: cut sequences between the blocks over the ranks of ``tp_degree``; off
            by default.
        recompute_activations: the same as ``recompute_granularity="selective"``.
        use_distributed_optimizer: shard optimizer states, and weights outside of forward and
            backward, over the ranks with different data; off by default.

    Raises:
        ValueError: an option has an invalid value, or asks for what is not there, such as
            ``expert_model_parallel_size=2``.
        TypeError: there is no such option.

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
    # Accelerate has one without effect here: positions behind it would be other options.
    _: KW_ONLY
    optimizer_cpu_offload: bool | None = launched(False, "keep the optimizer's states on the host")
    recompute_granularity: str | None = launched(
        None, "what is computed twice", choices=("full", "selective")
    )
    recompute_method: str | None = launched(
        None, "which layers are computed twice", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = launched(
        1, "layers of a unit that is computed twice", least=1
    )
    context_parallel_size: int | None = launched(1, "processes of context parallelism", least=1)
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

    def __post_init__(self) -> None:
        for name in REFUSED:
            value = getattr(self, name)
            if value is True or value not in (None, False, 1):
                raise ValueError(f"MegatronLMPlugin({name}={value!r}): {REFUSAL}.")
        for option in options_of(type(self)):
            value = getattr(self, option.attribute)
            if value is None or option.idle:
                continue
            try:
                value = option.read(value)  # as one of a config file
            except ValueError as error:
                raise ValueError(f"{option.attribute}={value!r} {error}.") from None
            object.__setattr__(self, option.attribute, value)

    @classmethod
    def check_launch(cls, block: Mapping[str, Any], processes: int) -> None:
        """Raise SettingsError unless the degrees divide the processes of a launch."""
        _group_size({name: block[f"{cls.block.prefix}{name}"] for name in _DEGREES}, processes)

    def notes(self) -> str:
        """Return what is left to the script, for a warning; empty if there is nothing.

        Example:
            >>> from accel_callbacks import MegatronLMPlugin
            >>> MegatronLMPlugin(tp_degree=2).notes()
            ''
            >>> MegatronLMPlugin(seq_length=512).notes().partition(":")[0]
            "Megatron-LM's loop is not run, and these options do nothing by themselves"
        """
        cuts_layers = (self.tp_degree or 1) > 1
        has_effect = {
            "sequence_parallelism": cuts_layers,
            "optimizer_cpu_offload": cuts_layers or self._shards,
            "recompute_method": self.recompute_granularity == "full",
        }
        names = [*WITHOUT_EFFECT, *(name for name, has in has_effect.items() if not has)]
        notes = [
            f"{name}={value!r}"
            for name in names
            if (value := getattr(self, name)) is not None and value is not False
        ]
        if self.gradient_clipping:
            notes.append(f"gradient_clipping={self.gradient_clipping!r} ({_CLIP})")
        start = "Megatron-LM's loop is not run, and these options do nothing by themselves: "
        return f"{start}{', '.join(notes)}: {IDLE}." if notes else ""

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
        for group, name in _RIVALS.items():
            if group in beside:
                raise ValueError(
                    f"{name} (an argument, or from the launch) and the options of Megatron-LM both "
                    "arrange the ranks: leave it out, and give tp_degree, context_parallel_size or "
                    "use_distributed_optimizer; or leave those of Megatron-LM out."
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
        degrees = {name: getattr(self, name) or 1 for name in _DEGREES}
        tp, pp, cp = degrees.values()
        data = world_size // _group_size(degrees, world_size)
        if notes := self.notes():
            warn(notes)
        # FSDP shards over the ranks of one sequence too, since each has all weights.
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


def _group_size(degrees: Mapping[str, int], ranks: int) -> int:
    """Return how many ranks share a batch; raise SettingsError unless groups of them are all."""
    size = math.prod(degrees.values())
    if ranks % size:
        shown = ", ".join(f"{name}={degree}" for name, degree in degrees.items())
        raise SettingsError(
            f"{shown} of Megatron-LM arrange groups of {size} ranks, and there are {ranks}: give "
            f"degrees whose product divides {ranks}, or `accel launch --num_processes {size}`"
        )
    return size
