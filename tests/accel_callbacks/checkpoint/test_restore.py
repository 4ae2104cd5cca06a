"""load_state in place: no second copy, nothing half done, and no silent wrong number."""

from __future__ import annotations

import copy
import pickle
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback, ResumeError
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.checkpoint.open import describe_foreign_folder
from accel_callbacks.checkpoint.training_state import TrainingState
from checkpoint_io.storage.local import LocalStore
from checkpoint_io.storage.local_read import LocalReader

LAYERS = 24


def stack(layers: int = LAYERS, width: int = 32) -> torch.nn.Sequential:
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])


def prepared(seed: int = 0, steps: int = 1, model=None, optimizer=torch.optim.Adam, **options):
    """An Accelerator with a model and its optimizer after some steps."""
    torch.manual_seed(seed)
    accel = Accelerator(cpu=True, **options)
    model = stack() if model is None else model
    for parameter in model.parameters():  # others for each seed, wherever the model was made
        torch.nn.init.normal_(parameter, std=0.1)
    model, optimizer = accel.prepare(model, optimizer(model.parameters(), lr=0.01))
    for _ in range(steps):
        step(accel, model, optimizer)
    return accel, model, optimizer


def step(accel, model, optimizer) -> None:
    accel.backward(model(torch.randn(4, 32)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def frozen_copy(model, optimizer) -> dict:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def last_weight_file(folder: Path | str) -> Path:
    """The last file that holds a state of the optimizer, which is read in place."""
    manifest = checkpoint_io.read_manifest(folder)
    entries = [entry for key, entry in manifest.tensors.items() if key.startswith("optimizers/")]
    return Path(folder) / manifest.files[max(e.chunks[0].file for e in entries)].name


def tensor_files(folder: Path | str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


# --- in place --------------------------------------------------------------------------------


def test_weights_and_states_are_read_into_the_memory_that_they_have(tmp_path):
    accel, model, optimizer = prepared()
    path = accel.save_state(tmp_path / "c")
    other, its_model, its_optimizer = prepared(seed=1)
    weights = {name: value.data_ptr() for name, value in its_model.state_dict().items()}
    states = [value for state in its_optimizer.state.values() for value in state.values()]
    other.load_state(path)
    assert {n: v.data_ptr() for n, v in its_model.state_dict().items()} == weights
    after = [value for state in its_optimizer.state.values() for value in state.values()]
    assert len(after) == len(states) == 3 * 2 * LAYERS
    assert all(one is other for one, other in zip(after, states, strict=True))
    assert same(frozen_copy(its_model, its_optimizer), frozen_copy(model, optimizer))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adam,
        torch.optim.Adagrad,
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
        lambda p, lr: torch.optim.AdamW(p, lr, amsgrad=True, foreach=True),
        lambda p, lr: torch.optim.AdamW(p, torch.tensor(lr), fused=True),
    ],
)
def test_an_optimizer_goes_on_exactly_whether_it_has_a_state_or_not(tmp_path, optimizer, steps):
    accel, model, its = prepared(optimizer=optimizer, steps=3)
    path = accel.save_state(tmp_path / "c")
    fresh, other, its_own = prepared(seed=1, optimizer=optimizer, steps=steps)
    fresh.load_state(path)
    assert same(frozen_copy(other, its_own), frozen_copy(model, its))
    for job in ((accel, model, its), (fresh, other, its_own)):
        torch.manual_seed(5)
        step(*job)
    assert same(frozen_copy(other, its_own), frozen_copy(model, its))


def test_an_optimizer_whose_state_is_lists_of_tensors_goes_on_exactly(tmp_path):
    def build(seed: int):
        torch.manual_seed(seed)
        accel, model = Accelerator(cpu=True), torch.nn.Linear(4, 1)
        model, optimizer = accel.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=3))
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))

        def closure():
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            accel.backward(loss)
            return loss

        optimizer.step(closure)
        return accel, model, optimizer, closure

    accel, model, optimizer, closure = build(0)
    path = accel.save_state(tmp_path / "c")
    fresh, other, its_own, again = build(1)
    fresh.load_state(path)
    optimizer.step(closure)
    its_own.step(again)
    assert same(frozen_copy(other, its_own), frozen_copy(model, optimizer))


