"""Adapters as the real peft writes and reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file

from accel_callbacks import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from accel_callbacks.callbacks import Checkpoint
from checkpoint_io import save_model

peft = pytest.importorskip("peft", reason="peft is not installed: scripts/test_adapters")
transformers = pytest.importorskip("transformers")

FILES = ("adapter_config.json", "adapter_model.safetensors")


def body() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)
    )


def language_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def of_body(**options) -> peft.PeftModel:
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], **options)
    return peft.get_peft_model(body(), config)


def of_language_model(**options) -> peft.PeftModel:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(language_model(), config)


MODELS = {
    "a module": of_body,
    "a trained head": lambda: of_body(modules_to_save=["3"]),
    "dora": lambda: of_body(use_dora=True),
    "biases": lambda: of_body(bias="lora_only"),
    "a language model": of_language_model,
    "a prompt": lambda: peft.get_peft_model(
        language_model(),
        peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ),
}


def changed(model):
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1 * (number + 1))
    return model


def same_files(ours: Path, theirs: Path) -> None:
    own, other = load_file(ours / FILES[1]), load_file(theirs / FILES[1])
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    own, other = (json.loads((folder / FILES[0]).read_text()) for folder in (ours, theirs))
    for config in (own, other):  # a set, which peft writes in any order
        if isinstance(config.get("target_modules"), list):
            config["target_modules"].sort()
    assert own == other


@pytest.mark.parametrize("kind", MODELS)
def test_save_model_writes_the_files_that_peft_writes_itself(tmp_path, kind):
    model = changed(MODELS[kind]())
    accel = Accelerator(cpu=True)
    prepared = accel.prepare(model)
    accel.save_model(prepared, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    same_files(tmp_path / "ours", tmp_path / "theirs")
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == sorted(FILES)


def test_several_adapters_are_where_peft_has_them(tmp_path):
    model = of_body()
    model.add_adapter("formal", peft.LoraConfig(r=3, target_modules=["2"]))
    changed(model)
    accel = Accelerator(cpu=True)
    accel.save_model(accel.prepare(model), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    same_files(tmp_path / "ours", tmp_path / "theirs")
    same_files(tmp_path / "ours/formal", tmp_path / "theirs/formal")


def test_an_adapter_that_transformers_added_is_read_by_both(tmp_path):
    wanted = transformers.integrations.peft.MIN_PEFT_VERSION
    if Version(peft.__version__) < Version(wanted):  # which may not be released yet
        pytest.skip(f"this transformers works with peft {wanted} or newer only")
    model = language_model()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    changed(model)
    accel = Accelerator(cpu=True)
    accel.save_model(accel.prepare(model), tmp_path)
    words = torch.arange(8)[None]
    expected = model(words).logits
    again = language_model()
    again.load_adapter(str(tmp_path))
    assert torch.equal(again(words).logits, expected)
    read = peft.PeftModel.from_pretrained(language_model(), str(tmp_path))
    assert torch.equal(read(words).logits, expected)


def test_a_trainable_only_checkpoint_resumes_exactly_and_is_opened_by_peft(tmp_path):
    def train(epochs, folder):
        torch.manual_seed(1)
        saver = Checkpoint(folder, every="1 epoch", trainable_only=True)
        accel = Accelerator(cpu=True, callbacks=[saver])
        model = of_body(lora_dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        data = torch.utils.data.DataLoader(torch.arange(64.0).view(16, 4), 4, shuffle=True)
        model, optimizer, data = accel.prepare(model, optimizer, data)
        with accel.run("lora") as run:
            for _ in run.epochs(epochs):
                for batch in data:
                    accel.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
        return model, saver.last_path

    whole, _ = train(4, tmp_path / "whole")
    train(2, tmp_path / "cut")
    resumed, path = train(4, tmp_path / "cut")
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    read = peft.PeftModel.from_pretrained(body(), path).eval()
    assert torch.equal(read(torch.ones(1, 4)), resumed.eval()(torch.ones(1, 4)))


def test_the_how_to_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CPU", "1")
    page = Path(__file__).resolve().parents[2] / "docs/how-to/train-an-adapter.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert len(blocks) == 4
    namespace = {"__name__": "page"}
    for block in blocks:
        exec(block, namespace)


def test_lora_trains_on_an_offloaded_base_as_on_a_resident_one(tmp_path):
    save_model(language_model().state_dict(), str(tmp_path), max_shard_size=4000)
    with init_empty_weights():
        empty = language_model()
    bases = [language_model(), load_checkpoint_and_dispatch(empty, tmp_path, {"": "disk"})]
    words = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(2))
    gradients, answers = [], []
    for base in bases:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM",
            init_lora_weights=False,
        )  # fmt: skip
        model = Accelerator(cpu=True).prepare(peft.get_peft_model(base, config))
        model(input_ids=words, labels=words).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        with torch.no_grad():
            answers.append(model.generate(input_ids=words, max_new_tokens=4))
    assert len(gradients[0]) == 8
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert torch.equal(*answers)
