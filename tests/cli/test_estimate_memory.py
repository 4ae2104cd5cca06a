"""``accel estimate-memory``: the numbers are those of real models, and mistakes are one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_callbacks.cli import estimate_memory as command
from accel_callbacks.cli.main import main
from accel_callbacks.models.memory_estimate import (
    ESTIMATED_DTYPES,
    MemoryEstimate,
    estimate_memory,
)

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Tied(nn.Module):
    """An embedding, a norm, layers, and a head that shares the embedding's weight."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scale", torch.ones(5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run all of it."""
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return self.head(self.norm(hidden))


def held(tensors: Any) -> int:
    """Bytes of real tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def everything(model: nn.Module) -> int:
    return held([*model.parameters(), *model.buffers()])


def meta(**options: int) -> nn.Module:
    with torch.device("meta"):
        return Tied(**options)


def estimates_of(model: nn.Module) -> dict[str, MemoryEstimate]:
    return {one.dtype: one for one in estimate_memory(model, ESTIMATED_DTYPES)}


def test_inference_is_what_converted_models_hold() -> None:
    estimates = estimates_of(meta())
    assert tuple(estimates) == ESTIMATED_DTYPES == command.DTYPES
    assert estimates["fp32"].inference == everything(Tied())
    for name, dtype in HALVES.items():
        assert estimates[name].inference == everything(Tied().to(dtype))


def trained(model: nn.Module) -> torch.optim.Adam:
    """One step of Adam; gradients and states are then there."""
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad])
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("frozen", [False, True])
def test_training_is_what_adam_holds(frozen: bool) -> None:
    model, empty = Tied(), meta()
    for one in (model, empty):
        one.layers[0].requires_grad_(not frozen)
    optimizer = trained(model)
    gradients = held(one.grad for one in model.parameters() if one.grad is not None)
    states = held(value for state in optimizer.state.values() for value in state.values())
    assert estimates_of(empty)["fp32"].training == everything(model) + gradients + states


def test_mixed_precision_adds_the_copies_that_autocast_keeps() -> None:
    model = Tied()
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        model(torch.arange(8))
    weights = [one for one in kept.values() if one.dim() == 2 and 8 not in one.shape]
    copies = held(one for one in weights if one.dtype == torch.bfloat16)
    estimates = estimates_of(meta())
    assert estimates["fp32"].training is not None
    assert estimates["bf16"].training is not None
    biases = held(layer.bias for layer in model.layers) // 2  # added, and not kept
    assert copies == held([model.head.weight, *(layer.weight for layer in model.layers)]) // 2
    more = estimates["bf16"].training - estimates["fp32"].training
    assert more == copies + biases


def test_int8_and_int4_are_linear_weights_with_their_scales() -> None:
    model = Tied()
    quantised = [layer.weight for layer in model.layers]
    rest = everything(Tied().half()) - held(quantised) // 2
    rows = [(weight / 127).round().to(torch.int8) for weight in quantised]
    packed = [row.flatten()[::2] for row in rows]  # two to a byte
    four = held(packed) + held(row.float().reshape(-1, 64).amax(1) for row in rows)
    estimates = estimates_of(meta())
    assert estimates["int8"].inference == rest + held(rows)
    assert estimates["int4"].inference == rest + four
    assert estimates["int8"].training is estimates["int4"].training is None


def test_the_largest_layer() -> None:
    class Blocks(nn.Module):
        _no_split_modules = ("Sequential",)

        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(2, 2)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.wide = nn.Linear(4, 5)

    whole = estimates_of(Blocks())["fp32"]
    assert (whole.layer_name, whole.largest_layer) == ("block", 4 * 40)
    Blocks._no_split_modules = ()
    split = estimates_of(Blocks())["fp32"]
    assert (split.layer_name, split.largest_layer) == ("wide", 4 * 25)
    alone = estimates_of(nn.Linear(2, 2))["fp32"]
    assert (alone.layer_name, alone.largest_layer) == ("weight", 16)
    assert estimates_of(nn.Identity())["fp32"].largest_layer == 0


# --- the command ----------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models.py").write_text(
        "import torch\n"
        "def make(width=10): return torch.nn.Linear(width, width)\n"
        "def needs_width(width): return make(width)\n"
        "def value(): return 3\n"
        "def needs_numbers(): return torch.nn.Linear(int(torch.ones(1).item()) + 1, 2)\n"
        "class Inner:\n    make = torch.nn.Identity\n"
    )
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_factory_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    path = list(sys.path)
    words = ["own_models:make", "--dtypes", "fp32", "bf16", "--json"]
    assert main(["estimate-memory", *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["parameters"] == 110
    assert shown["trainable"] == 110
    assert list(shown["dtypes"]) == ["fp32", "bf16"]
    assert shown["dtypes"]["fp32"]["inference"] == 440
    assert shown["dtypes"]["bf16"]["training"] == 440 + 220 + 440 + 888
    assert sys.path == path


@pytest.mark.usefixtures("here")
def test_text_names_what_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", "own_models:make"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("own_models:make: 110 parameters\nDTYPE  INFERENCE  LARGEST LAYER")
    assert "Not counted: activations" in out
    assert main(["estimate-memory", "own_models:needs_numbers"]) == 0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["own_models:mak"], 1, "module 'own_models' has no attribute 'mak'"),
        (["own_modls:make"], 1, "No module named 'own_modls'"),
        (["own_models:value"], 2, "makes a int, not a torch.nn.Module"),
        (["own_models:needs_width"], 1, "missing 1 required positional argument: 'width'"),
        (["./nowhere"], 1, "transformers makes no model of './nowhere' (looked from"),
        (["."], 1, "give a folder with a config.json, a name on the hub, or module:factory"),
        (["own_models:make", "--dtypes", "fp8"], 2, "invalid choice: 'fp8'"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    assert main(["estimate-memory", *words]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def config_of(transformers: Any, folder: Path) -> Any:
    """A small BERT with a head that is tied to its embeddings."""
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=100, architectures=["BertForMaskedLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    return config


def test_a_config_of_transformers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = config_of(transformers, here / "bert")
    real = transformers.BertForMaskedLM(config)
    for place in ("bert", "bert/config.json"):
        assert main(["estimate-memory", place, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["parameters"] == real.num_parameters()
        assert shown["dtypes"]["fp32"]["inference"] == everything(real)
    assert shown["dtypes"]["fp16"]["inference"] == everything(real.half())
    (here / "bert/config.json").write_text('{"model_type": "brt"}')
    assert main(["estimate-memory", "bert"]) == 1
    assert "accel estimate-memory: error: transformers makes no model of 'bert'" in (
        capsys.readouterr().err
    )


def test_without_transformers_the_install_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["estimate-memory", "."]) == 2
    assert "pip install transformers" in capsys.readouterr().err
