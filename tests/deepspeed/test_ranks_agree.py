"""What ranks must agree on under ZeRO: who has gradients, what is gathered, and buffers."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="deepspeed is not installed: scripts/test_deepspeed")

from accel_callbacks import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs
from accel_callbacks.distributed.topology import destroy_topology
from tests.deepspeed.jobs import PATIENCE, engine, finish
from tests.mistakes.test_ranks_agree import STEPS, UNUSED, Counted, Heads, batch_of
from tests.support.bound import patience
from tests.support.rounding import assert_reordered

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]

BUCKET = {"reduce_bucket_size": 60}  # holds one layer and a half


class Weights(torch.nn.Module):
    """A layer of several weights, of which it uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "spare"):
            setattr(self, name, torch.nn.Parameter(torch.randn(6, 6)))

    def forward(self, hidden: torch.Tensor, names: str) -> torch.Tensor:
        return sum(hidden @ getattr(self, name) for name in names)


class Layers(torch.nn.Module):
    """The same with a layer for each weight, called as stage 3 is told to gather: in one piece."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "spare"):
            setattr(self, name, torch.nn.Linear(6, 6))

    def forward(self, hidden: torch.Tensor, names: str) -> torch.Tensor:
        return sum(getattr(self, name)(hidden) for name in names)


class Routed(torch.nn.Module):
    """A model with a part that uses other weights in each batch."""

    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(5, 6)
        self.parts = kind()

    def forward(self, inputs: torch.Tensor, names: str) -> torch.Tensor:
        return self.parts(self.body(inputs).tanh(), names)


MODELS = {
    "Heads": Heads,
    "Weights": lambda: Routed(Weights),
    "Layers": lambda: Routed(Layers),
}


def accelerator(layout: str, handler: Any = None, window: int = 1, **zero: Any) -> Accelerator:
    """Return an accelerator of DDP, or of ZeRO: ``"zero"``, the stage, and ``"offload"``."""
    options: dict[str, Any] = {}
    if layout.startswith("zero"):
        whole = zero.pop("whole", None)
        if layout.endswith("offload"):
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        config = {"stage": int(layout[4]), "stage3_param_persistence_threshold": 0, **zero}
        options["deepspeed_plugin"] = DeepSpeedPlugin(
            {"zero_optimization": config}, transformer_moe_cls_names=whole
        )
    handlers = [DistributedDataParallelKwargs(**handler)] if handler else []
    return Accelerator(
        cpu=True, timeout=PATIENCE, kwargs_handlers=handlers,
        gradient_accumulation_steps=window, **options,
    )  # fmt: skip


def train(
    layout: str, kind: str, used: list[list[str]], handler: Any, window: int = 1, **zero: Any
) -> Any:
    """Train with the weights that each rank uses in each step; return all of them, and norms."""
    accel = accelerator(layout, handler, window, **zero)
    model: Any = MODELS[kind]()
    # Weight decay and momentum move a weight whose gradient is zero, and not one that has none.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.5)
    model, optimizer = accel.prepare(model, optimizer)
    norms = []
    for number, names in enumerate(used):
        with accel.accumulate(model):
            own = names[accel.process_index % len(names)]
            accel.backward(model(batch_of(accel, number), own).square().mean())
            if accel.sync_gradients:
                norms.append(float(accel.clip_grad_norm_(model.parameters(), 10.0)))
            optimizer.step()
            optimizer.zero_grad()
    state = accel.get_state_dict(model)
    weights = {name: weight.tolist() for name, weight in state.items()}
    finish(accel)
    return {"norms": norms, **weights}


def train_each(jobs: list[tuple[Any, ...]]) -> list[Any]:
    """Train by each of some arguments, the last of which are options of ZeRO."""
    return [train(*arguments, **zero) for *arguments, zero in jobs]


def compare(pool: Any, steps: list[list[str]], handler: Any, layouts: list[Any]) -> None:
    """Assert that layouts (with a model, a window, and options) train as DDP does."""
    kinds = list(dict.fromkeys((kind, window) for _, kind, window, _ in layouts))
    ddp = [("ddp", kind, steps, UNUSED, window, {}) for kind, window in kinds]
    expected = dict(zip(kinds, pool.run(train_each, ddp)[0], strict=True))
    jobs = [(layout, kind, steps, handler, window, zero) for layout, kind, window, zero in layouts]
    for layout, result in zip(layouts, pool.run(train_each, jobs)[0], strict=True):
        assert_reordered(result, expected[layout[1:3]], str(layout))


def test_missing_gradients_are_averaged_as_zeros_as_ddp_does(pool):
    layouts = [
        ("zero1", "Heads", 2, {}),
        ("zero1", "Heads", 1, BUCKET),
        ("zero2", "Heads", 1, {}),
        ("zero2", "Heads", 2, BUCKET),
        ("zero2-offload", "Heads", 2, {}),
        ("zero3", "Weights", 1, BUCKET),
        ("zero3-offload", "Weights", 2, {}),
        ("zero3", "Layers", 2, {"whole": "Layers"}),
    ]
    compare(pool, STEPS, UNUSED, layouts)


def test_ranks_that_use_the_same_parameters_may_change_them(pool):
    layouts = [
        ("zero1", "Heads", 2, {}),
        ("zero2", "Heads", 1, BUCKET),
        ("zero2-offload", "Heads", 2, {}),
        ("zero3", "Heads", 2, BUCKET),
        ("zero3-offload", "Heads", 2, {}),
        ("zero3", "Layers", 1, {"whole": "Layers"}),
    ]
    compare(pool, [["a"], ["ab"], ["b"], ["b"], ["a"], ["ab"], ["b"]], None, layouts)


# Used on each rank in each step; options of ZeRO; what is said.
FILLED, SAME = "find_unused_parameters=True", "Call the same modules in the same order"
A_ON_0 = "rank 0 came to the gradients of 'a.weight'"
UNEQUAL = [
    ("zero1", "Heads", [["a", "b"]], {}, A_ON_0, FILLED),
    ("zero2", "Heads", [["ab", "a"]], {}, "of 'b.weight' and 1 more, and rank 1 to the", FILLED),
    ("zero2", "Heads", [["a"], ["b", "ab"]], {}, "rank 1 to the gradients of 'a.weight'", FILLED),
    ("zero2", "Heads", [["ab", "ba"]], {}, "gradients come in another order", FILLED),
    ("zero2", "Heads", [["ab", "b"]], BUCKET, "rank 0 came to the gradients of 'a.", FILLED),
    ("zero3", "Weights", [["ab", "b"]], {}, "of 'parts.a', and rank 1 to the end", FILLED),
    ("zero3", "Heads", [["ab", "b"]], {}, "rank 0 came to the gather of 'a.weight'", SAME),
    ("zero3", "Heads", [["ab", "ba"]], {}, "and rank 1 to the gather of 'b.weight'", SAME),
]


def refuse_each(jobs: list[tuple[Any, ...]]) -> list[str]:
    """Return the error that ends each training, after which the group still works."""
    texts = []
    for layout, kind, steps, zero, *_ in jobs:
        with pytest.raises(RuntimeError) as caught:
            train(layout, kind, steps, None, **zero)
        texts.append(str(caught.value))
        del caught
        gc.collect()
        destroy_topology()
    return texts


def test_ranks_that_use_other_parameters_are_told_which(pool):
    for texts in pool.run(refuse_each, UNEQUAL):
        for text, (*job, part, advice) in zip(texts, UNEQUAL, strict=True):
            assert part in text, job
            assert advice in text, job


def change_alone(seconds: float) -> None:
    """Use another weight than before on one rank, within a short timeout."""
    accel = Accelerator(cpu=True, timeout=timedelta(seconds=seconds), **engine("zero2"))
    model: Any = Heads()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for names in ("aa", "aa", "ab"):
        accel.backward(model(batch_of(accel), names[accel.process_index]).mean())
        optimizer.step()


def test_one_rank_that_changes_what_it_uses_says_so_before_the_timeout(fresh_pool):
    (one, cause), (other, text) = fresh_pool.outcomes(change_alone, patience(20))
    assert (one, other) == ("RemoteError", "RuntimeError")
    told = "rank 1 came to the gradients of 'b.weight' and 1 more, where the gradients of 'a."
    assert told in text
    assert told in cause


def count_rounds(layout: str, kind: str) -> list[int]:
    """Count how often ranks have compared what they do, after each step."""
    accel = accelerator(layout)
    model: Any = MODELS[kind]()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rounds = []
    for number in range(5):
        accel.backward(model(batch_of(accel, number), "ab").square().mean())
        optimizer.step()
        rounds.append(accel.strategy._agreement._rounds)
    finish(accel)
    return rounds


def count_each(layouts: list[tuple[str, str]]) -> list[list[int]]:
    return [count_rounds(*layout) for layout in layouts]


def test_a_loop_that_repeats_itself_compares_nothing_from_its_third_pass_on(pool):
    layouts = [("zero1", "Heads"), ("zero2", "Heads"), ("zero3", "Heads"), ("zero3", "Weights")]
    for rounds in pool.run(count_each, layouts)[0]:
        assert 0 < rounds[0] <= rounds[1] == rounds[4], rounds


def buffers_of(layout: str, handler: Any = None) -> list[Any]:
    """Return the buffers after some steps, before and after a forward of evaluation."""
    accel = accelerator(layout, handler)
    model: Any = Counted()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(3):
        accel.backward(model(batch_of(accel, number)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    norm = accel.unwrap_model(model).norm
    before = norm.running_mean.tolist()
    with accel.evaluate(model), torch.no_grad():
        model(torch.ones(2, 5))
    after = {name: buffer.tolist() for name, buffer in norm.named_buffers()}
    finish(accel)
    return [before, after]


def buffers_of_each(jobs: list[tuple[Any, ...]]) -> list[Any]:
    return [buffers_of(*job) for job in jobs]


def test_buffers_are_those_of_rank_0_as_under_ddp(pool):
    jobs = [("ddp",), *((f"zero{stage}",) for stage in range(4))]
    first, second = pool.run(buffers_of_each, [*jobs, ("zero2", {"broadcast_buffers": False})])
    for job, (before, mine), (other_before, other) in zip(jobs, first, second, strict=False):
        assert mine == other, job
        assert before != other_before, job  # of its own last batch
        assert_reordered(mine, first[0][1], str(job))
    assert first[-1][1] != second[-1][1]
