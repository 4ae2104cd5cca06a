"""Ranks that share sequences and exchange tokens for heads around attention, as one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from accel_callbacks import (
    Accelerator,
    DeepSpeedSequenceParallelConfig,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelConfig,
)
from tests.support.bound import BOUND
from tests.support.rounding import reordered
from tests.support.sharded import quiet, whole

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

LENGTH, WORDS, WIDTH = 12, 32, 16


class Attention(torch.nn.Module):
    """Four heads of queries, and fewer of keys and values."""

    def __init__(self, pairs: int, causal: bool) -> None:
        super().__init__()
        self.query = torch.nn.Linear(WIDTH, WIDTH)
        self.key, self.value = torch.nn.Linear(WIDTH, 4 * pairs), torch.nn.Linear(WIDTH, 4 * pairs)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.options = {"is_causal": causal, "enable_gqa": pairs < 4}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.query, self.key, self.value)
        heads = [one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in layers]
        seen = F.scaled_dot_product_attention(*heads, **self.options)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class LM(torch.nn.Module):
    def __init__(self, pairs: int = 2, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.positions = torch.nn.Embedding(LENGTH, WIDTH)
        self.layers = torch.nn.Sequential(*(Attention(pairs, causal) for _ in range(2)))
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(words) + self.positions(positions)))


def accelerator(sizes: dict[str, int], handler: Any = None, **options: Any) -> Accelerator:
    quiet()
    if sizes:
        plan = {"layers.*.query": "colwise", "layers.*.key": "colwise"}
        plan |= {"layers.*.value": "colwise", "layers.*.out": "rowwise"}
        cut = TorchTensorParallelConfig(plan=plan) if "tp_size" in sizes else None
        options["parallelism_config"] = ParallelismConfig(
            **sizes, sp_handler=handler, tp_handler=cut
        )
    return Accelerator(cpu=True, timeout=BOUND, **options)


def sentences() -> list[dict[str, torch.Tensor]]:
    """Words with the next ones, of which another number counts in each."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for number in range(8):
        words = torch.randint(0, WORDS, (LENGTH + 1,), generator=generator)
        labels = words[1:].clone()
        labels[LENGTH - 1 - number :] = -100
        found.append({"words": words[:-1], "labels": labels, "positions": torch.arange(LENGTH)})
    return found


def trains(
    sizes: dict[str, int], pairs: int, causal: bool, sharded: bool = False, compiled: bool = False
) -> dict[str, Any]:
    """The gradients of the first step, and losses and weights."""
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded and sizes else {}
    accel = accelerator(sizes, **options)
    model: Any = LM(pairs, causal)
    if compiled:
        model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(sentences(), batch_size=2 // accel.data_world)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    losses, gradients = [], {}
    for batch in loader:
        with accel.maybe_context_parallel(list(batch.values()), [1] * 3):
            logits = model(batch["words"], batch["positions"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
            count = (batch["labels"] != -100).sum()
            accel.backward(loss, normalizer=count)
            named = accel.unwrap_model(model).named_parameters()
            gradients = gradients or {n: whole(p.grad).flatten().tolist() for n, p in named}
            optimizer.step()
            optimizer.zero_grad()
        total, number = accel.reduce(torch.stack([loss.detach(), count]), "sum").tolist()
        losses.append(total / number)
    state = accel.get_state_dict(model, all_ranks=True)
    weights = {name: value.flatten().tolist() for name, value in state.items()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == reordered(expected["losses"])
    for kind in ("gradients", "weights"):
        assert found[kind].keys() == expected[kind].keys()
        for name, values in expected[kind].items():
            assert found[kind][name] == reordered(values), name


@pytest.mark.parametrize(
    ("pairs", "causal", "sharded"), [(2, True, False), (4, False, False), (2, True, True)]
)
def test_losses_gradients_and_weights_are_those_of_one_process(pool, pairs, causal, sharded):
    expected = trains({}, pairs, causal)
    for found in pool.run(trains, {"sp_size": 2}, pairs, causal, sharded):
        compare(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_shard_size": 2}, {"dp_replicate_size": 2}])
def test_beside_data_parallelism(pool_of_4, sizes):
    expected = trains({}, 2, True)
    for found in pool_of_4.run(trains, {**sizes, "sp_size": 2}, 2, True):
        compare(found, expected)


def test_layers_that_are_cut_too(pool_of_4):
    expected = trains({}, 4, True)
    for found in pool_of_4.run(trains, {"tp_size": 2, "sp_size": 2}, 4, True):
        compare(found, expected)


@pytest.mark.slow
def test_a_compiled_model_is_the_same(pool):
    expected = trains({}, 2, True)
    for found in pool.run(trains, {"sp_size": 2}, 2, True, False, True):
        compare(found, expected)


def gathered() -> list[Any]:
    accel = accelerator({"sp_size": 2})
    words = torch.arange(2 * LENGTH).view(2, -1)
    with accel.maybe_context_parallel([words], [1]):
        return [words.tolist(), accel.gather_sequences(words).tolist(), accel.data_world]


def test_each_rank_has_a_piece(pool):
    words = torch.arange(2 * LENGTH).view(2, -1)
    for rank, found in enumerate(pool.run(gathered)):
        assert found == [words.chunk(2, 1)[rank].tolist(), words.tolist(), 1]


def refused(case: str) -> str:
    length = 11 if case == "length" else LENGTH
    handlers = {
        "flash": DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2"),
        "fixed": DeepSpeedSequenceParallelConfig(8, sp_seq_length_is_variable=False),
    }
    with pytest.raises((ValueError, RuntimeError)) as caught:  # noqa: PT012
        accel = accelerator({"sp_size": 2}, handlers.get(case))
        model = accel.prepare(LM(pairs=1 if case == "heads" else 2))
        words, positions = torch.ones(1, length).long(), torch.arange(length).view(1, -1)
        with accel.maybe_context_parallel([words, positions], [1, 1]):
            if case == "memory":
                heads = [torch.ones(1, 4, size, 2) for size in (LENGTH // 2, LENGTH, LENGTH)]
                F.scaled_dot_product_attention(*heads)
            loss = model(words, positions).sum()
        accel.backward(loss)
    return str(caught.value)


REFUSALS = {
    "heads": "with 4 heads of queries and 1 of keys, which 2 ranks cannot share",
    "length": "a length of 11 cannot be cut over 2 ranks: it must be a multiple of 2 .sp_size.",
    "fixed": "have a length of 12, and sp_seq_length is 8",
    "flash": "sp_attn_implementation='flash_attention_2'",
    "memory": "attention got 6 queries and 12 keys, and each rank has 6 tokens",
    "outside": "the loss was computed inside of maybe_context_parallel, which has ended",
}


def test_what_would_be_wrong_is_refused(pool):
    for case, pattern in REFUSALS.items():
        for text in pool.run(refused, case):
            assert re.search(pattern, text), text
