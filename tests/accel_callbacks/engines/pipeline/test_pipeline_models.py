"""Pipelines of models that people have, against one process: transformers', tied, with labels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelConfig,
)
from accel_callbacks.callbacks import NonFinite
from tests.support.bound import BOUND
from tests.support.ring_attention import ring_on_cpu
from tests.support.rounding import assert_reordered

pytestmark = pytest.mark.distributed

transformers = pytest.importorskip("transformers")
known_models = pytest.importorskip("tests.support.known_models")

WORDS, WIDTH = known_models.WORDS, known_models.WIDTH


class Scaled(torch.nn.Module):
    """A model whose own parameters are read in several stages, and its first layer in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.7]))
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.activation = torch.nn.Tanh()  # of all stages
        self.register_buffer("offset", torch.tensor(0.1))

    def forward(self, input_ids: torch.Tensor, *, labels: torch.Tensor) -> Any:
        hidden = first = self.embed(input_ids)
        for block in self.blocks:
            # Written into, as models do that save memory.
            hidden += self.activation(block(hidden.clone())) * self.scale + self.offset
        logits = (hidden + first) @ self.embed.weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)


#: Builders, and split points other than the default.
MODELS: dict[str, tuple[Callable[[], Any], list[str] | None]] = {
    **{name: (build, None) for name, build in known_models.BUILDERS.items()},
    "llama": (known_models.llama, ["model.layers.1"]),
    "t5": (known_models.t5, ["decoder.block.0"]),
    "mixtral": (known_models.mixtral, ["model.layers.2"]),
}


def batches(kind: str) -> Iterator[dict[str, torch.Tensor]]:
    for batch in known_models.batches(kind):
        if kind.startswith("scaled"):
            del batch["attention_mask"]
        yield batch


def arrangement(
    stages: int, shards: int = 1, cuts: int = 1, replicas: int = 1
) -> ParallelismConfig:
    """Stages with replicas, with weights sharded over ranks, or layers cut by ``cuts``."""
    handler = TorchTensorParallelConfig(plan="proposed") if cuts > 1 else None
    return ParallelismConfig(
        pp_size=stages,
        dp_shard_size=shards,
        dp_replicate_size=replicas,
        tp_size=cuts,
        tp_handler=handler,
    )


def trains(
    kind: str,
    stages: int,
    shards: int = 1,
    window: int = 1,
    cuts: int = 1,
    schedule: str = "1F1B",
    replicas: int = 1,
) -> Any:
    """Losses, norms, weights and outputs."""
    options: dict[str, Any] = {"cpu": True, "timeout": BOUND}
    if stages > 1:
        options["parallelism_config"] = arrangement(stages, shards, cuts, replicas)
    accel = Accelerator(gradient_accumulation_steps=window, **options)
    torch.manual_seed(0)
    build, points = MODELS[kind]
    inner = build()
    if stages > 1 and points is not None:
        model = accel.prepare_pipeline(inner, points, schedule=schedule, microbatches=4)
    else:
        model = accel.prepare(inner)
    optimizer = accel.prepare(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))
    rows = 8 // (accel.data_world if stages > 1 else 1)
    losses, norms = [], []
    for batch in batches(kind):
        part = slice(rows * accel.strategy.data.rank, rows * (accel.strategy.data.rank + 1))
        with accel.accumulate(model):
            outputs = model(**{name: tensor[part] for name, tensor in batch.items()})
            accel.backward(outputs.loss)
            if accel.sync_gradients:
                norms.append(accel.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accel.reduce(outputs.loss.detach(), "mean").item())
    model.eval()
    with torch.no_grad():
        outputs = model(**{name: tensor[:6] for name, tensor in batch.items()})
    state = accel.get_state_dict(model, all_ranks=True)
    return {
        "losses": losses,
        "norms": norms,
        "weights": {name: tensor.tolist() for name, tensor in state.items()},
        "logits": outputs.logits.tolist(),
        "loss": outputs.loss.item(),
    }


@cache
def alone(kind: str, window: int = 1) -> Any:
    return trains(kind, 1, window=window)


