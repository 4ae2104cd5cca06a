"""Adapters train on an offloaded base as on a resident one, bit by bit."""

from __future__ import annotations

import copy

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    ResumeError,
    apply_activation_checkpointing,
    disk_offload,
    load_checkpoint_in_model,
)
from accel_callbacks.addons.tuning.trial import restored
from accel_callbacks.callbacks import (
    EMA,
    Checkpoint,
    Freeze,
    GradientNorm,
    ModelSummary,
    NonFinite,
    WeightAveraging,
)
from accel_callbacks.models.offload.placeholder import AbsentWeight, AbsentWeightError
from accel_callbacks.models.offload.residence import OffloadOptions, offload_hooks
from tests.accel_callbacks.models.offload.adapted import (
    adapted,
    dispatched,
    loss_of,
    prepared,
    resident,
    saved,
    train,
    weights,
    words,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("base"))


def same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def window_of(model):
    return next(offload_hooks(model)).offload.window


MAPS = {
    "all on disk": {"": "disk"},
    "half on disk": {"": "disk", "blocks.1": "cpu", "embedding": "cpu", "head": "cpu"},
}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("places", MAPS)
def test_losses_norms_gradients_and_weights_are_those_of_a_resident_base(base, places, direct):
    options = OffloadOptions(direct=direct)
    here, there = resident(), adapted(dispatched(base, MAPS[places], options=options))
    for model in (here, there):
        loss_of(model, torch.stack(words(2))).backward()
    gradients = [{n: p.grad for n, p in one.named_parameters() if p.requires_grad}
                 for one in (here, there)]  # fmt: skip
    same(*gradients)
    assert len(gradients[0]) == 8
    here, there = resident(), adapted(dispatched(base, MAPS[places], options=options))
    seen = [train(*prepared(one, gradient_accumulation_steps=3)) for one in (here, there)]
    assert seen[0] == seen[1]
    same(weights(here), weights(there))


def test_the_base_is_fetched_again_for_the_backward_pass_and_not_kept(base):
    model = adapted(dispatched(base))
    loss = loss_of(model, torch.stack(words(4)))
    window = window_of(model)
    held, fetched = window.nbytes, window.traffic.fetches
    assert held <= next(offload_hooks(model)).offload.window_limit
    loss.backward()
    assert window.traffic.fetches > fetched
    assert window.traffic.escapes == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_activations(base, use_reentrant):
    found = []
    for model in (resident(), adapted(dispatched(base))):
        for block in model.blocks:
            plain = block.forward

            def forward(x, plain=plain):
                return torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=use_reentrant)

            block.forward = forward
        model.start.requires_grad_(isinstance(model.start, AbsentWeight) is None)
        batch = torch.stack(words(2))
        x = model.embedding(batch).requires_grad_()
        for block in model.blocks:
            x = block(x)
        x.square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    same(*found)


def test_checkpointing_by_this_library(base):
    found = []
    for model in (resident(), adapted(dispatched(base))):
        apply_activation_checkpointing(model)
        found.append(train(*prepared(model)))
    assert found[0] == found[1]


def test_autocast_is_the_same_and_says_that_casts_are_kept(base):
    found = []
    for model in (resident(), adapted(dispatched(base))):
        if found:
            with pytest.warns(UserWarning, match="autocast makes a copy"):
                found.append(train(*prepared(model, mixed_precision="bf16")))
        else:
            found.append(train(*prepared(model, mixed_precision="bf16")))
    assert found[0] == found[1]


CALLBACKS = {
    "EMA": lambda folder: EMA(decay=0.9),
    "WeightAveraging": lambda folder: WeightAveraging(),
    "Freeze": lambda folder: Freeze({"blocks.1.*": 1}),
    "GradientNorm": lambda folder: GradientNorm(),
    "ModelSummary": lambda folder: ModelSummary(),
    "NonFinite": lambda folder: NonFinite(),
    "Checkpoint": lambda folder: Checkpoint(f"{folder}/all", every_n_steps=3),
    "Checkpoint of adapters": lambda folder: Checkpoint(
        f"{folder}/some", every_n_steps=3, trainable_only=True
    ),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(base, tmp_path, name):
    found = []
    for kind, model in {"here": resident(), "there": adapted(dispatched(base))}.items():
        callback = CALLBACKS[name](tmp_path / kind)
        accel, *objects = prepared(model, callbacks=[callback], project_dir=tmp_path / kind)
        seen = train(accel, *objects, epochs=2)
        path = accel.save_state(tmp_path / kind / "end")
        accel.load_state(path)
        found.append((seen, weights(model)))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])


