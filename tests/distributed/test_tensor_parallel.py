"""Tensor and sequence parallelism, alone and under FSDP2, against one process."""

from __future__ import annotations

import warnings
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    LocalSGD,
    ParallelismConfig,
    TorchTensorParallelConfig,
    init_empty_weights,
    load_checkpoint_in_model,
)
from accel_callbacks.callbacks import (
    EMA,
    Freeze,
    GradientNorm,
    ModelSummary,
    NonFinite,
    WeightAveraging,
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.*non-ascending order"),
]

WORDS = 33  # ranks hold unequal parts of the vocabulary


class Attention(torch.nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(width, width)
        self.k_proj = torch.nn.Linear(width, width, bias=False)
        self.v_proj = torch.nn.Linear(width, width)
        self.q_norm = torch.nn.LayerNorm(4)
        self.o_proj = torch.nn.Linear(width, width)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        seen = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.o_proj(self.drop(seen).transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = torch.nn.LayerNorm(width)
        self.attn = Attention(width, dropout)
        self.norm_2 = torch.nn.LayerNorm(width)
        self.up_proj = torch.nn.Linear(width, 4 * width)
        self.down_proj = torch.nn.Linear(4 * width, width)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.norm_1(x)))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))


class LM(torch.nn.Module):
    def __init__(self, dropout: float = 0.0, words: int = WORDS) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, 8)
        self.blocks = torch.nn.ModuleList(Block(8, dropout) for _ in range(2))
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


_ENDS = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}


def plan_named(name: str) -> dict[str, Any]:
    accel_plan = Accelerator(cpu=True).propose_tp_plan(LM(), sequence_parallel="sequence" in name)
    if name == "ends":
        return accel_plan | _ENDS
    if name == "torch":
        kinds = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        return {key: kinds[v]() if v in kinds else v for key, v in accel_plan.items()}
    if name == "loss":
        return accel_plan | _ENDS | {"head": "colwise_loss_parallel"}
    if name == "sequence loss":
        return accel_plan | {"head": "colwise_sequence_loss_parallel"}
    return accel_plan


def accelerator(layout: str, plan: Any = None, **options: Any) -> Accelerator:
    sizes = {"one": None, "tp2": {"tp_size": 2}, "2x2": {"dp_shard_size": 2, "tp_size": 2}}[layout]
    if sizes is not None:
        chosen = plan_named(plan) if isinstance(plan, str) else plan
        handler = TorchTensorParallelConfig(plan=chosen)
        options["parallelism_config"] = ParallelismConfig(**sizes, tp_handler=handler)
    return Accelerator(cpu=True, timeout=timedelta(seconds=30), **options)


def tokens(number: int = 32, length: int = 8, words: int = WORDS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randint(0, words, (number, length), generator=generator))


def full(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def loss_of(accel: Accelerator, model: Any, batch: torch.Tensor) -> torch.Tensor:
    with accel.loss_parallel():
        logits = model(batch)[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, batch[:, 1:].flatten())
        accel.backward(loss)
    return full(loss)


def make(name: str, model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, **options)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def trains(
    layout: str,
    plan: Any,
    optimizer: str = "SGD",
    clip: str = "norm",
    window: int = 1,
    kernels: dict | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Losses, all gradients of the first step, norms and the last weights."""
    accel = accelerator(layout, plan, gradient_accumulation_steps=window, **options)
    torch.manual_seed(0)
    model = LM()
    stepper = make(optimizer, model, **(kernels or {}))
    loader = DataLoader(tokens(), 8 // accel.data_world)
    model, stepper, loader = accel.prepare(model, stepper, loader)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    for _ in range(2):
        for batch in loader:
            with accel.accumulate(model):
                loss = loss_of(accel, model, batch)
                result["losses"].append(accel.reduce(loss, "mean").item())
                if not result["gradients"] and accel.sync_gradients:
                    result["gradients"] = {
                        name: full(one.grad).tolist() for name, one in model.named_parameters()
                    }
                if clip == "norm" and accel.sync_gradients:
                    result["norms"].append(accel.clip_grad_norm_(model.parameters(), 0.5).item())
                elif accel.sync_gradients:
                    accel.clip_grad_value_(model.parameters(), 0.01)
                stepper.step()
                stepper.zero_grad()
    state = accel.get_state_dict(model, all_ranks=True)
    result["weights"] = {name: value.tolist() for name, value in state.items()}
    return result


@cache
def alone(*args: Any) -> dict[str, Any]:
    """The same on one process."""
    return trains("one", None, *args)


def assert_alike(result: Any, wanted: Any, places: float = 2e-6) -> None:
    assert result.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            assert_alike(result[name], value, places)
        else:
            here, there = torch.tensor(result[name]), torch.tensor(value)
            torch.testing.assert_close(here, there, rtol=1e-5, atol=places, msg=f"{name}")


# --- parity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["ends", "torch", "loss", "sequence", "sequence loss"])
def test_losses_gradients_and_weights_are_those_of_one_process(pool, plan):
    if plan == "torch":  # a tied embedding is whole in it
        pass
    first, second = pool.run(trains, "tp2", plan)
    assert first == second
    assert_alike(first, alone())


@pytest.mark.parametrize("plan", ["ends", "sequence"])
def test_clipping_by_value_and_windows(pool, plan):
    """Gradients of norms in a cut sequence are sums, and clipped as sums."""
    first, second = pool.run(trains, "tp2", plan, "SGD", "value", 3)
    assert first == second
    assert_alike(first, alone("SGD", "value", 3))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("plan", ["ends", "torch", "loss", "sequence", "sequence loss"])
def test_two_by_two_is_one_process(pool_of_4, plan, window):
    results = pool_of_4.run(trains, "2x2", plan, "SGD", "norm", window)
    assert all(result == results[0] for result in results)
    assert_alike(results[0], alone("SGD", "norm", window), 1e-5)


def kernels(layout: str, optimizer: str, name: str) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = trains(layout, "ends", optimizer, kernels={name: True})
    return [result, sum("steps one by one" in str(one.message) for one in caught)]


@pytest.mark.parametrize("name", ["foreach", "fused"])
def test_kernels_that_take_no_mixed_lists_are_replaced(pool, name):
    (result, warned), _ = pool.run(kernels, "tp2", "SGD", name)
    assert_alike(result, alone())
    assert warned == 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("name", ["foreach", "fused"])
@pytest.mark.parametrize("layout", ["tp2", "2x2"])
def test_optimizers_step_alike_with_all_kernels(pool, pool_of_4, layout, optimizer, name):
    ranks = pool if layout == "tp2" else pool_of_4
    result, _ = ranks.run(kernels, layout, optimizer, name)[0]
    assert_alike(result, alone(optimizer), 1e-5)