MODELS["scaled"] = (Scaled, ["blocks.2"])
MODELS["scaled twice"] = (Scaled, ["blocks.1", "blocks.2", "blocks.3"])


@pytest.mark.parametrize("kind", [kind for kind in MODELS if " " not in kind])
def test_models_train_and_evaluate_as_on_one_process(pool, kind):
    first, second = pool.run(trains, kind, 2)
    assert first == second
    assert_reordered(first, alone(kind))


def test_several_stages_of_a_rank_share_weights(pool):
    first, second = pool.run(trains, "scaled twice", 2, 1, 1, 1, "Interleaved1F1B")
    assert first == second
    assert_reordered(first, alone("scaled"))


@pytest.mark.parametrize(
    "kind", ["scaled", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "t5"))]
)
def test_tied_weights_are_sharded_and_have_windows(pool_of_4, kind):
    """Two stages, each over two ranks that read different data."""
    results = pool_of_4.run(trains, kind, 2, 2, 2)
    assert all(result == results[0] for result in results)
    assert_reordered(results[0], alone(kind, 2))


@pytest.mark.parametrize("kind", ["scaled", pytest.param("llama", marks=pytest.mark.slow)])
def test_stages_have_replicas(pool_of_4, kind):
    """Two stages, each with a whole copy on two ranks that read different data."""
    results = pool_of_4.run(trains, kind, 2, 1, 2, 1, "1F1B", 2)
    assert all(result == results[0] for result in results)
    assert_reordered(results[0], alone(kind, 2))


def shares_sequences(sizes: dict[str, int]) -> Any:
    """Losses and norms of LLaMA whose sequences are cut, and a call that would be wrong."""
    accel = Accelerator(
        cpu=True,
        timeout=BOUND,
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**sizes),
    )
    torch.manual_seed(0)
    model = accel.prepare(known_models.llama())
    optimizer = accel.prepare(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))
    losses, norms = [], []
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        tokens = torch.randint(1, WORDS, (8, 8), generator=generator)
        batch = {
            "input_ids": tokens,
            "labels": tokens.clone(),
            "shift_labels": F.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous(),
            "position_ids": torch.arange(8).repeat(8, 1),
        }
        buffers = list(batch.values())
        with (
            ring_on_cpu() if "cp_size" in sizes else nullcontext(),
            accel.accumulate(model),
            accel.maybe_context_parallel(buffers, [1] * 4, no_restore_buffers=set(buffers)),
        ):
            if not losses:
                with pytest.raises(ValueError, match="called without position_ids"):
                    model(**{**batch, "position_ids": None})
            outputs = model(**batch)
            accel.backward(outputs.loss)
            if accel.sync_gradients:
                norms.append(accel.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accel.reduce(outputs.loss.detach(), "mean").item())
    return {"losses": losses, "norms": norms}


@pytest.mark.parametrize("axis", ["sp_size", pytest.param("cp_size", marks=pytest.mark.slow)])
def test_sequences_are_shared_in_stages_as_without_them(pool, pool_of_4, axis):
    expected = pool.run(shares_sequences, {axis: 2})[0]
    for result in pool_of_4.run(shares_sequences, {axis: 2, "pp_size": 2}):
        assert_reordered(result, expected)


