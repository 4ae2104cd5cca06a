"""Ranks that share sequences: gradients and losses as of one process, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.experimental import _attention
from torch.utils.data import DataLoader

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from tests.support.bound import BOUND
from tests.support.language import VOCABULARY, LanguageModel
from tests.support.ring_attention import ring_on_cpu
from tests.support.rounding import reordered
from tests.support.sharded import quiet, whole

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

LENGTH = 16


def accelerator(
    sizes: dict[str, int], *, rotation: str = "allgather", balanced: bool = True, **options: Any
) -> Accelerator:
    quiet()
    handler: dict[str, Any] = {}
    if sizes.get("cp_size", 1) > 1:
        handler = {"cp_handler": TorchContextParallelConfig(rotation, balanced)}
    if sizes.get("tp_size", 1) > 1:
        plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        handler["tp_handler"] = TorchTensorParallelConfig(plan=plan)
    return Accelerator(
        cpu=True,
        timeout=BOUND,
        parallelism_config=ParallelismConfig(**sizes, **handler) if sizes else None,
        **options,
    )


def sentences(count: int = 8, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    """Inputs with their labels; the number of labels that count differs in each."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for number in range(count):
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[length - 1 - number :] = -100
        found.append({"tokens": tokens[:-1], "labels": labels, "positions": torch.arange(length)})
    return found


