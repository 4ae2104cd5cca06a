"""Tensor and sequence parallelism, alone and under FSDP2, against one process."""

from __future__ import annotations

import copy
import warnings
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
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
    apply_activation_checkpointing,
    init_empty_weights,
    load_checkpoint_in_model,
)
from accel_callbacks.callbacks import (
    EMA,
    Freeze,
    GradientNorm,
    NonFinite,
    WeightAveraging,
    summarize,
)
from accel_callbacks.engines.tensor.strategy import parallelize
from tests.support.bound import BOUND
from tests.support.rounding import assert_reordered

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
    sizes = {
        "one": None,
        "tp2": {"tp_size": 2},
        "2x2": {"dp_shard_size": 2, "tp_size": 2},
        "2x2x2": {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2},
    }[layout]
    if sizes is not None:
        chosen = plan_named(plan) if isinstance(plan, str) else plan
        handler = TorchTensorParallelConfig(plan=chosen)
        options["parallelism_config"] = ParallelismConfig(**sizes, tp_handler=handler)
    return Accelerator(cpu=True, timeout=BOUND, **options)


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


# --- parity -----------------------------------------------------------------------------------


@pytest.mark.first
@pytest.mark.parametrize("plan", ["ends", "torch", "loss", "sequence", "sequence loss"])
def test_losses_gradients_and_weights_are_those_of_one_process(pool, plan):
    first, second = pool.run(trains, "tp2", plan)
    assert first == second
    assert_reordered(first, alone())


@pytest.mark.parametrize("plan", ["ends", "sequence loss"])
def test_clipping_by_value_and_windows(pool, plan):
    """Gradients of norms in a cut sequence are sums, and clipped as sums."""
    first, second = pool.run(trains, "tp2", plan, "SGD", "value", 3)
    assert first == second
    assert_reordered(first, alone("SGD", "value", 3))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("plan", ["ends", "torch", "loss", "sequence", "sequence loss"])
def test_two_by_two_is_one_process(pool_of_4, plan, window):
    results = pool_of_4.run(trains, "2x2", plan, "SGD", "norm", window)
    assert all(result == results[0] for result in results)
    assert_reordered(results[0], alone("SGD", "norm", window))


