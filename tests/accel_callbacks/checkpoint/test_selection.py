"""load_state of a part of a checkpoint, and under other names."""

from __future__ import annotations

import copy
import random
import re
import warnings

import pytest
import torch

from accel_callbacks import Accelerator, ResumeError


class Net(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(2, 2))


def build(seed: int = 0, names=("encoder", "head"), models: int = 1, steps: int = 1):
    torch.manual_seed(seed)
    accel = Accelerator(cpu=True)
    nets = [accel.prepare(Net(*names)) for _ in range(models)]
    optimizers = [accel.prepare(torch.optim.Adam(net.parameters(), lr=0.1 + seed)) for net in nets]
    loader = accel.prepare(torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True))
    for net, optimizer in zip(nets, optimizers, strict=True):
        for _ in range(steps):
            accel.backward(sum(p.square().sum() for p in net.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    return accel, nets, optimizers, loader


def state(accel) -> dict:
    return copy.deepcopy(
        {
            "models": [model.state_dict() for model in accel.models],
            "optimizers": [optimizer.state_dict() for optimizer in accel.optimizers],
            "run": accel.current_run.state_dict(),
            "rng": [random.getstate(), torch.get_rng_state()],
        }
    )


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


SECTIONS = ("models", "optimizers", "run", "rng")


@pytest.mark.parametrize(
    ("only", "taken"),
    [
        ("models", {"models"}),
        (("models",), {"models"}),
        (["models", "optimizers"], {"models", "optimizers"}),
        (("optimizers/0", "run"), {"optimizers", "run"}),
        ("rng", {"rng"}),
        (lambda key: not key.startswith("optimizers"), {"models", "run", "rng"}),
        (None, set(SECTIONS)),
    ],
)
def test_only_what_is_asked_for_is_restored(tmp_path, only, taken):
    accel, *_ = build()
    path = accel.save_state(tmp_path / "c")
    wanted = state(accel)
    other, *_ = build(1, steps=2)
    before = state(other)
    assert other.load_state(path, only=only) == path
    after = state(other)
    for section in SECTIONS:
        expected = wanted if section in taken else before
        assert same(after[section], expected[section]), section
    assert (other.current_run.resumed_from is not None) == ("run" in taken)


def test_a_pattern_takes_some_weights_and_the_others_stay(tmp_path):
    accel, (net,), *_ = build()
    path = accel.save_state(tmp_path / "c")
    other, (its,), *_ = build(1)
    head = its.head.weight.detach().clone()
    other.load_state(path, only="models/0/encoder.*")
    assert torch.equal(its.encoder.weight, net.encoder.weight)
    assert torch.equal(its.encoder.bias, net.encoder.bias)
    assert torch.equal(its.head.weight, head)


def test_one_of_several_models_comes_from_a_checkpoint_with_another_number(tmp_path):
    accel, nets, *_ = build(models=3)
    path = accel.save_state(tmp_path / "c")
    other, its, *_ = build(1, models=2)
    with pytest.raises(ResumeError, match="holds 3 models, but 2 were prepared"):
        other.load_state(path)
    with pytest.raises(ResumeError, match="selects models/2"):
        other.load_state(path, only="models")
    other.load_state(path, only=["models/1", "optimizers/1"])
    assert same(dict(its[1].state_dict()), dict(nets[1].state_dict()))
    assert not same(dict(its[0].state_dict()), dict(nets[0].state_dict()))


def test_a_part_that_does_not_exist_is_an_error_with_the_nearest(tmp_path):
    accel, *_ = build()
    path = accel.save_state(tmp_path / "c")
    before = state(accel)
    for only, hint in (
        ("model", "Did you mean 'models'"),
        ("models/0/encodr.weight", "Did you mean 'models/0/encoder.weight'"),
        (["models", "optimizers/7"], "only='optimizers/7'"),
    ):
        with pytest.raises(ResumeError, match=re.escape(hint)):
            accel.load_state(path, only=only)
    assert same(state(accel), before)


def test_names_on_one_side_only_are_listed_or_refused(tmp_path):
    accel, (net,), *_ = build(names=("encoder", "head"))
    path = accel.save_state(tmp_path / "c")
    other, (its,), *_ = build(1, names=("encoder", "heads"))
    before = state(other)
    with pytest.raises(
        ResumeError, match=r"'0\.head\.\w+' is only in the ch.*Did you mean '0\.heads"
    ):
        other.load_state(path, only="models", strict=True)
    with pytest.raises(ResumeError, match="is only in"):
        other.load_state(path)
    assert same(state(other), before)
    with pytest.warns(UserWarning, match=r"'0\.heads\.weight' is only in the model\. Did you"):
        other.load_state(path, only="models")
    assert torch.equal(its.encoder.weight, net.encoder.weight)
    assert same(its.heads.weight, before["models"][0]["heads.weight"])
    assert other.load_report.missing == ["0.heads.weight", "0.heads.bias"]
    assert other.load_report.unexpected == ["0.head.weight", "0.head.bias"]
    assert other.load_report.path == path


def test_nothing_in_common_is_an_error_even_where_a_part_would_do(tmp_path):
    accel, *_ = build(names=("a",))
    path = accel.save_state(tmp_path / "c")
    other, *_ = build(1, names=("b",))
    with pytest.raises(ResumeError, match="nothing of what is selected"):
        other.load_state(path, only="models")


def test_a_part_of_another_shape_is_refused(tmp_path):
    accel, *_ = build()
    path = accel.save_state(tmp_path / "c")
    other = Accelerator(cpu=True)
    net = Net("encoder")
    net.encoder = torch.nn.Linear(2, 3)
    other.prepare(net)
    with pytest.raises(ResumeError, match=r"has shape \(3, 2\) in the model and \(2, 2\)"):
        other.load_state(path, only="models/0/encoder.*")


def test_renamed_weights_take_the_states_of_their_optimizer_along(tmp_path):
    accel, (net,), (optimizer,), _ = build(names=("backbone", "head"))
    path = accel.save_state(tmp_path / "c")
    other, (its,), (its_own,), _ = build(1, names=("encoder", "head"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state(path, rename={"models/0/backbone.": "models/0/encoder."}, strict=True)
    assert torch.equal(its.encoder.weight, net.backbone.weight)
    assert same(its_own.state_dict(), optimizer.state_dict())
    fresh, (third,), *_ = build(2, names=("encoder", "head"))
    fresh.load_state(path, rename=lambda key: key.replace("backbone", "encoder"), only="models")
    assert torch.equal(third.encoder.weight, net.backbone.weight)


def test_a_model_can_take_the_place_of_another(tmp_path):
    accel, nets, *_ = build(models=2)
    path = accel.save_state(tmp_path / "c")
    other, its, *_ = build(1, models=1)
    other.load_state(path, only="models/1", rename={"models/1/": "models/0/"})
    assert same(dict(its[0].state_dict()), dict(nets[1].state_dict()))


def test_a_renaming_that_makes_no_sense_is_refused(tmp_path):
    accel, *_ = build()
    path = accel.save_state(tmp_path / "c")
    with pytest.raises(ValueError, match="two saved weights"):
        accel.load_state(path, rename=lambda key: "models/0/encoder.weight")
    with pytest.raises(ValueError, match="models/<number>/<name>"):
        accel.load_state(path, rename={"models/0/": ""})


class Held:
    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]


def test_registered_objects_are_chosen_by_name(tmp_path):
    accel, *_ = build()
    accel.register_for_checkpointing(ema=Held(1), count=Held(1))
    path = accel.save_state(tmp_path / "c")
    other, *_ = build(1)
    ema, count = Held(0), Held(0)
    other.register_for_checkpointing(ema=ema, count=count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state(path, only="registered/ema", strict=True)
        assert (ema.value, count.value) == (1, 0)
        other.load_state(path, only="models")
        assert count.value == 0


def test_the_rest_of_an_epoch_without_the_weights(tmp_path):
    accel, (net,), _, loader = build()
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        accel.backward(net.head(batch.reshape(1, 2).float()).sum())
        if len(seen) == 2:
            path = accel.save_state(tmp_path / "c")
    other, (its,), _, its_loader = build(1)
    weight = its.head.weight.detach().clone()
    other.load_state(path, only=["loaders", "run"])
    assert [batch.tolist() for batch in its_loader] == seen[2:]
    assert torch.equal(its.head.weight, weight)


@pytest.mark.parametrize("only", [[], lambda key: key.startswith("model.")])
def test_a_choice_of_nothing_is_refused_before_anything_changes(tmp_path, only):
    path = build()[0].save_state(tmp_path / "c")
    accel = build(1)[0]
    before = state(accel)
    with pytest.raises(ResumeError, match=r"selects nothing.*models/0/<name of a weight>"):
        accel.load_state(path, only=only)
    assert same(state(accel), before)