def summed(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum()


def trained(
    sizes: dict[str, int],
    *,
    causal: bool = True,
    rotation: str = "allgather",
    steps: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """The gradients of a first step, and the losses and weights of some, in windows of two."""
    accel = accelerator(
        sizes, rotation=rotation, balanced=causal, gradient_accumulation_steps=2, **options
    )
    model = LanguageModel(causal=causal)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(sentences(8), batch_size=2 // accel.data_world)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    losses, gradients, samples = [], {}, []
    with ring_on_cpu():
        for batch in loader:
            samples += accel.gather_for_metrics(batch["tokens"])[:, 0].tolist()
            buffers = list(batch.values())
            with (
                accel.accumulate(model),
                accel.maybe_context_parallel(buffers, [1] * 3, no_restore_buffers={buffers[1]}),
            ):
                loss, count = summed(model(batch["tokens"], batch["positions"]), batch["labels"])
                accel.backward(loss, normalizer=count)
                norm = accel.clip_grad_norm_(model.parameters(), 1e6)
                if accel.sync_gradients and not gradients:
                    named = accel.unwrap_model(model).named_parameters()
                    gradients = {n: whole(p.grad).flatten().tolist() for n, p in named}
                optimizer.step()
                optimizer.zero_grad()
            total, number = accel.reduce(torch.stack([loss.detach(), count]), "sum").tolist()
            losses.append(total / number)
    state = accel.get_state_dict(model)
    weights = torch.cat([one.flatten() for one in state.values()]).tolist() if state else None
    return {
        "gradients": gradients,
        "losses": losses,
        "norm": float(norm),
        "weights": weights,
        "samples": samples,
    }


def compare(found: list[dict[str, Any]], **options: Any) -> None:
    expected = trained({}, **options)
    for one in found:
        assert one["samples"] == expected["samples"]
        assert one["losses"] == reordered(expected["losses"])
        assert one["norm"] == reordered(expected["norm"])
        assert one["gradients"].keys() == expected["gradients"].keys()
        for name, values in expected["gradients"].items():
            assert one["gradients"][name] == reordered(values), name
    assert found[0]["weights"] == reordered(expected["weights"])


def on_two(causal: bool, rotation: str, sharded: bool) -> dict[str, Any]:
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded else {}
    return trained({"cp_size": 2}, causal=causal, rotation=rotation, **options)


@pytest.mark.first
@pytest.mark.parametrize(
    ("causal", "rotation", "sharded"),
    [
        (True, "allgather", False),
        (False, "allgather", True),
        (True, "alltoall", True),
        (False, "alltoall", False),
    ],
)
def test_gradients_of_sums_over_tokens_are_those_of_one_process(pool, causal, rotation, sharded):
    compare(pool.run(on_two, causal, rotation, sharded), causal=causal)


def pair(**options: Any) -> tuple[Accelerator, Any, Any]:
    accel = accelerator({"cp_size": 2}, **options)
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accel, *accel.prepare(model, optimizer)


def views() -> tuple[Any, ...]:
    """What inputs and labels that are views of one batch are inside and after."""
    accel = accelerator({"cp_size": 2})
    batch = torch.arange(2 * (LENGTH + 1)).view(2, -1)
    inputs, labels = batch[:, :-1], batch[:, 1:]
    positions = torch.arange(LENGTH).expand(2, -1)
    before = batch.clone()
    with accel.maybe_context_parallel([inputs, labels, positions], [-1, 1, 1], {positions}):
        inside = [one.tolist() for one in (inputs, labels, positions)]
        whole_again = accel.gather_sequences(labels)
    return inside, whole_again.tolist(), torch.equal(batch, before), inputs.shape, positions.shape


def test_views_of_one_batch_are_cut_apart_and_the_batch_stays_as_it_was(pool):
    tokens = torch.arange(2 * (LENGTH + 1)).view(2, -1)
    order = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    for rank, (inside, joined, kept, shape, positions) in enumerate(pool.run(views)):
        assert inside[0] == tokens[:, :-1][:, order[rank]].tolist()
        assert inside[1] == tokens[:, 1:][:, order[rank]].tolist()
        assert inside[2] == [order[rank]] * 2
        assert joined == tokens[:, 1:].tolist()
        assert kept
        assert shape == (2, LENGTH)
        assert positions == (2, LENGTH // 2)  # not restored


@contextmanager
def as_before() -> Iterator[None]:
    """Nothing of torch's stays replaced after the block."""
    attention, math = F.scaled_dot_product_attention, torch.backends.cuda.math_sdp_enabled()
    options = dataclasses.replace(_attention._cp_options)
    yield
    assert F.scaled_dot_product_attention is attention
    assert torch.backends.cuda.math_sdp_enabled() is math
    assert _attention._cp_options == options


def refused(case: str) -> str:
    balanced = case not in ("unbalanced length",)
    accel = accelerator({"cp_size": 2}, balanced=balanced)
    model = LanguageModel(causal=case != "not causal", dropout=0.1 * (case == "dropout"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accel.prepare(model, optimizer)
    length = {"length": 18, "short": 2, "unbalanced length": 15}.get(case, LENGTH)
    tokens = torch.ones(1, length, dtype=torch.long)
    positions = torch.arange(length).view(1, -1)
    buffers, dims = [tokens, positions], [1, 1]
    with ring_on_cpu(), as_before(), pytest.raises((ValueError, RuntimeError)) as caught:  # noqa: PT012
        if case == "nothing":
            buffers, dims = [], []
        elif case == "dims":
            dims = [1]
        elif case == "twice":
            buffers = [tokens, tokens]
        elif case == "trained":
            buffers = [tokens, accel.unwrap_model(model).positions.weight]
        elif case == "dimension":
            dims = [1, 2]
        elif case == "lengths":
            buffers = [tokens, torch.arange(64).view(1, -1)]
        kept = {torch.ones(1)} if case == "not a buffer" else None
        with accel.maybe_context_parallel(buffers, dims, kept):
            if case == "nested":
                with accel.maybe_context_parallel([torch.ones(4)], [0]):
                    pass
            if case == "mask":
                mask = torch.ones(8, 8, dtype=torch.bool)
                heads = torch.ones(1, 1, 8, 4)
                F.scaled_dot_product_attention(heads, heads, heads, mask)
            loss = model(tokens, positions).sum()
        accel.backward(loss)
    assert tokens.shape == (1, length)
    return str(caught.value)


REFUSALS = {
    "length": "length of 18 cannot be cut over 2 ranks: it must be a multiple of 4 .*"
    "Pad to 20, with labels of -100, or cut to 16",
    "short": "length of 2 .* Pad to 4, with labels of -100\\.",
    "unbalanced length": "must be a multiple of 2 \\(cp_size\\). Pad to 16",
    "nothing": "name the tensors that have tokens",
    "dims": "2 buffers, and 1 buffer_seq_dims",
    "twice": "a tensor is among the buffers twice",
    "trained": "buffer 1 is trained or sharded",
    "dimension": "buffer 1 has a shape of \\(1, 16\\), and no dimension 2",
    "lengths": "lengths of \\[16, 64\\]",
    "not a buffer": "no_restore_buffers has a tensor that is not among the buffers",
    "nested": "inside of another one",
    "mask": "attention got an attn_mask",
    "dropout": "dropout_p=0.1, whose backward torch computes wrongly",
    "not causal": "load_balance=False",
    "backward outside": "loss was computed inside of maybe_context_parallel, which has ended",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_be_wrong_is_refused_and_nothing_is_left_behind(pool, case):
    for text in pool.run(refused, case):
        assert re.search(REFUSALS[case], text), text


def on_a_cpu(size: str) -> str:
    """The error of a step without the kernels that stand in for those of GPUs."""
    accel = accelerator({size: 2})
    model = accel.prepare(LanguageModel())
    tokens, positions = torch.ones(1, LENGTH, dtype=torch.long), torch.arange(LENGTH).view(1, -1)
    try:
        with accel.maybe_context_parallel([tokens, positions], [1, 1]):
            accel.backward(model(tokens, positions).sum())
    except NotImplementedError as error:
        return str(error)
    return "no error"


def test_attention_on_a_cpu_says_what_computes_it_there(pool):
    for text in pool.run(on_a_cpu, "cp_size"):
        assert text.startswith("cp_size: torch computes attention over several ranks")
        assert "ParallelismConfig(sp_size=...)" in text
    assert pool.run(on_a_cpu, "sp_size") == ["no error"] * 2


def warned() -> list[list[str]]:
    """What a step says outside of the context, twice, and one inside without attention."""
    accel, model, _ = pair()
    tokens, positions = torch.ones(1, LENGTH, dtype=torch.long), torch.arange(LENGTH).view(1, -1)
    found = []
    for inside in (False, False, True, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ring_on_cpu():
                if inside:
                    with accel.maybe_context_parallel([tokens, positions], [1, 1]):
                        accel.backward(accel.unwrap_model(model).head.weight.sum())
                else:
                    accel.backward(model(tokens, positions).sum())
        found.append([str(one.message) for one in caught if one.category is UserWarning])
    return found


def test_a_step_without_what_it_needs_says_so_once(pool):
    for outside, again, inside, inside_again in pool.run(warned):
        assert "this loss comes from outside of accel.maybe_context_parallel" in outside[0]
        assert "no attention has run through" in inside[0]
        assert again == inside_again == []


def test_without_context_parallelism_it_does_nothing_and_says_so_once(capsys):
    accel = Accelerator(cpu=True)
    tokens = torch.arange(6)
    for _ in range(2):
        with accel.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[0]):
            assert tokens.shape == (6,)
    assert capsys.readouterr().err.count("does nothing, because cp_size and sp_size are 1") == 1
    assert accel.gather_sequences(tokens) is tokens


def local_sgd() -> None:
    from accel_callbacks.local_sgd import LocalSGD

    accel, model, _ = pair()
    with (
        pytest.raises(ValueError, match="LocalSGD does not work with cp_size or sp_size above 1"),
        LocalSGD(accelerator=accel, model=model, local_sgd_steps=2),
    ):
        pass


def test_local_sgd_is_refused(pool):
    pool.run(local_sgd)


def on_four(sizes: dict[str, int], sharded: bool) -> dict[str, Any]:
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded else {}
    return trained(sizes, **options)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["dp_replicate_size", "dp_shard_size"])
def test_eight_ranks_train_as_one(pool_of_8, data):
    compare(pool_of_8.run(on_four, {"cp_size": 2, "tp_size": 2, data: 2}, True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "sharded"),
    [
        ({"cp_size": 4}, False),
        ({"cp_size": 2, "dp_shard_size": 2}, True),
        ({"cp_size": 2, "dp_replicate_size": 2}, False),
        ({"cp_size": 2, "dp_replicate_size": 2}, True),
        ({"cp_size": 2, "tp_size": 2}, False),
    ],
)
def test_four_ranks_train_as_one(pool_of_4, sizes, sharded):
    compare(pool_of_4.run(on_four, sizes, sharded))


def compiled(first_whole: bool) -> tuple[list[float], list[float], int]:
    """The losses of a compiled model and of one that is not, over some contexts; its graphs."""
    found = []
    for compile_it in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        accel = accelerator({"cp_size": 2})
        model: Any = LanguageModel()
        if compile_it:
            model.compile(backend="eager")
        model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        batches = [
            torch.utils.data.default_collate(sentences(8)[n : n + 2]) for n in range(0, 8, 2)
        ]
        if first_whole:  # compiled with attention of one rank
            with torch.no_grad():
                model(batches[0]["tokens"], batches[0]["positions"])
        losses = []
        with ring_on_cpu():
            for batch in batches:
                with accel.maybe_context_parallel(list(batch.values()), [1] * 3):
                    logits = model(batch["tokens"], batch["positions"])
                    loss, count = summed(logits, batch["labels"])
                    accel.backward(loss, normalizer=count)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                if len(losses) == 2:
                    after_two = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.append((losses, torch._dynamo.utils.counters["stats"]["unique_graphs"] - after_two))
    return found[0][0], found[1][0], found[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("first_whole", [False, True])
def test_a_compiled_model_sees_the_tokens_of_all_ranks_and_is_compiled_once(pool, first_whole):
    for losses, expected, compiled_later in pool.run(compiled, first_whole):
        assert losses == reordered(expected)
        assert compiled_later == 0
