"""Options of Megatron-LM, and what each is in the engines of this library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

from accel_callbacks.plugins.base import KwargsHandler
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.option import Block, launched, scripted
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.plugins.parallelism_handlers import TorchTensorParallelConfig
from accel_callbacks.warning import warn

__all__ = ["MEGATRON", "MegatronArrangement", "MegatronLMPlugin", "MegatronRule"]


class MegatronRule(NamedTuple):
    """The rule of one option.

    Args:
        kind: ``"mapped"`` to an engine here, ``"passed on"`` to the script, ``"idle"``, or
            ``"refused"``.
        text: to what, why, or what to do instead.
        unasked: values that ask for nothing, besides None and the default.
    """

    kind: Literal["mapped", "passed on", "idle", "refused"]
    text: str
    unasked: tuple[Any, ...] = ()


def _mapped(text: str) -> MegatronRule:
    return MegatronRule("mapped", text)


def _refused(text: str, *unasked: Any) -> MegatronRule:
    return MegatronRule("refused", text, unasked)


_MODEL = "the model is the script's, and so is this option of it"
_SCHEDULE = "the scheduler is the script's, and steps once an optimizer step"
_GROUPS = "the optimizer is the script's: give it parameter groups"
_EVALUATION = "the loop is the script's, and evaluates where it does"
_STAGES = "stages have about as many parameters each, or prepare_pipeline(split_points=)"
_LOOP = (
    "there is no adapter to the training loop of Megatron-LM: write it into the script's own loop, "
    "and leave the option out"
)
_EXPERTS = "experts are not shared out: leave it out, and each rank has all experts"

_SIZES = (
    *("tp_degree", "pp_degree", "context_parallel_size"),
    *("num_micro_batches", "recompute_num_layers"),
)
_FLAGS = (
    *("sequence_parallelism", "use_distributed_optimizer", "use_custom_fsdp"),
    *("optimizer_cpu_offload", "recompute_activations"),
)
_GRANULARITIES = ("full", "selective")
_METHODS = ("uniform", "block")


# Plugins that arrange the ranks too: their arguments, and what says the same here.
_SHARDS = "use_distributed_optimizer or use_custom_fsdp"
_RIVALS = {
    "parallelism": ("parallelism_config", "tp_degree and context_parallel_size"),
    "fsdp": ("fsdp_plugin", _SHARDS),
    "deepspeed": ("deepspeed_plugin", _SHARDS),
}


class MegatronArrangement(NamedTuple):
    """The arrangement of the ranks of a run for a :class:`MegatronLMPlugin`."""

    parallelism: ParallelismConfig
    fsdp: FullyShardedDataParallelPlugin | None


@dataclass(frozen=True)
class MegatronLMPlugin(KwargsHandler):
    """Options of Megatron-LM, with the names that Accelerate has for them.

    ``Accelerator(megatron_lm_plugin=...)``. Nothing of Megatron-LM is imported: the options choose
    engines of this library, for the loop and the model of the script. What each does is in
    :data:`MEGATRON` and in the docs, "Move from a Megatron-LM config". An option that is None comes
    from ``accel launch``, else it has its default.

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
        >>> plugin.arranged(8).parallelism.get_mesh()
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
        1,
        "processes of tensor parallelism",
        least=1,
        foreign="MEGATRON_LM_TP_DEGREE",
        question="How many processes share each layer?",
        rule=_mapped("ParallelismConfig(tp_size=), by the plan of the model or a proposed one"),
    )
    pp_degree: int | None = launched(
        1,
        "processes of a pipeline",
        least=1,
        foreign="MEGATRON_LM_PP_DEGREE",
        rule=_mapped(
            "ParallelismConfig(pp_size=); prepare() cuts a model at its blocks, and trains it by "
            "the loss of its outputs"
        ),
    )
    use_custom_fsdp: bool | None = launched(
        False,
        "shard with Megatron-LM's own FSDP",
        rule=_mapped("FSDP2 with reshard_after_forward=True, over the same ranks"),
    )
    overlap_cpu_optimizer_d2h_h2d: bool | None = launched(
        False,
        "overlap the copies of an optimizer on the host",
        passed=False,
        idle="FSDP2 copies as it offloads",
    )
    no_load_optim: bool | None = launched(
        False,
        "load no states of the optimizer",
        passed=False,
        idle="accel.load_state(only='models') loads no optimizer",
    )
    eod_mask_loss: bool | None = launched(
        False,
        "mask the loss at the end of a document",
        passed=False,
        idle="the loss is the script's: give such tokens the label -100",
    )
    no_save_optim: bool | None = launched(
        False,
        "save no states of the optimizer",
        passed=False,
        idle="accel.save_model() saves no optimizer, and save_state() does",
    )
    optimizer_cpu_offload: bool | None = launched(
        False,
        "keep the optimizer's states on the host",
        rule=_mapped("cpu_offload of FSDP2; without it, no effect"),
    )
    use_precision_aware_optimizer: bool | None = launched(
        False,
        "choose the types of the optimizer's states",
        passed=False,
        idle="the optimizer is the script's, with its types",
    )
    decoder_last_pipeline_num_layers: int | None = launched(
        None, "layers of the last stage of the pipeline", least=1, passed=False, idle=_STAGES
    )
    recompute_granularity: str | None = launched(
        None,
        "what is computed twice",
        choices=_GRANULARITIES,
        rule=_mapped('activation checkpointing: of all blocks, or "selective"'),
    )
    recompute_method: str | None = launched(
        None,
        "which layers are computed twice",
        choices=_METHODS,
        rule=_mapped("read with recompute_granularity full, where both are all blocks"),
    )
    recompute_num_layers: int | None = launched(
        None,
        "layers of a unit that is computed twice",
        least=1,
        rule=_mapped(
            "read with recompute_granularity full, where each block is computed again by itself"
        ),
    )
    attention_backend: Any = launched(
        None,
        "backend of attention, such as flash",
        kind="str",
        passed=False,
        idle="choose it where the model is built: attn_implementation",
    )
    expert_model_parallel_size: int | None = launched(
        None, "processes that share the experts", least=1, passed=False, rule=_refused(_EXPERTS, 1)
    )
    context_parallel_size: int | None = launched(
        None,
        "processes of context parallelism",
        least=1,
        rule=_mapped(
            "ParallelismConfig(cp_size=); the loop wraps forward and backward in "
            "accel.maybe_context_parallel()"
        ),
    )
    attention_dropout: float | None = launched(
        None, "dropout in attention", least=0, most=1, passed=False, idle=_MODEL
    )
    hidden_dropout: float | None = launched(
        None, "dropout in layers", least=0, most=1, passed=False, idle=_MODEL
    )
    attention_softmax_in_fp32: bool | None = launched(
        False, "compute the softmax of attention in fp32", passed=False, idle=_MODEL
    )
    expert_tensor_parallel_size: int | None = launched(
        None, "tensor parallelism in experts", least=1, passed=False, rule=_refused(_EXPERTS, 1)
    )
    calculate_per_token_loss: bool | None = launched(
        False,
        "take the mean loss over tokens",
        passed=False,
        idle=(
            "the loss is the script's: accel.backward(loss_sum, normalizer=tokens) averages over "
            "tokens"
        ),
    )
    use_rotary_position_embeddings: bool | None = launched(
        False, "use rotary position embeddings", passed=False, idle=_MODEL
    )
    num_micro_batches: int | None = launched(
        None,
        "micro-batches of a batch",
        least=1,
        foreign="MEGATRON_LM_NUM_MICRO_BATCHES",
        rule=_mapped(
            "gradient_accumulation_steps: batches of one optimizer step, in accel.accumulate()"
        ),
    )
    gradient_clipping: float | None = launched(
        1.0,
        "largest norm of the gradients; 0 for none",
        least=0,
        rule=MegatronRule(
            "passed on",
            "the loop clips: accel.clip_grad_norm_(model.parameters(), "
            "accel.state.megatron_lm_plugin.gradient_clipping)",
            (0,),
        ),
    )
    sequence_parallelism: bool | None = launched(
        False,
        "shard sequences",
        question="Share sequences between the blocks too?",
        rule=_mapped(
            "the proposed plan cuts sequences between the blocks too; without tp_degree, no effect"
        ),
    )
    recompute_activations: bool | None = launched(
        False,
        "compute selected activations twice",
        question="Compute activations twice, but for products and attention?",
        rule=_mapped('activation checkpointing, "selective"'),
    )
    use_distributed_optimizer: bool | None = launched(
        False,
        "shard the optimizer's states",
        foreign="MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER",
        question="Shard the optimizer's states over the others (FSDP2)?",
        rule=_mapped("FSDP2 with reshard_after_forward=False, over the ranks with different data"),
    )
    pipeline_model_parallel_split_rank: int | None = scripted(None, idle=_STAGES)
    num_layers_per_virtual_pipeline_stage: int | None = scripted(None, idle=_STAGES)
    is_train_batch_min: bool = scripted(True, idle="each loader has its own batch size")
    train_iters: int | None = scripted(
        None, idle="the loop is the script's, and ends where it does"
    )
    train_samples: int | None = scripted(
        None, idle="the loop is the script's, and ends where it does"
    )
    weight_decay_incr_style: str = scripted("constant", idle=_GROUPS)
    start_weight_decay: float | None = scripted(None, idle=_GROUPS)
    end_weight_decay: float | None = scripted(None, idle=_GROUPS)
    lr_decay_style: str = scripted("linear", idle=_SCHEDULE)
    lr_decay_iters: int | None = scripted(None, idle=_SCHEDULE)
    lr_decay_samples: int | None = scripted(None, idle=_SCHEDULE)
    lr_warmup_iters: int | None = scripted(None, idle=_SCHEDULE)
    lr_warmup_samples: int | None = scripted(None, idle=_SCHEDULE)
    lr_warmup_fraction: float | None = scripted(None, idle=_SCHEDULE)
    min_lr: float = scripted(0, idle=_SCHEDULE)
    consumed_samples: Any = scripted(
        None, idle="loaders go on at the exact sample after accel.load_state()"
    )
    no_wd_decay_cond: Callable[..., Any] | None = scripted(None, idle=_GROUPS)
    scale_lr_cond: Callable[..., Any] | None = scripted(None, idle=_GROUPS)
    lr_mult: float = scripted(1.0, idle=_GROUPS)
    megatron_dataset_flag: bool = scripted(
        False,
        rule=_refused(
            "its data sets come from its own loaders: make a Dataset, and prepare its DataLoader",
            False,
        ),
    )
    seq_length: int | None = scripted(None, idle="sequences are as long as the loader makes them")
    encoder_seq_length: int | None = scripted(
        None, idle="sequences are as long as the loader makes them"
    )
    decoder_seq_length: int | None = scripted(
        None, idle="sequences are as long as the loader makes them"
    )
    tensorboard_dir: Any = scripted(
        None, idle='Accelerator(log_with="tensorboard", project_dir=...) logs there'
    )
    set_all_logging_options: bool = scripted(False, idle="callbacks log what is measured")
    eval_iters: int = scripted(100, idle=_EVALUATION)
    eval_interval: int = scripted(1000, idle=_EVALUATION)
    return_logits: bool = scripted(False, idle="a model returns what its forward does")
    custom_train_step_class: Any = scripted(None, rule=_refused(_LOOP))
    custom_train_step_kwargs: Mapping[str, Any] | None = scripted(None, rule=_refused(_LOOP))
    custom_model_provider_function: Callable[..., Any] | None = scripted(None, rule=_refused(_LOOP))
    custom_prepare_model_function: Callable[..., Any] | None = scripted(None, rule=_refused(_LOOP))
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = scripted(
        None, rule=_refused(_LOOP)
    )
    custom_get_batch_function: Callable[..., Any] | None = scripted(None, rule=_refused(_LOOP))
    custom_loss_function: Callable[..., Any] | None = scripted(None, rule=_refused(_LOOP))
    other_megatron_args: Mapping[str, Any] | None = scripted(
        None, idle="there is no Megatron-LM that would read them"
    )

    def __post_init__(self) -> None:
        for name, value in self._asked("refused").items():
            raise ValueError(f"MegatronLMPlugin({name}={value!r}): {MEGATRON[name].text}.")
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False.")
        for name, known in (
            ("recompute_granularity", _GRANULARITIES),
            ("recompute_method", _METHODS),
        ):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {known}.")

    def _asked(self, *kinds: str) -> dict[str, Any]:
        """Return the options of these kinds that ask for something."""
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if MEGATRON[option.name].kind in kinds
            and getattr(self, option.name) is not None
            and getattr(self, option.name) not in (option.default, *MEGATRON[option.name].unasked)
        }

    def notes(self) -> str:
        """Return what is left to the script, one option after the other, for a warning.

        Returns:
            An empty string if there is nothing.

        Example:
            >>> from accel_callbacks import MegatronLMPlugin
            >>> MegatronLMPlugin(tp_degree=2).notes()
            ''
            >>> MegatronLMPlugin(seq_length=512).notes().partition(": ")[2]
            'seq_length=512 (sequences are as long as the loader makes them).'
        """
        notes = [f"{n}={v!r} ({MEGATRON[n].text})" for n, v in self._left().items()]
        start = "Megatron-LM's loop is not run, and these options do nothing by themselves: "
        return f"{start}{'; '.join(notes)}." if notes else ""

    def _left(self) -> dict[str, Any]:
        unused = self._asked("idle", "passed on")
        whole_layers = (self.tp_degree or 1) == 1
        if self.sequence_parallelism and whole_layers:
            unused["sequence_parallelism"] = True
        if self.optimizer_cpu_offload and whole_layers and not self._shards:
            unused["optimizer_cpu_offload"] = True
        if self.recompute_granularity != "full":
            names = ("recompute_method", "recompute_num_layers")
            unused |= {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        return unused

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

        Raises:
            ValueError: the degrees do not divide the number of ranks.
        """
        parallelism, fsdp = self.arranged(world_size)
        if notes := self.notes():
            warn(notes)
        return {"parallelism": parallelism, **({} if fsdp is None else {"fsdp": fsdp})}

    def arranged(self, world_size: int) -> MegatronArrangement:
        """Return the arrangement of this many ranks.

        Layers that are cut have no replicas, so their data axis is sharded in any case.

        Args:
            world_size: number of ranks.

        Raises:
            ValueError: the degrees do not divide the number of ranks.

        Example:
            >>> from accel_callbacks import MegatronLMPlugin
            >>> MegatronLMPlugin().arranged(2).parallelism.get_mesh()
            (('dp_replicate',), (2,))
        """
        tp, cp, pp = self.tp_degree or 1, self.context_parallel_size or 1, self.pp_degree or 1
        group = tp * cp * pp
        if world_size % group:
            stages = f"pp_degree={pp}, " if pp > 1 else ""
            raise ValueError(
                f"MegatronLMPlugin(tp_degree={tp}, {stages}context_parallel_size={cp}) arranges "
                f"groups of {group} ranks, and this run has {world_size}: give degrees whose "
                f"product divides {world_size}, or `accel launch --num_processes {group}`."
            )
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
        return MegatronArrangement(parallelism, self._sharding() if shards else None)

    def _sharding(self) -> FullyShardedDataParallelPlugin:
        return FullyShardedDataParallelPlugin(
            reshard_after_forward=bool(self.use_custom_fsdp),
            cpu_offload=bool(self.optimizer_cpu_offload),
        )

    def filled(self) -> MegatronLMPlugin:
        """Return the options with their defaults in place of None, for scripts that read them.

        Example:
            >>> from accel_callbacks import MegatronLMPlugin
            >>> MegatronLMPlugin().filled().gradient_clipping
            1.0
        """
        usual: dict[str, Any] = {
            **dict.fromkeys(_SIZES, 1),
            **dict.fromkeys(_FLAGS, False),
            "gradient_clipping": 1.0,
        }
        left = {name: value for name, value in usual.items() if getattr(self, name) is None}
        return replace(self, **left)


#: What is done with each option.
MEGATRON: Mapping[str, MegatronRule] = {
    option.name: option.metadata.get("rule") or MegatronRule("idle", option.metadata["idle"])
    for option in fields(MegatronLMPlugin)
}


def _check_size(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer.")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1.")