@pytest.mark.parametrize("kind", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_layers_of_stages_are_cut_too(pool_of_4, kind):
    """Two stages of two ranks, each of which has a part of each layer; LLaMA is tied."""
    results = pool_of_4.run(trains, kind, 2, 1, 2, 2)
    assert all(result == results[0] for result in results)
    assert_reordered(results[0], alone(kind, 2))


def refuses_options() -> None:
    for name, value in {"mixed_precision_policy": "bf16", "cpu_offload": True}.items():
        with pytest.raises(ValueError, match=f"{name} of the fsdp_plugin does not go with a pip"):
            Accelerator(
                cpu=True,
                timeout=BOUND,
                fsdp_plugin=FullyShardedDataParallelPlugin(**{name: value}),
                parallelism_config=ParallelismConfig(pp_size=2, dp_shard_size=2),
            )


def test_options_of_fsdp_without_effect_on_stages_are_refused(pool_of_4):
    pool_of_4.run(refuses_options)


def recomputes(policy: bool) -> Any:
    """The loss, the gradients of this rank's blocks, and how often these were computed."""
    accel = Accelerator(
        cpu=True,
        timeout=BOUND,
        fsdp_plugin=FullyShardedDataParallelPlugin(activation_checkpointing=policy),
        parallelism_config=ParallelismConfig(pp_size=2, dp_shard_size=2),
    )
    torch.manual_seed(0)
    inner = known_models.llama()
    calls: list[Any] = []
    for layer in inner.model.layers:
        # Before it, because what is computed again ends at the last tensor that backward needs.
        layer.mlp.register_forward_pre_hook(lambda module, _: calls.append(module))
    model = accel.prepare_pipeline(inner, microbatches=2)
    loss = model(**next(batches("llama"))).loss
    accel.backward(loss)
    gradients = {
        name: parameter.grad.full_tensor().tolist()
        for name, parameter in accel.unwrap_model(model).named_parameters()
        if parameter.grad is not None
    }
    return loss.item(), gradients, len(calls)


def test_blocks_of_stages_are_computed_again_where_the_fsdp_plugin_says_so(pool_of_4):
    once, twice = (pool_of_4.run(recomputes, policy) for policy in (False, True))
    for (loss, gradients, calls), (same, alike, doubled) in zip(once, twice, strict=True):
        assert (loss, gradients) == (same, alike)
        assert doubled == 2 * calls > 0


def goes_on(
    stages: int, folder: str, load: bool, kind: str = "scaled", cuts: int = 1, replicas: int = 1
) -> Any:
    """Train four batches, or the last two from a checkpoint."""
    options: dict[str, Any] = {}
    if stages > 1:
        options["parallelism_config"] = arrangement(stages, 1, cuts, replicas)
    accel = Accelerator(cpu=True, timeout=BOUND, **options)
    torch.manual_seed(int(load))
    build, points = MODELS[kind]
    model = build()
    model = accel.prepare_pipeline(model, points) if stages > 1 else accel.prepare(model)
    optimizer = accel.prepare(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))
    if load:
        if kind == "scaled":
            accel.unwrap_model(model).offset.fill_(7.0)
        accel.load_state(folder)
    for number, batch in enumerate(batches(kind)):
        if load and number < 2:
            continue
        accel.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and not load:
            accel.save_state(folder)
    state = accel.get_state_dict(model, all_ranks=True)
    return {name: tensor.tolist() for name, tensor in state.items()}