def test_tensors_that_share_memory_in_an_optimizer_are_not_mixed_up(tmp_path):
    accel, _, optimizer = prepared(model=stack(2))
    path = accel.save_state(tmp_path / "c")
    fresh, other, its_own = prepared(seed=1, model=stack(2))
    weight = other[0].weight
    its_own.state[weight]["exp_avg"] = its_own.state[weight]["exp_avg_sq"]
    other[1].bias.data = its_own.state[other[0].bias]["exp_avg"]
    fresh.load_state(path)
    assert same(its_own.state_dict(), optimizer.state_dict())
    assert same(other.state_dict(), accel.models[0].state_dict())


def test_weights_in_another_memory_format_are_filled_by_element(tmp_path):
    def build(seed: int):
        torch.manual_seed(seed)
        model = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        return prepared(seed, steps=0, model=model)

    accel, model, _ = build(0)
    path = accel.save_state(tmp_path / "c")
    fresh, other, _ = build(1)
    fresh.load_state(path)
    assert torch.equal(other.weight, model.weight)
    assert other.weight.is_contiguous(memory_format=torch.channels_last)


class Tied(torch.nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.one = torch.nn.Linear(2, 2, bias=False)
        self.two = torch.nn.Linear(2, 2, bias=False)
        if tie:
            self.two.weight = self.one.weight


def test_tied_weights_stay_tied_and_are_not_chosen_by_chance(tmp_path):
    accel, model, _ = prepared(steps=0, model=Tied())
    path = accel.save_state(tmp_path / "tied")
    fresh, other, _ = prepared(1, steps=0, model=Tied())
    fresh.load_state(path)
    assert other.two.weight is other.one.weight
    assert torch.equal(other.one.weight, model.one.weight)
    apart, _, _ = prepared(2, steps=0, model=Tied(tie=False))
    path = apart.save_state(tmp_path / "apart")
    before = other.one.weight.detach().clone()
    with pytest.raises(ResumeError, match=r"'one.weight' and 'two.weight' are one tensor"):
        fresh.load_state(path, only="models")
    assert torch.equal(other.one.weight, before)
    fresh.backward(other.one.weight.sum())


class Counts(torch.nn.Module):
    """Keeps something of its own in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.bias = torch.nn.Parameter(torch.randn(3))
        self.seen = 0

    def get_extra_state(self) -> dict:
        return {"seen": self.seen, "sums": torch.arange(3) * self.seen}

    def set_extra_state(self, state: dict) -> None:
        whole = torch.equal(state["sums"], torch.arange(3) * state["seen"])
        self.seen = state["seen"] if whole else -1


class CountsInATensor(Counts):
    """Likewise, with a tensor that grows."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(self.seen)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = len(state)


class Doubles(torch.nn.Module):
    """Saves its weight in another form than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self._register_state_dict_hook(self._double)
        self._register_load_state_dict_pre_hook(self._halve)

    @staticmethod
    def _double(module, state_dict, prefix, *args) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2

    @staticmethod
    def _halve(state_dict, prefix, *args) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] / 2


@pytest.mark.parametrize("kind", [Counts, CountsInATensor])
def test_a_module_with_a_state_of_its_own_is_given_it(tmp_path, kind):
    accel, model, _ = prepared(steps=0, model=kind())
    model.seen = 7
    path = accel.save_state(tmp_path / "c")
    fresh, other, _ = prepared(1, steps=0, model=kind())
    bias = other.bias.detach().clone()
    fresh.load_state(path, only="models/0/weight")
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, bias)
    assert other.seen == 0
    fresh.load_state(path)
    assert torch.equal(other.bias, model.bias)
    assert other.seen == 7


def test_a_module_that_saves_another_form_of_its_weights_is_asked_to_load_them(tmp_path):
    accel, model, _ = prepared(steps=0, model=torch.nn.Sequential(Doubles()))
    path = accel.save_state(tmp_path / "c")
    fresh, other, _ = prepared(1, steps=0, model=torch.nn.Sequential(Doubles()))
    fresh.load_state(path)
    assert torch.equal(other[0].weight, model[0].weight)


CHILD = """
    import re, sys, torch
    from accel_callbacks import Accelerator

    def build(seed):
        accel = Accelerator(cpu=True)
        model = torch.nn.ParameterList([torch.full((1 << 20,), float(seed)) for _ in range(24)])
        model, optimizer = accel.prepare(model, torch.optim.Adam(model.parameters()))
        accel.backward(sum(parameter.sum() for parameter in model))
        optimizer.step()
        optimizer.zero_grad()
        return accel

    def memory(name):
        with open("/proc/self/status") as file:
            return int(re.search(name + r":\\s+(\\d+)", file.read())[1]) / 1024

    accel = build(2)
    if sys.argv[2] == "save":
        accel.save_state(sys.argv[1])
    else:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins here
        before = memory("VmRSS")
        accel.load_state(sys.argv[1])
        print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_a_load_takes_no_second_copy_of_the_state(tmp_path):
    def run(action: str) -> str:
        script = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path / "c"), action]
        return subprocess.run(script, capture_output=True, text=True, check=True).stdout

    run("save")
    assert float(run("load")) < 150  # MiB; the state has 288, and the buffers in flight far less


