"""Checkpoints without the frozen weights, and adapters as peft reads them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkpoint_io
from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint, Freeze
from accel_callbacks.errors import ResumeError

WIDTH = 256
FILES = ("adapter_config.json", "adapter_model.safetensors")


class Config:
    """What peft's configurations offer of themselves."""

    def __init__(self, **options) -> None:
        self.options = options

    def to_dict(self):
        return dict(self.options)


class Lora(torch.nn.Module):
    """A linear layer with adapters by name, its parameters named as those of peft's layer."""

    def __init__(self, base: torch.nn.Linear, names, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        new = {n: torch.nn.Linear(base.in_features, rank, bias=False) for n in names}
        self.lora_A = torch.nn.ModuleDict(new)
        new = {n: torch.nn.Linear(rank, base.out_features, bias=False) for n in names}
        self.lora_B = torch.nn.ModuleDict(new)

    def forward(self, x):
        return self.base_layer(x) + sum(self.lora_B[n](self.lora_A[n](x)) for n in self.lora_A)


class Tuner(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


class Peft(torch.nn.Module):
    """The wrapper that `get_peft_model` makes."""

    def __init__(self, base_seed=0, names=("default",), dtype=torch.float32, width=WIDTH) -> None:
        super().__init__()
        torch.manual_seed(base_seed)  # stands for pretrained weights
        body = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        ).to(dtype)
        body.requires_grad_(False)
        body.name_or_path = "org/base"
        torch.manual_seed(7)
        body[2] = Lora(body[2], names).to(dtype)
        self.base_model = Tuner(body)
        self.peft_config = {
            name: Config(peft_type="LORA", r=2, task_type=None, target_modules={"2"}, lora_alpha=4)
            for name in names
        }

    def forward(self, x):
        return self.base_model.model(x)


class Job:
    def __init__(self, *callbacks, model=None, optimizer=torch.optim.AdamW, **options) -> None:
        self.accel = Accelerator(cpu=True, callbacks=list(callbacks))
        self.net = Peft(**options) if model is None else model
        dtype = next(self.net.parameters()).dtype
        steps = optimizer(self.net.parameters(), lr=0.05)
        data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        self.model, self.optimizer, self.data = self.accel.prepare(self.net, steps, loader)

    def fit(self, epochs, **options):
        with self.accel.run("job", **options) as run:
            for _ in run.epochs(epochs):
                for batch in self.data:
                    self.accel.backward(self.model(batch).square().mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return run


def saver(folder, **options) -> Checkpoint:
    return Checkpoint(folder, every="1 epoch", trainable_only=True, **options)


def bytes_in(folder) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


def weights(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_trainable_only_leaves_the_frozen_weights_out_and_resumes_exactly(tmp_path):
    unbroken = Job(model=Peft())
    unbroken.fit(4)
    Job(saver(tmp_path / "small")).fit(2)
    Job(Checkpoint(tmp_path / "whole", every="1 epoch")).fit(2)
    again = Job(saver(tmp_path / "small"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert again.fit(4).resumed_from is not None
    assert same(weights(again.net), weights(unbroken.net))  # buffers included
    assert again.accel.load_report.kept
    name = "step-00000008"
    small = checkpoint_io.load(tmp_path / "small" / name).state
    trained = {n for n, p in again.net.named_parameters() if p.requires_grad}
    buffers = dict(again.net.named_buffers()).keys()
    assert small["models"]["0"].keys() == trained | buffers
    assert len(small["optimizers"]["0"]["state"]) == len(trained)


def test_a_trainable_only_checkpoint_has_the_size_of_the_adapter(tmp_path):
    layers = [torch.nn.Linear(4, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 1)]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    model[2] = Lora(model[2], ["default"])
    base = 4 * sum(p.numel() for p in model.parameters())
    size = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    Job(saver(tmp_path), model=model).fit(1)
    # The weights, two moments of Adam, the headers, the random generators.
    assert 3 * size < bytes_in(tmp_path) < 3 * size + 20_000 < base / 20


def test_another_base_is_a_warning_and_an_error_when_strict(tmp_path):
    job = Job(saver(tmp_path))
    job.fit(1)
    path = str(tmp_path / "step-00000004")
    for options in ({"base_seed": 1}, {"dtype": torch.float64}):
        other = Job(**options)
        if "dtype" in options:
            for name, p in other.net.named_parameters():
                p.data = p.data if "base_layer" in name else p.data.float()
            other.net.base_model.model[1].float()
        with pytest.raises(ResumeError, match="frozen weights differ"):
            other.accel.load_state(path, strict=True)
        with pytest.warns(UserWarning, match=r"of 2 frozen weights differ|frozen weights differ"):
            other.accel.load_state(path, only="models")
    with pytest.warns(UserWarning, match="load the weights .* before prepare"):
        Job(saver(tmp_path), base_seed=1).fit(1)
    with (
        pytest.warns(UserWarning, match="frozen weights differ"),
        Job(base_seed=1).accel.evaluate(checkpoint=path),
    ):
        pass


def test_another_model_is_refused_and_nothing_is_changed(tmp_path):
    Job(saver(tmp_path)).fit(1)
    path = str(tmp_path / "step-00000004")
    model = Peft()
    model.base_model.model[0] = torch.nn.Linear(4, WIDTH, bias=False).requires_grad_(False)
    other = Job(model=model)
    before = weights(other.net)
    with pytest.raises(ResumeError, match=r"0\.bias' is not in this one"):
        other.accel.load_state(path)
    model = Peft()
    model.base_model.model[0] = torch.nn.Linear(5, WIDTH).requires_grad_(False)
    with pytest.raises(ResumeError, match=r"had shape .*Build the model"):
        Job(model=model).accel.load_state(path)
    assert same(before, weights(other.net))


def test_weights_that_were_trained_before_they_were_frozen_are_saved(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    job = Job(saver(tmp_path), model=model)
    job.fit(1)
    model[0].requires_grad_(False)
    path = job.accel.save_state(tmp_path / "later", trainable_only=True)
    assert (
        "dropped_weights" not in (state := checkpoint_io.load(path).state)
        or not state["dropped_weights"]
    )


def test_weights_that_are_frozen_until_later_come_back_from_both_kinds_of_checkpoint(tmp_path):
    def job():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        return Job(Freeze({"0.*": 2}), saver(tmp_path, keep_last=None), model=model)

    whole = job()
    whole.fit(4)
    for step in (4, 12):
        again = job()
        again.fit(4, resume=str(tmp_path / f"step-{step:08d}"))
        assert same(weights(again.net), weights(whole.net))


# --- the files of peft ----------------------------------------------------------------------------


def test_save_model_writes_the_adapter_files_of_peft(tmp_path):
    job = Job()
    job.fit(1)
    job.accel.save_model(job.model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    saved = load_file(tmp_path / FILES[1])
    layer = job.net.base_model.model[2]
    assert same(
        saved,
        {
            "base_model.model.2.lora_A.weight": layer.lora_A["default"].weight.detach(),
            "base_model.model.2.lora_B.weight": layer.lora_B["default"].weight.detach(),
        },
    )
    config = json.loads((tmp_path / FILES[0]).read_text())
    assert config == {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["2"],
        "task_type": None,
        "inference_mode": True,
        "base_model_name_or_path": "org/base",
        "auto_mapping": {
            "base_model_class": "Sequential",
            "parent_library": "torch.nn.modules.container",
        },
    }


def test_save_model_writes_other_adapters_into_folders_of_their_names_and_to_urls():
    job = Job(names=("default", "formal"))
    url = "memory://trainable-only-adapters"
    job.accel.save_model(job.model, url)
    import fsspec

    found = fsspec.filesystem("memory").find("/trainable-only-adapters")
    names = {path.removeprefix("/trainable-only-adapters/") for path in found}
    assert names == {*FILES, *(f"formal/{file}" for file in FILES)}


def test_a_trainable_only_checkpoint_holds_the_adapter_files_and_is_removed_with_them(tmp_path):
    job = Job(saver(tmp_path, keep_last=1))
    job.fit(3)
    (checkpoint,) = tmp_path.glob("[!.]*")
    assert checkpoint.name == "step-00000012"
    saved = load_file(checkpoint / FILES[1])
    assert torch.equal(
        saved["base_model.model.2.lora_A.weight"],
        job.net.base_model.model[2].lora_A["default"].weight,
    )
    assert (checkpoint / FILES[0]).is_file()
    checkpoint_io.verify(checkpoint)


def test_an_unadapted_model_and_a_whole_checkpoint_have_no_adapter_files(tmp_path):
    job = Job(model=torch.nn.Linear(4, 1))
    job.accel.save_state(tmp_path / "plain", trainable_only=True)
    Job().accel.save_state(tmp_path / "whole")
    assert not list(tmp_path.rglob("adapter_*"))