@pytest.mark.parametrize("kind", ["scaled", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_checkpoint_of_shared_weights_goes_on_elsewhere(pool, tmp_path, kind):
    for saver, loader in ((2, 1), (1, 2), (2, 2)):
        folder = str(tmp_path / f"{saver}-{loader}")

        def run(stages: int, *args: Any) -> Any:
            if stages == 1:
                return goes_on(1, *args, kind)
            first, second = pool.run(goes_on, stages, *args, kind)
            assert first == second
            return first

        wanted = run(saver, folder, False)
        resumed = run(loader, folder, True)
        if saver == loader:
            assert resumed == wanted
        else:
            assert_reordered(resumed, wanted)


@pytest.mark.parametrize(
    "options", [pytest.param(("llama", 2), marks=pytest.mark.slow), ("scaled", 1, 2)]
)
def test_a_checkpoint_of_cut_or_replicated_stages_goes_on_elsewhere(pool_of_4, tmp_path, options):
    kind = options[0]
    wanted = goes_on(1, str(tmp_path / "whole"), False, kind)
    saved = pool_of_4.run(goes_on, 2, str(tmp_path / "spread"), False, *options)
    assert_reordered(saved[0], wanted)
    assert_reordered(goes_on(1, str(tmp_path / "spread"), True, kind), wanted)
    for folder in ("spread", "whole"):
        resumed = pool_of_4.run(goes_on, 2, str(tmp_path / folder), True, *options)
        assert all(one == resumed[0] for one in resumed)
        assert_reordered(resumed[0], wanted)


def with_dropout() -> Any:
    """The losses of a model with dropout, and outputs that are asked for in vain."""
    accel = Accelerator(cpu=True, timeout=BOUND, parallelism_config=ParallelismConfig(pp_size=2))
    torch.manual_seed(0)
    model = accel.prepare_pipeline(known_models.gpt2(dropout=0.5), microbatches=2)
    batch = next(batches("gpt2"))
    outputs = [model(**batch) for _ in range(3)]
    assert outputs[0].logits is None
    with pytest.raises(ValueError, match=r"output_hidden_states=True: .* leave it out"):
        model(**batch, output_hidden_states=True)
    model.eval()
    evaluated = [model(**batch).loss.item() for _ in range(2)]
    return [one.loss.item() for one in outputs], evaluated


def test_dropout_draws_anew_in_training_only(pool):
    (first, evaluated), second = pool.run(with_dropout)
    assert (first, evaluated) == second
    assert len(set(first)) == 3
    assert evaluated[0] == evaluated[1]
    assert all(map(math.isfinite, first))


def generates(stages: int, kind: str) -> Any:
    """What a model generates of prompts of two lengths, greedily and by draws."""
    options = {"parallelism_config": arrangement(stages)} if stages > 1 else {}
    accel = Accelerator(cpu=True, timeout=BOUND, **options)
    torch.manual_seed(0)
    model = accel.prepare(MODELS[kind][0]()).eval()
    prompts = next(batches(kind))["input_ids"][:3, :4]
    mask = torch.ones_like(prompts)
    mask[0, :2] = 0
    texts = [
        model.generate(
            prompts, attention_mask=mask, max_new_tokens=5, do_sample=draws, use_cache=False,
            pad_token_id=0, eos_token_id=None,
        )
        for draws in (False, True)
    ]  # fmt: skip
    return [text.tolist() for text in texts]


def test_a_pipeline_generates_what_one_process_does(pool):
    first, second = pool.run(generates, 2, "gpt2")
    assert first == second == generates(1, "gpt2")
    for kind, text in pool.outcomes(generates, 2, "t5"):
        assert kind == "ValueError"
        assert "calls its encoder alone" in text


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, is_poisoned: bool) -> torch.Tensor:
        ctx.factor = math.nan if is_poisoned else 1.0
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


class Poisoned(torch.nn.Linear):
    """A layer whose gradient is not finite where the loop says so."""

    is_poisoned = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _Poison.apply(super().forward(hidden), self.is_poisoned)


def poisoned(stages: int) -> Any:
    """Train with a gradient that is not finite in the first stage, in one step."""
    options = {"parallelism_config": arrangement(stages)} if stages > 1 else {}
    accel = Accelerator(cpu=True, timeout=BOUND, callbacks=[NonFinite(action="skip")], **options)
    torch.manual_seed(0)
    layers = [Poisoned(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)]
    model: Any = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    cut = partial(accel.prepare_pipeline, split_points=["1"], loss_fn=F.mse_loss)
    model = (accel.prepare if stages == 1 else cut)(model)
    optimizer = accel.prepare(optimizer)
    with accel.run("test", resume=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            layers[0].is_poisoned = step == 2
            inputs = torch.full((4, 4), 1.0 + step)
            target = {"target": inputs} if stages > 1 else {}
            outputs = model(inputs, **target)
            accel.backward(outputs if stages > 1 else F.mse_loss(outputs, inputs))
            optimizer.step()
            optimizer.zero_grad()
    state = accel.get_state_dict(model, all_ranks=True)
    return {name: tensor.tolist() for name, tensor in state.items()}


def test_a_gradient_that_is_not_finite_in_one_stage_skips_the_step_on_all(pool):
    first, second = pool.run(poisoned, 2)
    assert first == second
    assert_reordered(first, poisoned(1))
    assert all(map(math.isfinite, [*first["0.bias"], *first["2.bias"]]))
