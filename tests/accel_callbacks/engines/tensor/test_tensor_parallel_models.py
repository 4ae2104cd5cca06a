"""Models of transformers, cut by their own plans or a proposed one, against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from accel_callbacks import Accelerator, ParallelismConfig, TorchTensorParallelConfig
from accel_callbacks.engines.tensor.plan import plan_of, propose_plan
from tests.support.bound import BOUND
from tests.support.rounding import reordered
from tests.support.sharded import quiet

# Slow, because each process imports transformers; test_tensor_parallel.py has layers of their kind.
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*non-ascending order"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WORDS = 48
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {
    **SIZES,
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
}
#: What a plan has that no other one here has, and the sizes of a model with it.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("moe_tp_experts", "Mixtral", {**GROUPED, "num_local_experts": 4}),
    "deepseek_v2": (
        "mla_kv_a_proj", "DeepseekV2",
        {**LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "longcat_flash": (
        "moe_identity_expert",
        "LongcatFlash",
        {
            **LATENT, "num_layers": 1, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 8,
            "moe_topk": 2, "zero_expert_num": 1, "head_dim": 4,
        },
    ),
    "llama4": (
        "packed_rowwise",
        "Llama4",
        {
            **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 1,
            "intermediate_size_mlp": 24, "moe_layers": [1], "attention_chunk_size": 8,
        },
    ),
    "olmoe": (
        "rowwise_split_input", "Olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}
    ),
    "granite_swa": ("local_params", "GraniteSWA", GROUPED),
    "inkling": (
        "all_reduce",
        "Inkling",
        {
            **GROUPED, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1,
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 4,
        },
    ),
    "gpt_neox": ("colwise_by_head", "GPTNeoX", SIZES),
    "apertus": ("replicated_with_grad_allreduce", "Apertus", GROUPED),
}  # fmt: skip


# Models without a plan, and a style of the proposed one.
PROPOSED = {"gpt2": "packed_colwise:3", "t5": "colwise"}


def model_of(kind: str) -> Any:
    import transformers

    from tests.support.known_models import BUILDERS

    if kind in MODELS:
        _, name, sizes = MODELS[kind]
        suffix = "TextConfig" if name in ("Llama4", "Inkling") else "Config"
        config = getattr(transformers, name + suffix)(**sizes, use_cache=False)
        model = getattr(transformers, name + "ForCausalLM")(config)
    else:
        model = BUILDERS[kind]()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # zeros and ones would hide mistakes
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + (parameter.dim() == 1))
    return model


def corrected_plan(model: Any) -> dict[str, Any]:
    """Return the plan of a model; that of Inkling takes gate and up, in one, for one."""
    plan = plan_of(model) or propose_plan(model)
    name = "model.layers.*.mlp.experts.gate_up_proj"
    if plan.get(name) == "colwise":
        del plan["model.embed_tokens"]  # which has a norm
        plan[name] = "packed_colwise"
    return plan


def prepared(kind: str, sizes: dict[str, int]) -> tuple[Accelerator, Any, Any]:
    quiet()
    model = model_of(kind)
    options: dict[str, Any] = {}
    if sizes:
        plan = corrected_plan(model)
        assert (MODELS[kind][0] if kind in MODELS else PROPOSED[kind]) in plan.values()
        handler = TorchTensorParallelConfig(plan=plan if kind == "inkling" else "proposed")
        options["parallelism_config"] = ParallelismConfig(**sizes, tp_handler=handler)
    accel = Accelerator(cpu=True, timeout=BOUND, gradient_accumulation_steps=2, **options)
    model = accel.prepare(model)
    optimizer = accel.prepare(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))
    return accel, model, optimizer


def steps(accel: Accelerator, model: Any, optimizer: Any, batches: range) -> list[float]:
    """Return losses and norms of batches in windows of two."""
    numbers = []
    for seed in batches:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, WORDS, (4, 6), generator=generator)
        part = tokens.chunk(accel.data_world)[accel.strategy.data.rank]
        with accel.accumulate(model):
            loss = model(input_ids=part, labels=part).loss
            accel.backward(loss)
            if accel.sync_gradients:
                numbers.append(float(accel.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        numbers.append(accel.reduce(loss.detach(), "mean").item())
    return numbers


def trains(kind: str, sizes: dict[str, int], folder: str = "") -> list[float]:
    """Train six batches; after the fourth, another Accelerator on one process may go on."""
    accel, model, optimizer = prepared(kind, sizes)
    numbers = steps(accel, model, optimizer, range(4))
    if folder:
        accel.save_state(folder)
    return numbers + steps(accel, model, optimizer, range(4, 6))


def resumes(kind: str, folder: str) -> list[float]:
    accel, model, optimizer = prepared(kind, {})
    accel.load_state(folder)
    return steps(accel, model, optimizer, range(4, 6))


@cache
def alone(kind: str) -> list[float]:
    return trains(kind, {})


@pytest.mark.parametrize("kind", [*MODELS, *PROPOSED])
def test_it_trains_as_on_one_process_and_resumes_on_one(pool, tmp_path, kind):
    for numbers in pool.run(trains, kind, {"tp_size": 2}, str(tmp_path / "state")):
        assert numbers == reordered(alone(kind))
    assert resumes(kind, str(tmp_path / "state")) == reordered(alone(kind)[-3:])


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v2", "granite_swa", "t5"])
def test_its_parts_are_sharded_too(pool_of_4, kind):
    for numbers in pool_of_4.run(trains, kind, {"tp_size": 2, "dp_shard_size": 2}):
        assert numbers == reordered(alone(kind))
