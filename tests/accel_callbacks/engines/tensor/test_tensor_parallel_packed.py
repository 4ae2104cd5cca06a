"""Queries, keys and values in one weight, and Conv1D, cut by tensor parallelism, as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from accel_callbacks import Accelerator, ParallelismConfig, TorchTensorParallelConfig
from accel_callbacks.callbacks import EMA, GradientNorm
from tests.support.bound import BOUND
from tests.support.rounding import assert_reordered

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.*non-ascending order"),
]

WORDS, WIDTH, HEAD = 32, 8, 2


class Conv1D(torch.nn.Module):
    """As transformers has it: outputs are columns, and their number is an attribute."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = torch.nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = torch.nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


def linear(kind: str, inputs: int, outputs: int) -> torch.nn.Module:
    return Conv1D(outputs, inputs) if kind == "conv1d" else torch.nn.Linear(inputs, outputs)


class Block(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv = linear(kind, WIDTH, 3 * WIDTH)
        self.joined = linear(kind, WIDTH, WIDTH)
        self.gate_up = torch.nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down = linear(kind, 4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, -1, HEAD))
        q, k, v = (one.transpose(1, 2) for one in heads.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class LM(torch.nn.Module):
    def __init__(self, kind: str = "linear") -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(kind) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "blocks.*.qkv": "packed_colwise:3",
    "blocks.*.joined": "rowwise",
    "blocks.*.gate_up": "packed_colwise",
    "blocks.*.down": "rowwise",
}
IN_SEQUENCE = {
    "embed": "embedding_rowwise_sequence",
    "blocks.*.norm_?": "sequence_parallel",
    "blocks.*.qkv": "packed_colwise_sequence:3",
    "blocks.*.joined": "rowwise_sequence",
    "blocks.*.gate_up": "packed_colwise_sequence",
    "blocks.*.down": "rowwise_sequence",
    "head": "colwise_sequence_gather_output",
}
SIZES = {"one": None, "tp2": {"tp_size": 2}, "2x2": {"dp_shard_size": 2, "tp_size": 2}}


def accelerator(layout: str, plan: Any = PLAN, **options: Any) -> Accelerator:
    sizes = SIZES[layout]
    if sizes is not None:
        handler = TorchTensorParallelConfig(plan=plan)
        options["parallelism_config"] = ParallelismConfig(**sizes, tp_handler=handler)
    return Accelerator(cpu=True, timeout=BOUND, **options)