def test_a_load_without_hooks_fits_each_state_once(tmp_path, monkeypatch):
    accel, *_ = prepared()
    path = accel.save_state(tmp_path / "c")
    fit, calls = accel.strategy.states.fit_optimizer_state, []

    def counted(*arguments):
        calls.append(arguments)
        return fit(*arguments)

    monkeypatch.setattr(accel.strategy.states, "fit_optimizer_state", counted)
    accel.load_state(path)
    assert len(calls) == 1


def test_no_file_is_read_again_to_look_for_a_window_that_is_not_open(tmp_path, monkeypatch):
    accel, *_ = prepared()
    path = accel.save_state(tmp_path / "c")
    names = []
    fetch = LocalStore.fetch

    def noted(self, spans, deliver):
        names.extend(span.name for span in spans if span.name.startswith("objects"))
        fetch(self, spans, deliver)

    monkeypatch.setattr(LocalStore, "fetch", noted)
    accel.load_state(path)
    assert len(names) == len(set(names)) == 2  # of the shared state, and of this rank


# --- all or nothing --------------------------------------------------------------------------


def test_another_dtype_is_refused_before_anything_changes(tmp_path):
    accel, *_ = prepared(steps=0)
    path = accel.save_state(tmp_path / "c")
    fresh, model, optimizer = prepared(1, steps=0, model=stack().to(torch.bfloat16))
    before = frozen_copy(model, optimizer)
    with pytest.raises(ResumeError, match=r"'0.weight' is torch.bfloat16 in the model and torch.f"):
        fresh.load_state(path)
    assert same(frozen_copy(model, optimizer), before)


@pytest.mark.parametrize("change", ["missing", "shorter", "header"])
def test_a_file_that_is_not_as_listed_is_found_before_anything_changes(tmp_path, change):
    accel, *_ = prepared()
    path = accel.save_state(tmp_path / "c", max_shard_size=10_000)
    last = tensor_files(path)[-1]
    if change == "missing":
        last.unlink()
    elif change == "shorter":
        last.write_bytes(last.read_bytes()[:-1])
    else:
        data = bytearray(last.read_bytes())
        data[20] ^= 1
        last.write_bytes(bytes(data))
    fresh, model, optimizer = prepared(1)
    before = frozen_copy(model, optimizer)
    with pytest.raises(checkpoint_io.CorruptCheckpointError, match=last.name):
        fresh.load_state(path)
    assert same(frozen_copy(model, optimizer), before)
    step(fresh, model, optimizer)  # nothing was changed, so training may go on


def damaged_at_the_end(folder: Path, **options) -> tuple[str, str, dict]:
    """Two checkpoints of a project, of which the newer has a wrong byte in its last file."""
    accel, model, optimizer = prepared(project_dir=folder, **options)
    older = accel.save_state(max_shard_size=10_000)
    wanted = frozen_copy(model, optimizer)
    step(accel, model, optimizer)
    newer = accel.save_state(max_shard_size=10_000)
    flip_last_byte(last_weight_file(newer))
    return older, newer, wanted


def test_after_a_load_that_broke_off_half_way_nothing_goes_on_until_one_succeeds(tmp_path):
    older, newer, wanted = damaged_at_the_end(tmp_path)
    accel, model, optimizer = prepared(1)
    before = frozen_copy(model, optimizer)
    with pytest.raises(checkpoint_io.TornLoadError):
        accel.load_state(newer)
    assert not same(frozen_copy(model, optimizer), before)
    loss = model(torch.ones(1, 32)).sum()
    for refused in (
        lambda: accel.backward(loss),
        optimizer.step,
        lambda: accel.save_state(older),
        lambda: accel.save_model(model, tmp_path / "model"),
    ):
        with pytest.raises(ResumeError, match=r"step-00000002 failed midway.*load_state\(\)"):
            refused()
    with pytest.raises(ResumeError), accel.accumulate(model):
        accel.backward(model(torch.ones(1, 32)).sum())
    with pytest.raises(checkpoint_io.TornLoadError):  # a second failure changes nothing in that
        accel.load_state(newer)
    with pytest.raises(ResumeError):
        optimizer.step()
    accel.load_state(older)
    assert same(frozen_copy(model, optimizer), wanted)
    step(accel, model, optimizer)
    accel.save_state(tmp_path / "after")


