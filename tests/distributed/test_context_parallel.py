"""Ranks that share sequences: gradients and losses as of one process, and what is refused."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchContextParallelConfig,
)
from tests.support.language import VOCABULARY, LanguageModel
from tests.support.ring_attention import ring_on_cpu
from tests.support.sharded import quiet, whole

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

LENGTH = 16


def accelerator(
    sizes: dict[str, int], *, rotation: str = "allgather", balanced: bool = True, **options: Any
) -> Accelerator:
    quiet()
    handler = {}
    if sizes.get("cp_size", 1) > 1:
        handler = {"cp_handler": TorchContextParallelConfig(rotation, balanced)}
    return Accelerator(
        cpu=True,
        timeout=timedelta(seconds=30),
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
        assert one["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert one["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert one["gradients"].keys() == expected["gradients"].keys()
        for name, values in expected["gradients"].items():
            assert one["gradients"][name] == pytest.approx(values, abs=1e-6), name
    assert found[0]["weights"] == pytest.approx(expected["weights"], abs=1e-5)


def on_two(causal: bool, rotation: str, sharded: bool) -> dict[str, Any]:
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if sharded else {}
    return trained({"cp_size": 2}, causal=causal, rotation=rotation, **options)


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