def full(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def prepared(accel: Accelerator, kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = LM(kind)
    generator = torch.Generator().manual_seed(3)
    data = list(torch.randint(0, WORDS, (16, 8), generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    return accel.prepare(model, optimizer, DataLoader(data, 4 // accel.data_world))


def steps(accel: Accelerator, model: Any, optimizer: Any, loader: Any) -> dict[str, Any]:
    """Losses, gradients of the first step, norms and the last weights of an epoch."""
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    for batch in loader:
        loss = F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        accel.backward(loss)
        found["losses"].append(accel.reduce(loss.detach(), "mean").item())
        if not found["gradients"]:
            named = model.named_parameters()
            found["gradients"] = {name: full(one.grad).tolist() for name, one in named}
        found["norms"].append(accel.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    state = accel.get_state_dict(model, all_ranks=True)
    return found | {"weights": {name: value.tolist() for name, value in state.items()}}


def trains(layout: str, kind: str, in_sequence: bool = False) -> dict[str, Any]:
    accel = accelerator(layout, IN_SEQUENCE if in_sequence else PLAN)
    return steps(accel, *prepared(accel, kind))


@pytest.mark.parametrize(
    ("kind", "in_sequence"), [("linear", False), ("conv1d", False), ("conv1d", True)]
)
def test_losses_gradients_and_weights_are_those_of_one_process(pool, kind, in_sequence):
    first, second = pool.run(trains, "tp2", kind, in_sequence)
    assert first == second
    assert_reordered(first, trains("one", kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_they_are_under_fsdp_too(pool_of_4, kind):
    results = pool_of_4.run(trains, "2x2", kind)
    assert all(result == results[0] for result in results)
    assert_reordered(results[0], trains("one", kind))


def held(kind: str) -> dict[str, list[int]]:
    accel = accelerator("tp2")
    model, *_ = prepared(accel, kind)
    block = model.blocks[0]
    return {
        name: list(parameter.to_local().shape)
        for name, parameter in block.named_parameters()
        if name.endswith("weight") and hasattr(parameter, "to_local")
    }


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_each_rank_has_half_of_the_weights(pool, kind):
    turned = -1 if kind == "conv1d" else 1
    for shapes in pool.run(held, kind):
        assert shapes == {
            "qkv.weight": [12, 8][::turned],
            "joined.weight": [8, 4][::turned],
            "gate_up.weight": [32, 8],
            "down.weight": [8, 16][::turned],
        }


def save(layout: str, kind: str, folder: str) -> dict[str, Any]:
    accel = accelerator(layout)
    model, optimizer, loader = prepared(accel, kind)
    steps(accel, model, optimizer, loader)
    accel.save_state(f"{folder}/state")
    accel.save_model(model, f"{folder}/model")
    return steps(accel, model, optimizer, loader)


def load(layout: str, kind: str, folder: str) -> dict[str, Any]:
    accel = accelerator(layout)
    objects = prepared(accel, kind, seed=1)
    accel.load_state(f"{folder}/state")
    return steps(accel, *objects)


def saved_and_loaded(pools: dict[str, Any], kind: str, before: str, after: str, folder: Any):
    def run(function: Any, layout: str) -> Any:
        if layout == "one":
            return function(layout, kind, str(folder))
        return pools[layout].run(function, layout, kind, str(folder))[0]

    wanted = run(save, before)
    assert_reordered(run(load, after), wanted)


@pytest.mark.parametrize(("before", "after"), [("tp2", "one"), ("one", "tp2")])
def test_a_checkpoint_is_loaded_by_another_layout(pool, tmp_path, before, after):
    saved_and_loaded({"tp2": pool}, "conv1d", before, after, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
def test_each_layout_loads_the_checkpoints_of_each(pool, pool_of_4, tmp_path, before, after):
    """The two kinds of layers take turns."""
    layouts = list(SIZES)
    kind = ["conv1d", "linear"][(layouts.index(before) + layouts.index(after)) % 2]
    pools = {"tp2": pool, "2x2": pool_of_4}
    saved_and_loaded(pools, kind, before, after, tmp_path)


def with_callbacks(layout: str) -> dict[str, Any]:
    norms, ema = GradientNorm(per_layer=1), EMA(decay=0.5)
    accel = accelerator(layout, callbacks=[norms, ema])
    model, optimizer, loader = prepared(accel, "linear")
    found: list[float] = []
    with accel.run("packed"):
        for batch in loader:
            with accel.accumulate(model):
                logits = model(batch)[:, :-1].flatten(0, 1)
                accel.backward(F.cross_entropy(logits, batch[:, 1:].flatten()))
                optimizer.step()
                optimizer.zero_grad()
            found.append(float(accel.current_run.callback_metrics["grad_norm"]))
        average = ema.state_dict()["average"]
        return {"norms": found, "ema": {key: full(one).tolist() for key, one in average.items()}}


@pytest.mark.slow
def test_callbacks_see_the_whole_weights(pool):
    first, second = pool.run(with_callbacks, "tp2")
    assert first == second
    assert_reordered(first, with_callbacks("one"))


def refusals() -> list[str]:
    texts = []

    def note(plan: dict[str, str], **layers: torch.nn.Module) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            accelerator("tp2", plan).prepare(torch.nn.ModuleDict(layers))
        texts.append(str(error.value))

    note({"qkv": "colwise"}, qkv=torch.nn.Linear(2, 6))
    note({"qkv": "packed_colwise:3"}, qkv=torch.nn.Linear(2, 9))
    note({"qkv": "packed_colwise:0"}, qkv=torch.nn.Linear(2, 6))
    note({"words": "packed_colwise"}, words=torch.nn.Embedding(8, 2))
    note({"head": "colwise_gather_output"}, head=Conv1D(4, 2))
    return texts


def test_what_cannot_work_is_refused_with_what_to_do(pool):
    parts = (
        'say "packed_colwise:3"',
        "each of 3 equal parts over 2 ranks",
        "has the style 'packed_colwise:0'",
        "cuts Linear and Conv1D only",
        "head is a Conv1D, and 'colwise_gather_output' cuts Linear and Embedding only",
    )
    for texts in pool.run(refusals):
        assert all(part in text for part, text in zip(parts, texts, strict=True)), texts