def trains_compiled(layout: str, plan: str, regional: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    return trains(layout, plan, dynamo_plugin=plugin)


@pytest.mark.parametrize(
    ("layout", "plan", "regional"),
    [
        ("tp2", "ends", True),  # an embedding whose output is the input of a compiled block
        pytest.param("2x2", "ends", True, marks=pytest.mark.slow),
        pytest.param("2x2", "ends", False, marks=pytest.mark.slow),
        pytest.param("2x2", "sequence", True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_is_one_process(pool, pool_of_4, layout, plan, regional):
    ranks = pool if layout == "tp2" else pool_of_4
    results = ranks.run(trains_compiled, layout, plan, regional)
    assert all(result == results[0] for result in results)
    assert_reordered(results[0], alone())


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ends", "sequence loss"])
def test_replicas_of_shards_of_cut_layers_are_one_process(pool_of_8, plan):
    results = pool_of_8.run(trains, "2x2x2", plan, "SGD", "norm", 3)
    assert all(result == results[0] for result in results)
    assert_reordered(results[0], alone("SGD", "norm", 3))


def kernels(layout: str, optimizer: str, name: str) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = trains(layout, "ends", optimizer, kernels={name: True})
    return [result, sum("steps one by one" in str(one.message) for one in caught)]


@pytest.mark.parametrize("name", ["foreach", "fused"])
def test_kernels_that_take_no_mixed_lists_are_replaced(pool, name):
    (result, warned), _ = pool.run(kernels, "tp2", "SGD", name)
    assert_reordered(result, alone())
    assert warned == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "optimizer", "name"),
    [
        ("tp2", "AdamW", "foreach"),
        ("tp2", "AdamW", "fused"),
        ("2x2", "SGD", "foreach"),
        ("2x2", "AdamW", "fused"),
    ],
)
def test_optimizers_step_alike_with_all_kernels(pool, pool_of_4, layout, optimizer, name):
    ranks = pool if layout == "tp2" else pool_of_4
    result, _ = ranks.run(kernels, layout, optimizer, name)[0]
    assert_reordered(result, alone(optimizer))


# --- what differs between ranks in silence ---------------------------------------------------


class Masked(torch.nn.Module):
    """Dropout of a whole activation, of a cut one, and of a whole one again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 64, bias=False)
        self.down = torch.nn.Linear(64, 4, bias=False)
        self.drop = torch.nn.Dropout(0.5)
        self.masks: list[list[bool]] = []

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        self.masks.append((self.drop(torch.ones_like(x)) != 0).flatten().tolist())
        return self.drop(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropped(x)
        return self.dropped(self.down(self.dropped(self.up(x))))


MLP = {"up": "colwise", "down": "rowwise"}


def masks_of(plan: dict[str, str]) -> list[list[bool]]:
    accel = accelerator("tp2", plan)
    torch.manual_seed(0)
    model = accel.prepare(Masked())
    for _ in range(2):
        accel.backward(model(torch.ones(8, 4)).sum())
    model.eval()
    model(torch.ones(8, 4))
    return model.masks[:6], torch.rand(1).item()


def test_dropout_of_whole_activations_is_alike_and_of_cut_ones_is_not(pool):
    (first, after), (second, also_after) = pool.run(masks_of, MLP)
    for number, (mine, other) in enumerate(zip(first, second, strict=True)):
        assert (mine == other) == (number % 3 != 1)
    assert first[1] != first[4]
    assert after == also_after


def recomputed(checkpointing: bool) -> list[list]:
    accel = accelerator("tp2", "ends")
    torch.manual_seed(0)
    model = LM(dropout=0.3)
    if checkpointing:
        apply_activation_checkpointing(model)
    model = accel.prepare(model)
    torch.manual_seed(1)
    for batch in tokens(8):
        loss_of(accel, model, batch[None])
    return [full(parameter.grad).tolist() for parameter in model.parameters()]


def test_blocks_that_are_computed_again_draw_the_same_numbers(pool):
    assert pool.run(recomputed, True) == pool.run(recomputed, False)


def warned_by(function: Any, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [str(one.message) for one in caught]


def own_batches(apart: bool) -> list[str]:
    def train() -> None:
        accel = accelerator("tp2", "ends")
        model = LM()
        model, optimizer = accel.prepare(model, make("SGD", model))
        batch = torch.stack(tokens(8)[4 * accel.process_index * apart :][:4])
        loss_of(accel, model, batch)
        optimizer.step()

    return [text for text in warned_by(train) if "different" in text]


def test_ranks_of_one_model_that_get_different_batches_are_told(pool):
    assert pool.run(own_batches, False) == [[], []]
    for texts in pool.run(own_batches, True):
        assert "different losses" in texts[0]
        assert "prepare() returned" in texts[0]


def evaluated(apart: bool) -> list[str]:
    def evaluate() -> None:
        accel = accelerator("tp2", "ends")
        model = accel.prepare(LM())
        batch = torch.stack(tokens(8))
        with accel.evaluate(model), torch.no_grad():
            with accel.split_between_processes(batch) as own:
                copy.deepcopy(model)(own if apart else batch)

    return [text for text in warned_by(evaluate) if "different" in text]


def test_ranks_of_one_model_that_evaluate_different_inputs_are_told(pool):
    assert pool.run(evaluated, False) == [[], []]
    for texts in pool.run(evaluated, True):
        assert "LM different inputs" in texts[0]


def partial_gradients(style: str | None) -> list[Any]:
    plan = plan_named("ends")
    plan.pop("blocks.*.attn.q_norm")
    if style:
        plan["blocks.*.attn.q_norm"] = style

    def train() -> None:
        accel = accelerator("tp2", plan)
        model = LM()
        model, optimizer = accel.prepare(model, make("SGD", model))
        loss_of(accel, model, torch.stack(tokens(4)))
        optimizer.step()

    return [text for text in warned_by(train) if "different" in text]


def test_whole_parameters_with_partial_gradients_are_named(pool):
    assert pool.run(partial_gradients, "replicated_with_grad_allreduce") == [[], []]
    for texts in pool.run(partial_gradients, None):
        assert "'blocks.0.attn.q_norm.weight'" in texts[0]
        assert "replicated_with_grad_allreduce" in texts[0]


def too_long(length: int) -> None:
    accel = accelerator("tp2", "sequence")
    model = accel.prepare(LM())
    loss_of(accel, model, torch.stack(tokens(2, length)))


def test_sequences_that_the_ranks_cannot_share_are_refused(pool):
    for kind, text in pool.outcomes(too_long, 7):
        assert kind == "ValueError"
        assert "sequence of 7" in text


# --- the parts of an Accelerator --------------------------------------------------------------


def with_callbacks(layout: str) -> dict[str, Any]:
    norms = GradientNorm(per_layer=1)
    freeze, ema = Freeze({"blocks.0.*": 2}), EMA(decay=0.5)
    mean = WeightAveraging()
    accel = accelerator(layout, "ends", callbacks=[norms, freeze, ema, NonFinite(), mean])
    torch.manual_seed(0)
    model = LM()
    loader = DataLoader(tokens(32), 8 // accel.data_world)
    model, optimizer, loader = accel.prepare(model, make("SGD", model), loader)
    result: dict[str, Any] = {"norms": [], "frozen": []}
    with accel.run("callbacks"):
        for batch in loader:
            with accel.accumulate(model):
                loss_of(accel, model, batch)
                optimizer.step()
                optimizer.zero_grad()
            result["norms"].append(float(accel.current_run.callback_metrics["grad_norm"]))
            result["frozen"].append(full(accel.unwrap_model(model).blocks[0].norm_1.bias).tolist())
        for name, averages in (("ema", ema), ("mean", mean)):
            state = averages.state_dict()["average"]
            result[name] = {key: full(value).tolist() for key, value in state.items()}
        summary = summarize(accel.unwrap_model(model))
    result["summary"] = [layer.parameters for layer in summary.layers]
    return result


def test_callbacks_see_the_whole_model(pool):
    first, second = pool.run(with_callbacks, "tp2")
    assert first == second
    assert_reordered(first, with_callbacks("one"))


@pytest.mark.slow
def test_callbacks_see_the_whole_model_under_fsdp_too(pool_of_4):
    results = pool_of_4.run(with_callbacks, "2x2")
    assert all(result == results[0] for result in results)
    assert_reordered(results[0], with_callbacks("one"))


def spoils(weight: torch.Tensor, value: float) -> None:
    """Put a value into the gradient of this rank's part."""
    weight.register_post_accumulate_grad_hook(
        lambda one: one.grad.to_local()[0, 0].fill_(value) and None
    )


def with_nan(layout: str) -> str:
    accel = accelerator(layout, "ends", callbacks=[NonFinite()])
    torch.manual_seed(0)
    model = LM()
    model, optimizer = accel.prepare(model, make("SGD", model))
    if accel.process_index == 1:
        spoils(model.blocks[0].up_proj.weight, float("nan"))
    loss_of(accel, model, torch.stack(tokens(4)))
    try:
        optimizer.step()
    except FloatingPointError as error:
        return str(error)
    return ""


def test_a_nan_in_the_part_of_one_rank_stops_all(pool):
    texts = pool.run(with_nan, "tp2")
    assert all(texts)
    assert "blocks.0.up_proj.weight" in texts[1]


def scaled(layout: str) -> list[Any]:
    accel = accelerator(layout, "ends", mixed_precision="fp16")
    torch.manual_seed(0)
    model = LM()
    model, optimizer = accel.prepare(model, make("SGD", model))
    before = full(model.blocks[0].up_proj.weight)
    loss_of(accel, model, torch.stack(tokens(4)))
    if accel.process_index == 1:
        model.blocks[0].up_proj.weight.grad.to_local()[0, 0] = float("inf")
    optimizer.step()
    skipped = torch.equal(before, full(model.blocks[0].up_proj.weight))
    optimizer.zero_grad()
    loss_of(accel, model, torch.stack(tokens(4)))
    optimizer.step()
    moved = not torch.equal(before, full(model.blocks[0].up_proj.weight))
    return [skipped, moved, accel.scaler.get_scale()]


def test_an_overflow_in_the_part_of_one_rank_skips_the_step_on_all(pool):
    first, second = pool.run(scaled, "tp2")
    assert first == second == [True, True, 2.0**15]


def starts_empty(layout: str, folder: str) -> list[Any]:
    accel = accelerator(layout, "ends")
    torch.manual_seed(0)
    whole = LM()
    with init_empty_weights():
        model = LM()
        model.head.weight = model.embed.weight
    model, optimizer = accel.prepare(model, make("SGD", model))
    load_checkpoint_in_model(model, f"{folder}/plain", strict=True)
    state = accel.get_state_dict(model, all_ranks=True)
    same = all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
    accel.save_model(model, f"{folder}/again")
    loss_of(accel, model, torch.stack(tokens(4)))
    optimizer.step()
    with accel.full_parameters(model, writeback=True):
        shape = tuple(model.blocks[0].up_proj.weight.shape)
        model.blocks[0].up_proj.weight.data.fill_(accel.process_index + 1.0)
    written = full(model.blocks[0].up_proj.weight)
    tied = accel.unwrap_model(model).head.weight is model.embed.weight
    return [same, shape, bool((written == 1).all()), tied]


def test_empty_models_are_filled_saved_and_seen_whole(pool, tmp_path):
    torch.manual_seed(0)
    plain = LM()
    Accelerator(cpu=True).save_model(plain, tmp_path / "plain")
    for result in pool.run(starts_empty, "tp2", str(tmp_path)):
        assert result == [True, (32, 8), True, True]
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in saved.items())


def refusals(layout: str) -> list[str]:
    accel = accelerator(layout, "ends")
    model = LM()
    texts = []

    def note(call: Any) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            call()
        texts.append(str(error.value))

    note(lambda: accel.prepare(model, torch.optim.LBFGS(model.parameters())))
    model = accel.prepare(LM())
    note(lambda: LocalSGD(accel, model, 2).__enter__())
    note(lambda: accel.join_uneven_inputs([model]).__enter__())
    note(lambda: accelerator("tp2").prepare(torch.nn.Linear(2, 2)))
    note(lambda: accelerator("tp2").prepare(LM()))
    packed = torch.nn.ModuleDict({"qkv": torch.nn.Linear(2, 6)})
    note(lambda: accelerator("tp2", {"qkv": "colwise"}).prepare(packed))
    odd = torch.nn.ModuleDict({"up": torch.nn.Linear(2, 3)})
    note(lambda: accelerator("tp2", {"up": "colwise"}).prepare(odd))
    note(lambda: accelerator("tp2", {"up": "columnwise"}).prepare(odd))
    note(lambda: accelerator("tp2", {"down": "colwise"}).prepare(odd))
    conv = torch.nn.ModuleDict({"up": torch.nn.Conv1d(2, 2, 1)})
    note(lambda: accelerator("tp2", {"up": "colwise"}).prepare(conv))
    alone = torch.nn.ModuleDict({"up": torch.nn.Linear(2, 4), "down": torch.nn.Linear(4, 2)})
    note(lambda: accelerator("tp2", {"up": "colwise"}).prepare(alone))
    heads = torch.nn.ModuleDict({key: torch.nn.Linear(6, 6) for key in ("q_proj", "o_proj")})
    heads.num_heads = 3
    attention = {"q_proj": "colwise", "o_proj": "rowwise"}
    note(lambda: accelerator("tp2", attention).prepare(heads))
    note(lambda: accel.prepare(torch.optim.Rprop(model.parameters())))
    replicas = ParallelismConfig(dp_replicate_size=2, tp_size=2)
    note(lambda: Accelerator(cpu=True, parallelism_config=replicas))
    return texts


def test_what_cannot_work_is_refused_with_what_to_do(pool):
    for texts in pool.run(refusals, "tp2"):
        for text, part in zip(
            texts,
            (
                "LBFGS",
                "LocalSGD",
                "join_uneven_inputs",
                "no layers with the usual names",
                "'blocks.*.attn.q_proj': 'colwise'",
                "several layers in one",
                "has 3 rows",
                "'colwise'",
                "'down'",
                "Conv1d",
                "'up' leaves each rank a part of its output",
                "has 3 heads, which tp_size=2 does not divide",
                "Rprop does not work with sharded models",
                "",
            ),
            strict=True,
        ):
            assert part in text


def two_models(layout: str) -> list[Any]:
    """In any order of prepare, and an optimizer of both that stepped before."""
    accel = accelerator(layout, "ends")
    torch.manual_seed(0)
    first, second = LM(), LM()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1, momentum=0.9)
    batch = torch.stack(tokens(8))
    F.cross_entropy((first(batch) + second(batch)).flatten(0, 1), batch.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer = accel.prepare(optimizer)
    second = accel.prepare(second)
    first = accel.prepare(first)
    for _ in range(2):
        logits = (first(batch) + second(batch)).flatten(0, 1)
        accel.backward(F.cross_entropy(logits, batch.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    states = [accel.get_state_dict(one, all_ranks=True) for one in (first, second)]
    return {str(n): {k: v.tolist() for k, v in one.items()} for n, one in enumerate(states)}


def test_two_models_and_an_optimizer_that_comes_first(pool):
    for result in pool.run(two_models, "tp2"):
        assert_reordered(result, two_models("one"))


@pytest.mark.slow
def test_two_models_and_an_optimizer_that_comes_first_under_fsdp(pool_of_4):
    for result in pool_of_4.run(two_models, "2x2"):
        assert_reordered(result, two_models("one"))


class Beside(torch.nn.Module):
    """A cut part that FSDP is told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.out = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(torch.tanh(self.up(x))))


def ignored_by_fsdp(layout: str) -> dict[str, Any]:
    options = {}
    if layout != "one":
        plugin = FullyShardedDataParallelPlugin(ignored_modules="up|down")
        options = {"fsdp_plugin": plugin}
    accel = accelerator(layout, MLP, **options)
    torch.manual_seed(0)
    model = Beside()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(data, 8 // accel.data_world)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    for batch in loader:
        accel.backward((model(batch) - batch).square().mean())
        accel.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    state = accel.get_state_dict(model, all_ranks=True)
    return {name: value.tolist() for name, value in state.items()}


@pytest.mark.slow
def test_cut_parameters_that_fsdp_ignores_are_averaged_over_data(pool_of_4):
    for result in pool_of_4.run(ignored_by_fsdp, "2x2"):
        assert_reordered(result, ignored_by_fsdp("one"))


def low_precision(layout: str) -> list[str]:
    plugin = FullyShardedDataParallelPlugin()
    accel = accelerator(layout, "ends", fsdp_plugin=plugin, mixed_precision="bf16")
    model = accel.prepare(LM().bfloat16())
    loss_of(accel, model, torch.stack(tokens(4)))
    return sorted(
        {str(one.dtype) for one in model.parameters()}
        | {str(one.to_local().dtype) for one in model.parameters()}
    )


@pytest.mark.slow
def test_cut_weights_of_few_bits_get_float32_masters_under_fsdp_too(pool_of_4):
    assert pool_of_4.run(low_precision, "2x2") == [["torch.float32"]] * 4


@pytest.mark.slow
def test_empty_models_under_fsdp(pool_of_4, tmp_path):
    torch.manual_seed(0)
    plain = LM()
    Accelerator(cpu=True).save_model(plain, tmp_path / "plain")
    for result in pool_of_4.run(starts_empty, "2x2", str(tmp_path)):
        assert result == [True, (32, 8), True, True]
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in saved.items())


@pytest.mark.slow
def test_a_nan_or_an_overflow_on_one_rank_under_fsdp(pool_of_4):
    assert all(pool_of_4.run(with_nan, "2x2"))
    results = pool_of_4.run(scaled, "2x2")
    assert results == [[True, True, 2.0**15]] * 4


def brings_its_own(layout: str, cut: bool) -> dict[str, Any]:
    """A model with a plan, as those of transformers; or that its user has cut already."""
    accel = accelerator(layout)
    # Data ranks that built it apart take the weights of the first; those of one model did not.
    torch.manual_seed(accel.process_index // 2 if cut and layout != "one" else 0)
    model = LM(words=32)
    model._tp_plan = plan_named("ends")
    if cut and layout != "one":
        torch.manual_seed(accel.process_index)
        for norm in (model.norm, model.blocks[0].norm_1):  # built apart on each rank
            torch.nn.init.normal_(norm.bias, std=0.0 if accel.is_main_process else 1.0)
        parallelize(model, model._tp_plan, accel.torch_device_mesh["tp"])
    model, optimizer = accel.prepare(model, make("SGD", model))
    loader = accel.prepare(DataLoader(tokens(16, words=32), 8 // accel.data_world))
    for batch in loader:
        loss_of(accel, model, batch)
        accel.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = accel.get_state_dict(model, all_ranks=True)
    return {name: value.tolist() for name, value in state.items()}


@pytest.mark.parametrize("cut", [False, True])
def test_models_with_a_plan_of_their_own_and_cut_ones_are_prepared(pool, cut):
    for result in pool.run(brings_its_own, "tp2", cut):
        assert_reordered(result, brings_its_own("one", False))


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
def test_models_that_are_cut_already_are_sharded(pool_of_4, cut):
    for result in pool_of_4.run(brings_its_own, "2x2", cut):
        assert_reordered(result, brings_its_own("one", False))


def cut_elsewhere() -> None:
    accel = accelerator("2x2")
    model = LM()
    other = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
    parallelize(model, {"blocks.*.up_proj": "colwise", "blocks.*.down_proj": "rowwise"}, other)
    accel.prepare(model)


@pytest.mark.slow
def test_a_model_that_is_cut_over_another_mesh_is_refused(pool_of_4):
    for kind, text in pool_of_4.outcomes(cut_elsewhere):
        assert kind == "ValueError"
        assert 'torch_device_mesh["tp"]' in text
