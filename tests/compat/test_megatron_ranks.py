"""Models under options of Megatron-LM: with the losses of one process, on the engines named."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, MegatronLMPlugin
from accel_callbacks.models.activation_checkpointing import CheckpointedForward
from tests.support.bound import BOUND
from tests.support.rounding import reordered
from tests.support.sharded import quiet

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.*non-ascending order"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WORDS, WIDTH = 32, 16


class Attention(nn.Module):
    """Of any number of heads of a width of 4."""

    def __init__(self, names: tuple[str, str, str], causal: bool) -> None:
        super().__init__()
        self.names, self.causal = names, causal
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (getattr(self, name)(x) for name in self.names)
        heads = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return seen.transpose(1, 2).flatten(2)


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn = Attention(("q_proj", "k_proj", "v_proj"), causal=True)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.down_proj = nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o_proj(self.self_attn(self.input_norm(x)))
        y = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Dense(nn.Module):
    """A layer of BERT: a linear one, and a norm where it ends a residual."""

    def __init__(self, inner: int, outer: int, ends: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, outer)
        self.norm = nn.LayerNorm(outer) if ends else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = self.dense(x)
        return F.gelu(x) if self.norm is None else self.norm(x + residual)


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {
                "self": Attention(("query", "key", "value"), causal=False),
                "output": Dense(WIDTH, WIDTH, True),
            }
        )
        self.intermediate, self.output = Dense(WIDTH, 32, False), Dense(32, WIDTH, True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention["output"](self.attention["self"](x), x)
        return self.output(self.intermediate(x), x)


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.layer = nn.ModuleList(BertLayer() for _ in range(2))
        self.pooler = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})
        self.classifier = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight
        for layer in self.layer:
            x = layer(x)
        pooled = torch.tanh(self.pooler["dense"](x[:, 0]))
        return F.cross_entropy(self.classifier(pooled), tokens[:, 0] % 2)


class PreTrainedModel(Llama):
    """By its name, a model that takes positions from the length of its activations."""


PreTrainedModel.__module__ = "transformers.modeling_utils"


class LikeTransformers(PreTrainedModel):
    pass


def trains(kind: str, **options: Any) -> dict[str, Any]:
    """Losses of a plain loop, and what the options came to."""
    quiet()
    plugin = MegatronLMPlugin(**options) if options else None
    # On one process, a window of as many micro-batches is the script's.
    accel = Accelerator(
        cpu=True,
        timeout=BOUND,
        megatron_lm_plugin=plugin,
        gradient_accumulation_steps=None if options else 2,
    )
    torch.manual_seed(0)
    model: Any = {"llama": Llama, "bert": Bert, "like transformers": LikeTransformers}[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, WORDS, (32, 8), generator=generator)
    loader = DataLoader(data, 4 // accel.data_world)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accel.accumulate(model):
            loss = model(batch)
            accel.backward(loss)
            if accel.sync_gradients:
                accel.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accel.reduce(loss.detach(), "mean").item())
    mesh = accel.torch_device_mesh
    return {
        "losses": losses,
        "steps": accel.current_run.global_step,
        "mesh": {} if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
        "engine": accel.strategy.name,
        "cut": sorted(n for n, one in model.named_parameters() if _is_cut(one)),
        "twice": sum(isinstance(one.forward, CheckpointedForward) for one in model.modules()),
    }


def _is_cut(parameter: Any) -> bool:
    return any(
        one.is_shard()
        for one, axis in zip(
            getattr(parameter, "placements", ()),
            getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ("",),
            strict=False,
        )
        if axis == "tp"
    )


@cache
def alone(kind: str) -> dict[str, Any]:
    return trains(kind)


CASES = {
    "tp": ({"tp_degree": 2}, "tensor_parallel", {"tp": 2}),
    "recompute": (
        {"tp_degree": 2, "recompute_granularity": "full"},
        "tensor_parallel",
        {"tp": 2},
    ),
    "selective": ({"recompute_activations": True}, "ddp", {"dp_replicate": 2}),
    "optimizer": (
        {"use_distributed_optimizer": True, "recompute_granularity": "full"},
        "fsdp",
        {"dp_shard": 2},
    ),
    "custom_fsdp": (
        {"use_custom_fsdp": True, "recompute_activations": True},
        "fsdp",
        {"dp_shard": 2},
    ),
}


def check(kind: str, results: list[Any], options: Any, engine: str, mesh: Any) -> None:
    expected = alone(kind)
    assert expected["losses"][0] != pytest.approx(expected["losses"][-2], abs=1e-2)
    for found in results:
        assert found["losses"] == reordered(expected["losses"])
        assert (found["engine"], found["mesh"], found["steps"]) == (engine, mesh, 4)
        assert bool(found["cut"]) == ("tp" in mesh)
        twice = any(name.startswith("recompute") for name in options)
        assert found["twice"] == (2 if twice else 0)


def test_layers_of_bert_are_cut_and_computed_again(pool):
    options, engine, mesh = CASES["recompute"]
    results = pool.run(trains_with, "bert", options)
    check("bert", results, options, engine, mesh)
    assert "layer.0.attention.output.dense.weight" in results[0]["cut"]
    assert not any(name.startswith("pooler") for name in results[0]["cut"])


def test_layers_and_sequences_of_llama_are_cut(pool):
    options = {"tp_degree": 2, "sequence_parallelism": True}
    results = pool.run(trains_with, "llama", options)
    check("llama", results, options, "tensor_parallel", {"tp": 2})
    assert "embed_tokens.weight" in results[0]["cut"]


def keeps_sequences() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found = trains_with("like transformers", {"tp_degree": 2, "sequence_parallelism": True})
    return found, {str(one.message) for one in caught if one.category is UserWarning}


def test_sequences_that_a_model_counts_stay_whole(pool):
    for found, texts in pool.run(keeps_sequences):
        check("llama", [found], {}, "tensor_parallel", {"tp": 2})
        assert "embed_tokens.weight" not in found["cut"]
        assert any(one.startswith("sequences stay whole between the blocks") for one in texts)


def test_a_distributed_optimizer_shards(pool):
    options, engine, mesh = CASES["optimizer"]
    check("llama", pool.run(trains_with, "llama", options), options, engine, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("case", CASES)
def test_each_engine_has_the_losses_of_one_process(pool, kind, case):
    options, engine, mesh = CASES[case]
    check(kind, pool.run(trains_with, kind, options), options, engine, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_two_by_two_is_sharded_over_the_data_axis(pool_of_4, kind, sharded):
    options = {"tp_degree": 2, "use_distributed_optimizer": sharded}
    results = pool_of_4.run(trains_with, kind, options)
    check(kind, results, options, "fsdp", {"dp_shard": 2, "tp": 2})


def trains_with(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    return trains(kind, num_micro_batches=2, **options)


def degrees_of_three() -> str:
    plugin = MegatronLMPlugin(tp_degree=3)
    with pytest.raises(ValueError, match="of Megatron-LM arrange groups") as caught:
        Accelerator(cpu=True, megatron_lm_plugin=plugin)
    return str(caught.value)


def test_degrees_that_do_not_divide_the_ranks_are_refused_on_all(pool):
    for text in pool.run(degrees_of_three):
        assert "arrange groups of 3 ranks, and there are 2" in text
