"""The state of the random generators: a few values, restored from what older versions saved too."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from accel_callbacks import Accelerator
from accel_callbacks.checkpoint import parts, training_state
from accel_callbacks.distributed.rng import capture_rng, devices_of, restore_rng
from accel_callbacks.models import undisturbed
from checkpoint_io import load

CPU = torch.device("cpu")


def draws() -> list[Any]:
    numbers = [random.random(), random.gauss(0, 1), *np.random.rand(3), np.random.randn()]
    return [*numbers, *torch.rand(3).tolist()]


def captured_by_older_versions() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
    }


def decoded_by_older_versions() -> dict[str, Any]:
    """As above, but lists for what JSON does not keep as a tuple."""
    version, words, gauss = random.getstate()
    return {**captured_by_older_versions(), "python": [version, list(words), gauss]}


@pytest.fixture(params=[False, True], ids=["even", "odd"])
def halfway(request):
    """Both generators of Python and NumPy hold the second number of a pair, or none."""
    before = capture_rng(CPU)
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    if request.param:
        random.gauss(0, 1)
        np.random.randn()
    yield
    restore_rng(before, CPU)


@pytest.mark.parametrize(
    "capture",
    [lambda: capture_rng(CPU), captured_by_older_versions, decoded_by_older_versions],
    ids=["now", "older", "older, from JSON"],
)
def test_what_was_captured_is_drawn_again(halfway, capture):
    state = capture()
    first = draws()
    assert draws() != first
    restore_rng(state, CPU)
    assert draws() == first


def test_a_checkpoint_holds_it_in_a_few_values_and_in_no_file_of_tensors(halfway, tmp_path):
    accel = Accelerator(cpu=True)
    accel.prepare(torch.nn.Linear(1, 1))
    accel.save_state(tmp_path / "c")
    first = draws()
    saved = load(tmp_path / "c")
    rng = saved.local_state["rng"]
    assert len(rng["python"]) == 3
    assert [type(rng["python"][1]), type(rng["torch"]), type(rng["numpy"][1])] == [bytes] * 3
    kinds = [(entry.kind, entry.name.rsplit("-", 1)[-1]) for entry in saved.manifest.files]
    assert sorted(kinds) == [
        ("objects", "r00000.json"),
        ("objects", "shared.json"),
        ("tensors", "00001.safetensors"),
    ]
    accel.load_state(tmp_path / "c")
    assert draws() == first


def test_another_bit_generator_in_the_place_of_numpys_is_kept():
    """`get_state` warns of it, and returns a dict, which is kept as it is."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.warns(RuntimeWarning, match="legacy"):
            state = capture_rng(CPU)
        first = np.random.rand(3).tolist()
        restore_rng(state, CPU)
        assert np.random.rand(3).tolist() == first
    finally:
        np.random.set_bit_generator(before)


# --- several devices --------------------------------------------------------------------------


class Gpus:
    """Stands in for torch.cuda: a generator for each device, made when it is first asked for."""

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}

    def of(self, device: torch.device) -> torch.Generator:
        return self.generators.setdefault(device, torch.Generator(device="cpu"))

    def current_device(self) -> int:
        return 0

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.of(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.of(device).set_state(state)

    def draw(self, *devices: torch.device) -> list[float]:
        return [torch.rand((), generator=self.of(device)).item() for device in devices]


FIRST, SECOND, THIRD = (torch.device("cuda", index) for index in range(3))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    fake = Gpus()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


def test_the_generators_of_all_devices_that_are_named_are_kept_and_no_other_is_asked(gpus):
    gpus.draw(FIRST, SECOND)
    state = capture_rng(torch.device("cuda"), {CPU, FIRST, SECOND, torch.device("meta")})
    assert set(gpus.generators) == {torch.device("cuda"), FIRST, SECOND}
    assert list(state["other_devices"]) == ["cuda:1"]
    first = gpus.draw(torch.device("cuda"), SECOND)
    restore_rng(state, torch.device("cuda"), {SECOND})
    assert gpus.draw(torch.device("cuda"), SECOND) == first


def test_states_of_devices_that_are_not_used_any_more_are_left(gpus):
    gpus.draw(SECOND, THIRD)
    state = capture_rng(CPU, {SECOND})
    drawn = gpus.draw(SECOND)
    restore_rng(state, CPU)
    assert gpus.draw(SECOND) != drawn, "it was not restored"
    before = gpus.of(THIRD).get_state()
    restore_rng(state, CPU, {SECOND, THIRD})
    assert gpus.draw(SECOND) == drawn
    assert torch.equal(gpus.of(THIRD).get_state(), before), "there is no state of it"
    older = {name: one for name, one in state.items() if name != "other_devices"}
    restore_rng(older, CPU, {SECOND})


def test_one_device_is_kept_as_in_older_versions():
    assert "other_devices" not in capture_rng(CPU, {CPU})


def test_a_checkpoint_has_the_generators_of_the_devices_of_a_model(gpus, tmp_path, monkeypatch):
    model = torch.nn.Linear(1, 1)
    accel = Accelerator(cpu=True)
    accel.prepare(model)
    places = {CPU, FIRST, SECOND}
    for module in (training_state, parts):
        monkeypatch.setattr(module, "devices_of", lambda models: places if models else set())
    accel.save_state(tmp_path / "c")
    drawn = gpus.draw(FIRST, SECOND)
    accel.load_state(tmp_path / "c")
    assert gpus.draw(FIRST, SECOND) == drawn


def test_an_evaluation_leaves_the_generators_of_the_models_devices(gpus, monkeypatch):
    monkeypatch.setattr(undisturbed, "devices_of", lambda models: {SECOND})
    state = gpus.of(SECOND).get_state()
    with undisturbed.undisturbed_eval([torch.nn.Linear(1, 1)], CPU):
        gpus.draw(SECOND)
    assert torch.equal(gpus.of(SECOND).get_state(), state)


def test_the_devices_of_models_are_those_of_their_parameters():
    models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta")]
    assert devices_of(models) == {CPU, torch.device("meta")}
