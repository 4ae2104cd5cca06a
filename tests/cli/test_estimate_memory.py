"""``accel estimate-memory``: the numbers are those of real models, and mistakes are one line."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_callbacks.cli import estimate_memory
from accel_callbacks.cli.main import main
from accel_callbacks.models.memory_estimate import ESTIMATED_DTYPES, model_sizes

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


def test_inference_is_what_converted_models_hold() -> None:
    estimates = model_sizes(meta()).estimates
    assert tuple(estimates) == ESTIMATED_DTYPES
    assert estimates["fp32"].weights == everything(Tied())
    for name, dtype in HALVES.items():
        assert estimates[name].weights == everything(Tied().to(dtype))


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
    sizes = model_sizes(empty)
    training = sizes.estimates["fp32"].training
    assert training is not None
    gradients = held(one.grad for one in model.parameters() if one.grad is not None)
    states = held(value for state in optimizer.state.values() for value in state.values())
    assert training.weights == everything(model)
    assert training.gradients == gradients
    assert training.optimizer == states
    assert training.copies == 0
    assert training.total == everything(model) + gradients + states
    assert sizes.parameters == sum(one.numel() for one in model.parameters())
    assert sizes.parameters - sizes.trainable == (272 if frozen else 0)


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
    training = model_sizes(meta()).estimates["bf16"].training
    assert training is not None
    biases = held(layer.bias for layer in model.layers) // 2  # added, and not kept
    assert copies == held([model.head.weight, *(layer.weight for layer in model.layers)]) // 2
    assert training.copies == copies + biases


def test_int8_and_int4_are_linear_weights_with_their_scales() -> None:
    model = Tied()
    quantised = [layer.weight for layer in model.layers]
    rest = everything(Tied().half()) - held(quantised) // 2
    rows = [(weight / 127).round().to(torch.int8) for weight in quantised]
    eight = held(rows) + held(row.float().amax(1) for row in rows)
    packed = [row.flatten()[::2] for row in rows]  # two to a byte
    four = held(packed) + held(row.float().reshape(-1, 64).amax(1) for row in rows)
    estimates = model_sizes(meta()).estimates
    assert estimates["int8"].weights == rest + eight
    assert estimates["int4"].weights == rest + four
    assert estimates["int8"].training is estimates["int4"].training is None


def test_the_largest_layer() -> None:
    class Blocks(nn.Module):
        _no_split_modules = ("Sequential",)

        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(2, 2)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.wide = nn.Linear(4, 5)

    whole = model_sizes(Blocks()).estimates["fp32"]
    assert (whole.layer_name, whole.largest_layer) == ("block", 4 * 40)
    Blocks._no_split_modules = ()
    split = model_sizes(Blocks()).estimates["fp32"]
    assert (split.layer_name, split.largest_layer) == ("wide", 4 * 25)
    alone = model_sizes(nn.Linear(2, 2)).estimates["fp32"]
    assert (alone.layer_name, alone.largest_layer) == ("Linear", 24)
    assert model_sizes(nn.Identity()).estimates["fp32"].largest_layer == 0


def test_an_unknown_dtype_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'bf16'"):
        model_sizes(nn.Linear(1, 1), ["bf6"])


# --- the command ----------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models.py").write_text(
        "import torch\n"
        "def make(width=4): return torch.nn.Linear(width, width)\n"
        "def value(): return 3\n"
        "def needs_numbers(): return torch.nn.Linear(int(torch.ones(1).item()) + 1, 2)\n"
        "class Inner:\n    make = torch.nn.Identity\n"
    )
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_factory_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    path = list(sys.path)
    words = ["own_models:make", "--kwargs", '{"width": 10}', "--dtypes", "fp32", "bf16", "--json"]
    assert main(["estimate-memory", *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["parameters"] == 110
    assert shown["counts_activations"] is False
    assert list(shown["dtypes"]) == ["fp32", "bf16"]
    assert shown["dtypes"]["fp32"]["inference"] == 440
    assert shown["dtypes"]["bf16"]["training"] == {
        "weights": 440, "copies": 220, "gradients": 440, "optimizer": 888, "total": 1988,
    }  # fmt: skip
    assert sys.path == path


@pytest.mark.usefixtures("here")
def test_text_names_what_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", "own_models:make"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("own_models:make: 20 parameters\nDTYPE  INFERENCE  LARGEST LAYER")
    assert "Not counted: activations" in out
    assert main(["estimate-memory", "own_models:needs_numbers", "--device", "cpu"]) == 0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["own_models:mak"], 2, "did you mean 'make'?"),
        (["own_modls:make"], 2, "cannot import 'own_modls'"),
        (["own_models:value"], 2, "makes a int, not a torch.nn.Module"),
        (["own_models:make", "--kwargs", '{"height": 1}'], 1, "unexpected keyword argument"),
        (["own_models:make", "--kwargs", "[1]"], 2, "is not a JSON object"),
        (["own_models:needs_numbers"], 1, "add --device cpu"),
        (["./nowhere"], 2, "no file or folder './nowhere'"),
        (["nowhere.json"], 2, "no file or folder 'nowhere.json'"),
        (["."], 2, "has no config.json"),
        ([".", "--kwargs", '{"a": 1}'], 2, "--kwargs is for module:factory"),
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


def test_a_config_of_transformers(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert "accel estimate-memory: error: transformers makes no model of bert" in (
        capsys.readouterr().err
    )


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A hub that takes a connection and never answers."""
    monkeypatch.setattr(estimate_memory, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield url


def test_c15d_a_name_that_is_nowhere_ends_soon_and_says_what_to_do(
    here: Path,
    silent_hub: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert estimate_memory.PATIENCE < 4  # the rest takes less than a second
    for name in ("nobody/nothing-3.1", "nothing", "no/name/of-a-model"):
        assert main(["estimate-memory", name]) == 1
        err = capfd.readouterr().err
        assert f"{name!r} is no file or folder here (looked from {here})" in err
        assert f"{silent_hub} does not answer" in err
        assert "give a local folder or config.json, or module:factory" in err
        assert "Retrying" not in err
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # nobody listens there
    assert main(["estimate-memory", "nobody/nothing-3.1"]) == 1
    assert "http://127.0.0.1:1 does not answer" in capfd.readouterr().err


@pytest.mark.usefixtures("silent_hub")
def test_c15d_a_cached_model_needs_no_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    cache = tmp_path / "models--own--bert"
    config = config_of(transformers, cache / "snapshots" / ("a" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert main(["estimate-memory", "own/bert", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["parameters"] == transformers.BertForMaskedLM(config).num_parameters()


def test_without_transformers_the_install_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["estimate-memory", "."]) == 2
    assert "pip install transformers" in capsys.readouterr().err


# --- the plan -------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Weights of 8 blocks of 400 bytes, an embedding and a head of 2 kB."""
    sizes = {"embed.weight": 500, "head.weight": 500}
    sizes |= {f"blocks.{number}.mlp.weight": 100 for number in range(8)}
    save_file(
        {name: torch.zeros(count) for name, count in sizes.items()}, tmp_path / "a.safetensors"
    )
    return tmp_path


PLANNED = ["--plan", "--max_memory", "0=6kB,cpu=1.7kB"]


def test_a_plan_of_stored_weights(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", str(stored), *PLANNED]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{stored}: 7.2 kB, of which 2 kB are fetched for each pass"
    assert lines[1:5] == [
        "DEVICE  BUDGET  WEIGHTS  BUFFERS  RESERVE  LEFT",
        "0       6 kB    5.2 kB   0 B      800 B    0 B",
        "cpu     1.7 kB  800 B    0 B      800 B    100 B",
        "disk    -       1.2 kB   0 B      0 B      -",
    ]
    assert lines[6].split() == ["UNITS", "COUNT", "SIZE", "DEVICE", "REASON"]
    assert [line.split()[0] for line in lines[7:11]] == ["embed", "blocks.3", "blocks.5", "head"]
    assert "does not fit cpu (400 B > 100 B left); runs on 0" in lines[9]


def test_a_plan_as_json_and_of_a_file(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(stored / "a.safetensors"), *PLANNED, "--dtypes", "bf16", "--kv_cache", "80B"]
    assert main(["estimate-memory", *words, "--activations=100B", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["bytes"], shown["offloaded"], shown["execution_device"]) == (3600, 0, 0)
    assert shown["devices"][0] == {
        "device": 0, "budget": 6000, "weights": 3600, "buffers": 0, "cache": 80, "window": 0,
        "activations": 100, "reserve": 100, "left": 2220,
    }  # fmt: skip
    assert set(shown["device_map"].values()) == {0}
    assert len(shown["units"]) == 10


@pytest.mark.usefixtures("here")
def test_a_plan_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["own_models:make", "--plan", "--max_memory", "0=40B,1=64B", "--policy", "sequential"]
    assert main(["estimate-memory", *words, "--every_unit"]) == 0
    out = capsys.readouterr().out
    assert "weight  1      64 B  1       does not fit 0 (64 B > 24 B left)" in out
    assert "bias    1      16 B  0       fits" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--plan", "--max_memory", "cpu=1kB"], 1, "at least 4,000 bytes (4 kB) of cpu"),
        (["--plan", "--max_memory", "gpu=1kB"], 2, "'gpu' is no device of a budget"),
        (["--plan", "--max_memory", "0=lots"], 2, "the budget of 0: 'lots' is no size"),
        (["--plan", "--max_memory", "8GB"], 2, "'8GB' is not DEVICE=SIZE"),
        (["--plan", "--kv_cache", "much"], 2, "'much' is no size"),
        (["--plan", "--dtypes", "int4"], 2, "int4 is not among fp32, fp16, bf16"),
        (["--plan", "--parallelism", "dp_shard=2"], 2, "leave --parallelism out"),
        (["--max_memory", "0=8GB"], 2, "--max_memory is for --plan"),
    ],
)
def test_mistakes_of_plans_are_one_line(
    stored: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    assert main(["estimate-memory", str(stored), *words]) == code
    assert said in capsys.readouterr().err


def test_a_folder_without_weights_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 99)
    assert main(["estimate-memory", str(tmp_path), "--plan"]) == 1
    assert "header" in capsys.readouterr().err
    (tmp_path / "model.safetensors").rename(tmp_path / "notes")
    assert main(["estimate-memory", str(tmp_path), "--plan"]) == 1
    assert "no model.safetensors" in capsys.readouterr().err


STAGES = """
import torch

class Stages(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.head = torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
"""


def test_a_pipeline_has_a_stage_on_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "staged_model.py").write_text(STAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["estimate-memory", "staged_model:Stages", "--dtypes", "fp32", "--json"]
    assert main([*words, "--parallelism", "pp=2"]) == 0
    (fp32,) = json.loads(capsys.readouterr().out)["processes"]
    block, embedding = 4 * 72, 4 * 80
    # The first has the embedding, the second a copy of it for the head, and its gradient.
    assert fp32["weights"] == fp32["gradients"] == embedding + 2 * block
    assert main([*words, "--parallelism", "pp=2,dp_shard=4"]) == 0
    (sharded,) = json.loads(capsys.readouterr().out)["processes"]
    assert sharded["optimizer"] < fp32["optimizer"] / 2
    assert main([*words, "--parallelism", "pp=8"]) == 1
    assert "has 4 blocks in its ModuleLists, and 8 stages" in capsys.readouterr().err
