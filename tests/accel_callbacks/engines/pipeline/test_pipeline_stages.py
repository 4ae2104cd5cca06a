"""Stages of a pipeline, one after the other in one process: they compute what the model does."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves

from accel_callbacks.engines.pipeline.rehearsal import Rehearsal
from accel_callbacks.engines.pipeline.stages import (
    Route,
    Slot,
    Stage,
    StagePlan,
    Value,
    balanced_split_points,
)

CPU = torch.device("cpu")


def rehearsed(
    model: torch.nn.Module, points: list[str], *args: Any, **kwargs: Any
) -> tuple[StagePlan, Route]:
    plan = StagePlan(model, points)
    return plan, Rehearsal(plan, model, CPU).route(args, kwargs)


def staged(model: torch.nn.Module, points: list[str], *args: Any, **kwargs: Any) -> Any:
    """Return the result of the stages, each of which gets what the one before it has sent."""
    plan, route = rehearsed(model, points, *args, **kwargs)
    outlines = route.outputs_on_meta()
    tensors: tuple[torch.Tensor, ...] = ()
    for number in range(plan.count):
        stage = Stage(plan, model, number, CPU)
        loans = {
            name: model.get_parameter(name)
            for name, stages in route.borrowed.items()
            if number in stages
        }
        # Parameters of other stages are empty.
        own = {id(parameter) for parameter in stage.parameters()} | {*map(id, loans.values())}
        hidden = [parameter for parameter in model.parameters() if id(parameter) not in own]
        values = [parameter.data for parameter in hidden]
        for parameter in hidden:
            parameter.data = torch.empty(0)
        stage.begin(route, [(args, kwargs)], loans)
        received, tensors = tensors, stage(*tensors)
        for parameter, value in zip(hidden, values, strict=True):
            parameter.data = value
        if number < plan.count - 1:  # what is passed on has a gradient of its own
            assert not {*map(id, received)} & {*map(id, tensors)}
        shapes = [(tuple(one.shape), one.dtype, one.requires_grad) for one in tensors]
        wanted = outlines[number + 1]
        assert shapes == [(tuple(one.shape), one.dtype, one.requires_grad) for one in wanted]
    return route.unflatten(tensors)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(hidden).tanh())


class Outcome(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor
    kind: str


class LM(torch.nn.Module):
    """A model with tied weights, values that skip stages, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = torch.nn.Embedding(7, 4)
        self.position = torch.nn.Parameter(torch.randn(3, 4))
        self.drop = torch.nn.Dropout(0.0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.gain = torch.nn.Parameter(torch.randn(4))
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> Outcome:
        first = hidden = self.drop(self.emb(tokens) + self.position)
        hidden += 1  # into what a layer has returned
        for block in self.blocks:
            hidden = block(hidden) * scale
        hidden = hidden * self.gain + first
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return Outcome(logits, loss, "a loss")


TOKENS = torch.arange(6).view(2, 3)
POINTS = [["blocks.0"], ["blocks.2"], ["head"], ["blocks.1", "head"]]
POINTS += [["blocks.0", "blocks.1", "blocks.2", "head"], ["drop", "blocks.1"]]


@pytest.mark.parametrize("points", POINTS, ids=" ".join)
@pytest.mark.parametrize("arguments", [{}, {"scale": 2.0}])
def test_stages_compute_what_the_model_does(points, arguments):
    model = LM()
    expected = model(TOKENS, **arguments)
    result = staged(model, points, TOKENS, **arguments)
    assert isinstance(result, Outcome)
    assert result.kind == "a loss"
    assert torch.equal(result.logits, expected.logits)
    assert torch.equal(result.loss, expected.loss)


def test_a_rehearsal_leaves_the_model_and_the_random_numbers_as_they_are():
    model = LM()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    before = [parameter.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    model.drop.p = 0.5
    rehearsed(model, ["blocks.1"], TOKENS)
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "_compiled_call_impl" not in vars(model.emb)
    assert "_before_answer" not in vars(model.emb)


def test_what_is_passed_on_is_what_later_stages_read():
    _, route = rehearsed(LM(), ["blocks.1", "blocks.2", "head"], TOKENS)
    assert [call.stage for call in route.calls] == [0, 0, 0, 1, 2, 3]
    # The output of drop skips two stages; those of the blocks go to the next one.
    assert route.passed == [[], [1, 2], [1, 3], [1, 4]]
    assert route.loss == 1
    assert {name: list(stages) for name, stages in route.borrowed.items()} == {
        "emb.weight": [3],
        "gain": [3],
    }
    assert [outline.requires_grad for outline in route.values] == [True] * 6


def test_without_gradients_none_are_sent():
    with torch.no_grad():
        _, route = rehearsed(LM(), ["blocks.1"], TOKENS)
        assert not any(outline.requires_grad for outline in route.values)
        model = LM()
        assert torch.equal(staged(model, ["blocks.1"], TOKENS).logits, model(TOKENS).logits)


def test_whose_tensors_are_whose():
    model = LM()
    plan = StagePlan(model, ["blocks.1", "head"])
    assert plan.count == 3
    assert {name: layer.stage for name, layer in plan.layers.items()} == {
        **{"emb": 0, "drop": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "head": 2}
    }
    assert [name for name, layer in plan.layers.items() if layer.is_plain] == ["drop"]
    assert plan.containers == {"": 0, "blocks": 0}
    assert plan.canonical["head.weight"] == "emb.weight"
    assert plan.owner["head.weight"] == plan.owner["position"] == 0
    assert plan.owner["blocks.2.norm.bias"] == 1
    assert plan.shared == {"emb.weight": {2: [Slot(model.head, "weight")]}}
    assert plan.stage_of("blocks.1.linear.weight") == 1
    assert plan.stage_of("gain") == plan.stage_of("blocks.extra") == 0
    assert plan.keeps("gain", 0, is_parameter=True)
    assert not plan.keeps("gain", 2, is_parameter=True)


def test_a_layer_that_two_containers_hold_is_one():
    model = torch.nn.Module()
    shared = torch.nn.Linear(4, 4)
    model.left = torch.nn.ModuleList([shared, torch.nn.Linear(4, 4)])
    model.right = torch.nn.ModuleList([shared, torch.nn.Linear(4, 4)])
    plan = StagePlan(model, ["left.1", "right.1"])
    assert list(plan.layers) == ["left.0", "left.1", "right.1"]


class Buffers(torch.nn.Module):
    """A model with buffers in a container, in a layer, and in one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4))
        self.table = torch.nn.Module()
        self.table.register_buffer("angles", torch.ones(4))
        self.first = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.BatchNorm1d(4)


def test_stages_keep_the_buffers_of_their_layers_and_those_that_all_read():
    plan = StagePlan(Buffers(), ["last"])
    for stage in (0, 1):
        assert plan.keeps("mask", stage, is_parameter=False)
        assert plan.keeps("table.angles", stage, is_parameter=False)
        assert plan.keeps("first.running_mean", stage, is_parameter=False) is (stage == 0)
        assert plan.keeps("last.running_mean", stage, is_parameter=False) is (stage == 1)


class Packed(torch.nn.Module):
    """A layer that returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"unread": x * 2, "hidden": self.linear(x), "power": 3}


class Written(torch.nn.Module):
    """A model that calls its layers as a function does."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.first, self.packed = torch.nn.Linear(4, 4), Packed()
        self.middle, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.plain = torch.nn.Tanh()
        self.written = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.written(self, *args, **kwargs)


def noise_for_one(model: Written, x: torch.Tensor) -> torch.Tensor:
    return model.last(model.middle(model.first(x)) + torch.rand(4))


def noise_for_two(model: Written, x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand(4)
    return model.last(model.middle(model.first(x) + noise) + noise)


def branch_on_value(model: Written, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    return model.last(model.middle(hidden if hidden.sum() > 0 else -hidden))


def branch_on_input(model: Written, x: torch.Tensor) -> torch.Tensor:
    return model.last(model.middle(model.first(x if x.sum() > 0 else -x)))


def back_again(model: Written, x: torch.Tensor) -> torch.Tensor:
    return model.last(model.first(model.middle(model.first(x))))


def one_left_out(model: Written, x: torch.Tensor) -> torch.Tensor:
    return model.last(model.first(x))


def last_left_out(model: Written, x: torch.Tensor) -> torch.Tensor:
    return model.middle(model.first(x))


def a_set(model: Written, x: torch.Tensor) -> Any:
    return model.last(model.middle(model.first(x))), {1}


def plain_layers(model: Written, x: torch.Tensor) -> Any:
    mask = model.plain(x)  # of no layer: each stage computes it
    hidden = model.plain(model.first(x)) + mask
    return model.last(model.plain(model.middle(hidden)) * mask) + mask


def shapes_of(model: Written, x: torch.Tensor) -> Any:
    hidden = model.first(x)
    bias = torch.zeros_like(hidden) + hidden.shape[0]
    return {"out": [model.last(model.middle(hidden) + bias), 3, None]}


def number(model: Written, x: torch.Tensor) -> torch.Tensor:
    return model.last(model.middle(model.first(x))).sum()


def early(model: Written, x: torch.Tensor) -> Any:
    hidden = model.first(x)
    return model.last(model.middle(hidden)), hidden


def structured(model: Written, x: torch.Tensor) -> Any:
    packed = model.packed(model.first(x))
    return model.last(model.middle(packed["hidden"] ** packed["power"]))


@pytest.mark.parametrize(
    "forward", [branch_on_input, plain_layers, shapes_of, number, early, structured]
)
def test_forwards_that_can_be_cut(forward):
    model, x = Written(forward), torch.randn(2, 4)
    expected, structure = tree_flatten(model(x))
    points = ["packed", "middle", "last"] if forward is structured else ["middle", "last"]
    result = staged(model, points, x)
    assert tree_flatten(result)[1] == structure
    for leaf, other in zip(tree_leaves(result), expected, strict=True):
        assert type(leaf) is type(other)
        assert torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else leaf == other


def test_what_no_layer_reads_is_not_passed_on():
    _, route = rehearsed(Written(structured), ["middle"], torch.ones(2, 4))
    assert [call.leaves for call in route.calls][1] == (Value(1), Value(2), 3)
    assert route.passed == [[], [2]]


def test_random_numbers_for_one_stage_are_drawn_there():
    rehearsed(Written(noise_for_one), ["middle", "last"], torch.ones(2, 4))


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (noise_for_two, r"draws random numbers between its layers, which stages \[1, 2\] read"),
        (branch_on_value, "depends on the values of what its layers return"),
        (back_again, "calls 'first', of stage 0, after the first layer of stage 1"),
        (one_left_out, "calls no layer of stage 1 before 'last', of stage 2"),
        (last_left_out, "calls no layer of stage 2 of 3"),
        (a_set, "it returns a set, and only tensors and constants"),
    ],
)
def test_forwards_that_cannot_be_cut_are_refused(forward, words):
    with pytest.raises(ValueError, match=words):
        rehearsed(Written(forward), ["middle", "last"], torch.ones(2, 4))


def test_a_forward_that_calls_other_layers_than_rehearsed_is_refused():
    def changing(model: Written, x: torch.Tensor, twice: bool) -> torch.Tensor:
        hidden = model.first(model.first(x)) if twice else model.first(x)
        return model.last(model.middle(hidden))

    model, x = Written(changing), torch.ones(2, 4)
    plan, route = rehearsed(model, ["middle"], x, twice=False)
    stage = Stage(plan, model, 0, CPU)
    stage.begin(route, [((x,), {"twice": True})], {})
    with pytest.raises(RuntimeError, match="called 'first' where it had called 'middle'"):
        stage()
    assert torch.isfinite(model(x, twice=False)).all()  # its modules are its own again


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([], "split_points is empty"),
        ([""], "has no module ''; it has emb, drop, blocks, head"),
        (["blocks.3"], "has no module 'blocks.3'"),
        (["head", "blocks.1"], "has 'blocks.1' before another of them"),
    ],
)
def test_split_points_that_are_no_modules_in_their_order_are_refused(points, words):
    with pytest.raises(ValueError, match=words):
        StagePlan(LM(), points)


def sizes(*counts: int) -> torch.nn.Module:
    """A model of blocks with so many parameters; of 0 parameters it is no block."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(
        torch.nn.Linear(count, 1, bias=False) if count else torch.nn.Tanh() for count in counts
    )
    return model