def test_damage_that_is_met_before_the_first_change_leaves_the_run_as_it_was(tmp_path):
    torch.manual_seed(0)
    accel = Accelerator(cpu=True)
    model = accel.prepare(torch.nn.Linear(32, 1, bias=False))
    path = accel.save_state(tmp_path / "c")
    manifest = checkpoint_io.read_manifest(path)
    chunk = manifest.tensors["models/0/weight"].chunks[0]
    file = tmp_path / "c" / manifest.files[chunk.file].name
    data = bytearray(file.read_bytes())
    data[chunk.begin] ^= 1
    file.write_bytes(bytes(data))
    before = model.weight.detach().clone()
    with pytest.raises(checkpoint_io.CorruptCheckpointError, match="models/0/weight"):
        accel.load_state(path)
    assert torch.equal(model.weight, before)
    accel.backward(model(torch.ones(1, 32)).sum())


class Refusing(fsspec.get_filesystem_class("memory")):
    """A store whose credentials have expired, from some time on."""

    protocol = "refusing"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    expired = False

    def _open(self, path, mode="rb", **options):
        self._refuse(path)
        return super()._open(path, mode, **options)

    def cat_file(self, path, **options):
        self._refuse(path)
        return super().cat_file(path, **options)

    def _refuse(self, path: str) -> None:
        if Refusing.expired and path.endswith(".safetensors"):
            raise PermissionError(f"{path}: the token has expired")


@pytest.mark.parametrize("times", [1, 99], ids=["once", "always"])
def test_one_flipped_bit_takes_no_older_checkpoint(tmp_path, monkeypatch, capsys, times):
    """It is read again; what is damaged at a second look too is told by the public name."""
    accel, model, optimizer = prepared(project_dir=tmp_path)
    older = frozen_copy(model, optimizer)
    accel.save_state()
    step(accel, model, optimizer)
    newest, newer = accel.save_state(), frozen_copy(model, optimizer)
    file, read, flipped = str(last_weight_file(newest)), LocalReader.read, []

    def flip(self, begin, end):
        data = bytearray(read(self, begin, end))
        if self._path == file and len(flipped) < times:
            data[-1] ^= 1
            flipped.append(begin)
        return memoryview(data)

    monkeypatch.setattr(LocalReader, "read", flip)
    fresh, other, its_own = prepared(1, project_dir=tmp_path)
    fresh.load_state()
    said = capsys.readouterr().err
    assert flipped
    assert same(frozen_copy(other, its_own), newer if times == 1 else older)
    assert ("passed over" in said) is (times > 1)
    assert ("CorruptCheckpointError" in said) is (times > 1)