@pytest.mark.parametrize("trainable_only", [False, True])
@pytest.mark.parametrize("first", ["resident", "offloaded"])
def test_a_run_goes_on_with_its_base_in_the_other_place(base, tmp_path, first, trainable_only):
    makers = {"resident": resident, "offloaded": lambda: adapted(dispatched(base))}
    whole = prepared(makers["resident"]())
    expected = train(*whole, epochs=2)
    start, goes_on = (makers[first], makers["resident" if first == "offloaded" else "offloaded"])
    accel, *objects = prepared(start())
    assert train(accel, *objects) == expected[:8]
    path = accel.save_state(tmp_path / "middle", trainable_only=trainable_only)
    accel, *objects = prepared(goes_on())
    accel.load_state(path)
    assert train(accel, *objects, epochs=2) == expected[8:]
    same(weights(objects[0]), weights(whole[1]))


def test_a_base_on_disk_refuses_other_values_and_nothing_is_changed(base, tmp_path):
    accel, *_ = prepared(resident(seed=5))
    path = accel.save_state(tmp_path / "other")
    accel, model, *_ = prepared(adapted(dispatched(base)))
    before = weights(model)
    with pytest.raises(ResumeError, match=r"is offloaded to disk.*has another value"):
        accel.load_state(path)
    same(weights(model), before)
    some = prepared(resident(seed=5))[0].save_state(tmp_path / "some", trainable_only=True)
    with pytest.raises(ResumeError, match="frozen weights differ"):
        accel.load_state(some, strict=True)


def test_the_saved_model_is_whole(base, tmp_path):
    accel, model, *_ = prepared(adapted(dispatched(base)))
    accel.save_model(model, tmp_path / "model")
    fresh = resident(seed=9)
    load_checkpoint_in_model(fresh, tmp_path / "model")
    same(weights(fresh), weights(model))


def test_a_base_that_is_not_frozen_says_so_in_the_backward_pass(base):
    model = dispatched(base)
    with pytest.raises(AbsentWeightError, match="freeze it with requires_grad_"):
        loss_of(model, torch.stack(words(2))).backward()


def test_a_frozen_offloaded_weight_cannot_be_unfrozen(base):
    model = adapted(dispatched(base))
    with pytest.raises(AbsentWeightError, match="cannot be trained"):
        model.blocks[0].down.weight.requires_grad_(True)
    with pytest.raises(AbsentWeightError, match="cannot be trained"):
        model.blocks[0].down.weight.requires_grad = True


def test_a_trial_leaves_no_trace(base):
    accel, model, optimizer, loader = prepared(adapted(dispatched(base)))
    before = weights(model)
    with restored([accel.unwrap_model(model), optimizer.optimizer]):
        for batch in loader:
            accel.backward(loss_of(model, batch))
            optimizer.step()
    same(weights(model), before)


def test_weights_are_borrowed_for_an_evaluation(base, tmp_path):
    accel, model, optimizer, loader = prepared(adapted(dispatched(base)))
    train(accel, model, optimizer, loader)
    path = accel.save_state(tmp_path / "early")
    early = weights(model)
    train(accel, model, optimizer, loader)
    late = weights(model)
    with accel.evaluate(model, checkpoint=path):
        same(weights(model), early)
    same(weights(model), late)


def test_a_model_for_inference_is_prepared_as_it_is(base):
    accel = Accelerator(cpu=True)
    model = accel.prepare_model(dispatched(base), evaluation_mode=True)
    with torch.no_grad():
        out = model(torch.stack(words(2)))
    expected = resident()
    for block in expected.blocks:
        block.up = block.up.base
    with torch.no_grad():
        assert torch.equal(out, expected(torch.stack(words(2))))


class Rotation(torch.nn.Module):
    """Multiplies by the conjugate of its weight, a view that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.conj()


def test_gradients_pass_a_conjugated_view_of_an_offloaded_weight(tmp_path):
    torch.manual_seed(0)
    model = Rotation().requires_grad_(False)
    gradients = []
    for layer in (copy.deepcopy(model), disk_offload(model, tmp_path)):
        x = torch.ones(2, 3, dtype=torch.complex64, requires_grad=True)
        torch.view_as_real(layer(x)).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