@pytest.mark.parametrize(
    ("counts", "stages", "points"),
    [
        ((1, 1, 1, 1), 1, []),
        ((1, 1, 1, 1), 2, [2]),
        ((1, 1, 1, 1), 3, [1, 3]),
        ((1, 1, 1, 1), 4, [1, 2, 3]),
        ((9, 1, 1, 1), 2, [1]),
        ((9, 1, 1, 1), 4, [1, 2, 3]),
        ((1, 1, 1, 9), 2, [3]),
        ((1, 1, 1, 9), 3, [2, 3]),
        ((2, 2, 2, 6), 2, [3]),
        ((1, 2, 1), 2, [2]),  # a block in the middle belongs to what is before it
        ((1, 0, 1, 0, 1, 1), 2, [4]),
        ((1, 2, 3, 4, 5, 6, 7, 8), 3, [4, 6]),
    ],
)
def test_stages_have_about_as_many_parameters_each(counts, stages, points):
    names = [f"layers.{number}" for number in points]
    assert balanced_split_points(sizes(*counts), stages) == names


def test_blocks_are_not_cut():
    blocks = [torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(4))) for _ in range(2)]
    assert balanced_split_points(torch.nn.ModuleList(blocks), 2) == ["1"]


def test_fewer_blocks_than_stages_are_refused():
    with pytest.raises(ValueError, match=r"has 2 blocks .*, and 3 stages"):
        balanced_split_points(sizes(1, 0, 1), 3)