class Expires:
    """Lets the credentials expire while a checkpoint is being loaded."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        Refusing.expired = True


def test_a_store_that_refuses_is_no_reason_to_take_an_older_checkpoint(tmp_path):
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    accel, model, optimizer = prepared(project_dir="refusing://project")
    for _ in range(2):
        accel.save_state()
        step(accel, model, optimizer)
    fresh, other, its_own = prepared(1, project_dir="refusing://project")
    before = frozen_copy(other, its_own)
    fresh.register_for_checkpointing(late=Expires())
    accel.register_for_checkpointing(late=Expires())
    accel.save_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is passed over
            with pytest.raises((PermissionError, checkpoint_io.CheckpointError), match="expired"):
                fresh.load_state()
    finally:
        Refusing.expired = False
    assert same(frozen_copy(other, its_own), before)
    step(fresh, other, its_own)


def test_free_memory_ends_the_refusal_since_all_is_prepared_anew(tmp_path):
    _, newer, _ = damaged_at_the_end(tmp_path)
    accel, model, optimizer = prepared(1)
    with pytest.raises(checkpoint_io.TornLoadError):
        accel.load_state(newer)
    model, optimizer = accel.free_memory(model, optimizer)
    model = stack()
    step(accel, *accel.prepare(model, torch.optim.SGD(model.parameters(), 0.1)))


def test_verify_full_finds_the_damage_before_anything_changes(tmp_path):
    _, newer, _ = damaged_at_the_end(tmp_path)
    accel, model, optimizer = prepared(1)
    before = frozen_copy(model, optimizer)
    with pytest.raises(checkpoint_io.CorruptCheckpointError, match=last_weight_file(newer).name):
        accel.load_state(newer, verify="full")
    assert same(frozen_copy(model, optimizer), before)
    step(accel, model, optimizer)
    with pytest.raises(ValueError, match="parts"):
        accel.load_state(newer, verify="some")


@pytest.mark.parametrize("verify", ["parts", "full"])
def test_the_newest_falls_back_to_the_one_before_even_half_way(tmp_path, verify, capsys):
    older, newer, wanted = damaged_at_the_end(tmp_path)
    accel, model, optimizer = prepared(1, project_dir=tmp_path)
    assert accel.load_state(verify=verify) == older
    assert capsys.readouterr().err.startswith(f"[accel] passed over {newer}: ")
    assert same(frozen_copy(model, optimizer), wanted)
    assert accel.current_run.resumed_from == older
    step(accel, model, optimizer)


def test_a_failure_that_is_no_damage_costs_no_progress(tmp_path, monkeypatch, capsys):
    older, newer, _ = damaged_at_the_end(tmp_path)
    accel, model, optimizer = prepared(1, project_dir=tmp_path)
    before = frozen_copy(model, optimizer)
    usual = LocalStore.fetch

    def without_network(store, spans, deliver):
        if store.url == newer and any(span.begin >= 4096 for span in spans):  # past the headers
            raise OSError("the network is down")
        usual(store, spans, deliver)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "fetch", without_network)
        patched.setattr(LocalStore, "fetch_into", without_network)
        with pytest.raises(OSError, match="the network is down"):
            accel.load_state()
    assert same(frozen_copy(model, optimizer), before)
    assert "passed over" not in capsys.readouterr().err
    assert accel.load_state() == older  # now that what is damaged can be seen


def test_a_run_falls_back_too(tmp_path, capsys):
    older, newer, _ = damaged_at_the_end(tmp_path)
    accel, model, optimizer = prepared(1, project_dir=tmp_path, callbacks=[Checkpoint()])
    fit(accel, model, optimizer, older)
    assert capsys.readouterr().err.count(f"[accel] passed over {newer}: ") == 1


def fit(accel, model, optimizer, resumed_from: str) -> None:
    with accel.run("again") as run:
        assert run.resumed_from == resumed_from
        step(accel, model, optimizer)


def test_if_the_last_one_breaks_off_half_way_the_run_refuses(tmp_path):
    older, _, _ = damaged_at_the_end(tmp_path)
    flip_last_byte(last_weight_file(older))
    accel, model, optimizer = prepared(1, project_dir=tmp_path)
    with pytest.raises(checkpoint_io.CorruptCheckpointError, match="all are damaged"):
        accel.load_state()
    with pytest.raises(ResumeError, match="failed midway"):
        step(accel, model, optimizer)


class Replaces:
    """Lets another checkpoint take the place of one while it is being loaded."""

    def __init__(self, place: Path, other: Path) -> None:
        self.place, self.other, self.times, self.value = place, other, 0, None

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value, self.times = state["value"], self.times + 1
        if self.times == 1:
            shutil.rmtree(self.place)
            shutil.copytree(self.other, self.place)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(tmp_path):
    accel, model, optimizer = prepared()
    held = Replaces(tmp_path / "c", tmp_path / "d")
    accel.register_for_checkpointing(held=held)
    held.value = 1
    accel.save_state(tmp_path / "c")
    step(accel, model, optimizer)
    held.value = 2
    accel.save_state(tmp_path / "d")
    wanted = frozen_copy(model, optimizer)
    accel.load_state(tmp_path / "c")
    assert held.value == 2
    assert held.times >= 2
    assert same(frozen_copy(model, optimizer), wanted)


class Edits(Callback):
    def on_load_checkpoint(self, run, model, checkpoint) -> None:
        weights = checkpoint["models"]["0"]
        checkpoint["models"] = {"0": {**weights, "0.bias": weights["0.bias"] * 0 + 3}}


def test_a_hook_that_edits_what_is_loaded_gets_tensors(tmp_path):
    accel, model, optimizer = prepared()
    path = accel.save_state(tmp_path / "c")
    fresh, other, its_own = prepared(1, callbacks=[Edits()])
    fresh.load_state(path)
    assert other[0].bias.tolist() == [3.0] * 32
    assert torch.equal(other[0].weight, model[0].weight)
    assert same(its_own.state_dict(), optimizer.state_dict())


def test_the_count_of_windows_that_older_versions_saved_is_ignored(tmp_path, monkeypatch):
    capture = TrainingState.capture

    def with_rounds(training):
        shared, local = capture(training)
        return {**shared, "rounds": {"windows": 5}}, local

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "capture", with_rounds)
        accel, model, optimizer = prepared()
        path = accel.save_state(tmp_path / "c")
    assert checkpoint_io.open_checkpoint(path).state["rounds"] == {"windows": 5}
    other, its_model, its_optimizer = prepared(seed=1)
    other.load_state(path)
    assert same(frozen_copy(its_model, its_optimizer), frozen_copy(model, optimizer))
    resaved = checkpoint_io.open_checkpoint(other.save_state(tmp_path / "again")).state
    assert "rounds" not in resaved


# --- what is no checkpoint of ours -----------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "match"),
    [
        (["model.safetensors", "optimizer.bin", "random_states_0.pkl"], "Hugging Face Accelerate"),
        (["pytorch_model.bin", "optimizer.bin"], "load_checkpoint_in_model"),
        (["model.safetensors", "config.json"], "weights of a model and no training state"),
        ([".metadata", "__0_0.distcp"], r"torch\.distributed\.checkpoint"),
        (["notes.txt"], "no committed checkpoint|no manifest"),
    ],
)
def test_a_folder_of_another_library_is_told_apart(tmp_path, files, match):
    folder = tmp_path / "checkpoints" / "checkpoint_3"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_bytes(pickle.dumps(print))
    accel, *_ = prepared(project_dir=tmp_path)
    with pytest.raises(checkpoint_io.CheckpointNotFoundError, match=match):
        accel.load_state(folder)
    if "optimizer.bin" in files:
        with pytest.raises(FileNotFoundError, match="checkpoint_3 was saved by Hugging Face"):
            accel.load_state()


@pytest.mark.parametrize(("foreign", "found"), [(11, True), (9, True), (8, False), (1, False)])
def test_the_newest_folders_of_another_library_are_looked_at(tmp_path, foreign, found):
    for number in range(12):
        (tmp_path / f"checkpoint_{number}").mkdir()
    (tmp_path / f"checkpoint_{foreign}" / "optimizer.bin").write_bytes(b"")
    text = describe_foreign_folder(str(tmp_path))
    assert text.startswith(f" checkpoint_{foreign} was saved by") == found


def test_only_a_model_with_a_load_of_its_own_needs_a_second_copy():
    class Own(torch.nn.Linear):
        def _load_from_state_dict(self, *args):
            super()._load_from_state_dict(*args)

    strategy = Accelerator(cpu=True).strategy
    assert strategy.states.loads_in_place(stack()) is True
    assert strategy.states.loads_in_place(torch.nn.Sequential(Own(2, 2))) is False


def test_a_file_and_a_checkpoint_of_something_else_are_told_apart(tmp_path):
    accel, *_ = prepared()
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(b"")
    with pytest.raises(checkpoint_io.CheckpointError, match="is a file"):
        accel.load_state(file)
    checkpoint_io.save(tmp_path / "mine", {"weights": torch.ones(2)})
    with pytest.raises(ResumeError, match=r"'models'.*checkpoint_io\.load"):
        accel.load_state(tmp_path / "mine")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_frozen_weights_that_the_save_left_out_keep_their_values_and_are_listed(tmp_path):
    def build(seed: int):
        torch.manual_seed(seed)
        model = stack(3)
        model[0].requires_grad_(False)
        return prepared(seed, model=model)

    accel, model, _ = build(0)
    path = accel.save_state(tmp_path / "c", trainable_only=True)
    fresh, other, _ = build(1)
    kept = other[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="2 of 2 frozen weights differ"):
        fresh.load_state(path)
    assert torch.equal(other[0].weight, kept)
    assert torch.equal(other[1].weight, model[1].weight)
    assert fresh.load_report.kept == ["0.0.bias", "0.0.weight"]
    assert fresh.load_report.missing == fresh.load_report.unexpected == []


def test_save_model_can_leave_frozen_parameters_out(tmp_path):
    from safetensors.torch import load_file

    accel = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].requires_grad_(False)
    model = accel.prepare(model)
    accel.save_model(model, tmp_path, trainable_only=True)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == {f"1.{name}" for name in model[1].state_dict()}
