"""Models of transformers on disk: `generate`, `save_pretrained`, and its own `device_map`."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accel_callbacks.models.offload.placeholder import AbsentWeight

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 64, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
KINDS: dict[str, Any] = {
    "GPT2": ({"n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 64}, "transformer", "wte"),
    "Llama": (
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        },
        "model",
        "embed_tokens",
    ),
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["all", "layers", "one layer", "embedding resident"])
def device_map(request: pytest.FixtureRequest, kind: str) -> dict[str, str]:
    _, base, embedding = KINDS[kind]
    layers = f"{base}.{'h' if kind == 'GPT2' else 'layers'}"
    return {
        "all": {"": "disk"},
        "layers": {"": "cpu", layers: "disk"},
        "one layer": {"": "cpu", f"{layers}.1": "disk"},
        "embedding resident": {"": "disk", f"{base}.{embedding}": "cpu", "lm_head": "cpu"},
    }[request.param]


def resident(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**KINDS[kind][0], **SIZES)
    return getattr(transformers, CLASSES[kind])(config).eval()


def check(model: Any, reference: Any) -> None:
    tokens = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = reference.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, **options), expected)
    assert any(isinstance(one, AbsentWeight) for one in model.parameters())


def test_loaded_and_dispatched(kind: str, device_map: dict[str, str], tmp_path: Path) -> None:
    reference = resident(kind)
    reference.save_pretrained(tmp_path / "checkpoint")
    with init_empty_weights():
        model = type(reference)(reference.config).eval()
    model.tie_weights()
    model = load_checkpoint_and_dispatch(model, tmp_path / "checkpoint", device_map)
    check(model, reference)
    model.save_pretrained(tmp_path / "saved")
    saved = type(reference).from_pretrained(tmp_path / "saved").state_dict()
    for name, value in reference.state_dict().items():
        assert torch.equal(saved[name], value), name


def test_dispatched(kind: str, device_map: dict[str, str], tmp_path: Path) -> None:
    reference = resident(kind)
    check(dispatch_model(deepcopy(reference), device_map, offload_dir=tmp_path), reference)


def test_its_own_device_map(
    kind: str, device_map: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`from_pretrained(device_map=...)` with our function where Accelerate's is called."""
    pytest.importorskip("accelerate", reason="transformers asks for it: scripts/test_adapters")
    monkeypatch.setattr("transformers.integrations.accelerate.dispatch_model", dispatch_model)
    reference = resident(kind)
    reference.save_pretrained(tmp_path / "checkpoint")
    folder = tmp_path / "folder"
    model = type(reference).from_pretrained(
        tmp_path / "checkpoint", device_map=device_map, offload_folder=folder
    )
    check(model.eval(), reference)
    assert not folder.exists() or not list(folder.iterdir())
