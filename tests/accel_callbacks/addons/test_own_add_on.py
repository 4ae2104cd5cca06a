"""An add-on from outside of the library: its observer watches and refuses, its part is saved."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint, Observer, register_observer
from accel_callbacks.checkpoint import CheckpointPart, Load
from accel_callbacks.checkpoint.part import Sections

EPOCHS = 2


class Odometer(Observer, CheckpointPart):
    """Counts the batches of all attempts, and lets nothing be saved while the brake is on."""

    name = "odometer"

    def __init__(self) -> None:
        self.batches = 0
        self.brake = False
        self.seen: list[str] = []

    def attach(self, accelerator: Any) -> None:
        accelerator.training_state.register(self)

    def open(self, run: Any) -> bool:
        self.seen.append(f"open {run.name}")
        return True

    def end_batch(self, run: Any, batch: Any) -> None:
        self.batches += 1

    def on_train_epoch_end(self, run: Any, model: Any) -> None:
        self.seen.append(f"epoch {run.current_epoch}")

    def close(self, status: str, error: BaseException | None = None) -> dict[str, float]:
        self.seen.append(status)
        return {"odometer": float(self.batches)}

    def may_save(self) -> bool:
        if self.brake:
            raise RuntimeError("the brake is on: release it, then save")
        return True

    def capture(self) -> Sections:
        return {"odometer": {"batches": self.batches}}, {}

    def restore(self, load: Load) -> None:
        self.batches = load.selected["odometer"]["batches"]


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
    return model, optimizer, DataLoader(data, batch_size=4)


def train(root: str, epochs: int, *, brake: bool = False) -> tuple[Odometer, dict[str, Any], str]:
    """Train to the end of an epoch with the add-on; return it, the weights and what was refused."""
    odometer = Odometer()
    handle = register_observer(lambda project, config: odometer)
    try:
        accel = Accelerator(cpu=True, callbacks=[Checkpoint(os.path.join(root, "checkpoints"))])
    finally:
        handle.remove()
    model, optimizer, loader = accel.prepare(*parts())
    odometer.brake = brake
    try:
        with accel.run("road") as run:
            for _ in run.epochs(epochs):
                for x, y in loader:
                    accel.backward(torch.nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
    except RuntimeError as error:
        return odometer, {}, str(error)
    return odometer, accel.unwrap_model(model).state_dict(), ""


def test_it_watches_saves_resumes_and_changes_nothing(tmp_path: Any) -> None:
    model, optimizer, loader = parts()
    for _ in range(EPOCHS):
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    first, _, _ = train(str(tmp_path), 1)
    assert first.seen == ["open road", "epoch 0", "success"]
    second, weights, _ = train(str(tmp_path), EPOCHS)
    assert (first.batches, second.batches) == (6, 12), "counted over both attempts"
    assert second.seen == ["open road", "epoch 1", "success"]
    for name, value in model.state_dict().items():
        assert torch.equal(weights[name], value)


def test_its_refusal_ends_the_save_and_leaves_nothing(tmp_path: Any) -> None:
    odometer, _, told = train(str(tmp_path), 1, brake=True)
    assert told == "the brake is on: release it, then save"
    assert odometer.seen[-1] == "failed"
    assert not list(tmp_path.rglob("manifest.json"))


class Careless(Observer):
    """Cannot be closed."""

    def close(self, status: str, error: BaseException | None = None) -> dict[str, float]:
        raise OSError("no space is left for its summary")


@pytest.mark.parametrize("fails", [False, True])
def test_all_are_closed_once_where_one_raises(
    fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    odometer = Odometer()
    handles = [register_observer(lambda project, config: Careless())]
    handles.append(register_observer(lambda project, config: odometer))
    try:
        accel = Accelerator(cpu=True)
    finally:
        for handle in handles:
            handle.remove()
    error = ValueError("of the script") if fails else OSError("no space is left for its summary")

    def run() -> None:
        with accel.run("road"):
            if fails:
                raise error

    with pytest.raises(type(error), match=str(error)):
        run()
    assert odometer.seen == ["open road", "failed" if fails else "success"]
    assert ("no space is left" in capsys.readouterr().err) == fails


def train_on_ranks(root: str, epochs: int, braking: int | None) -> tuple[int, list[str], str]:
    odometer, _, told = train(root, epochs, brake=int(os.environ["RANK"]) == braking)
    return odometer.batches, odometer.seen, told


@pytest.mark.distributed
def test_on_two_processes(pool: Any, tmp_path: Any) -> None:
    once = pool.run(train_on_ranks, str(tmp_path), 1, None)
    assert once == [(3, ["open road", "epoch 0", "success"], "")] * 2
    twice = pool.run(train_on_ranks, str(tmp_path), EPOCHS, None)
    assert [batches for batches, _, _ in twice] == [6, 6]


@pytest.mark.distributed
def test_the_refusal_of_one_process_ends_the_run_on_all(pool: Any, tmp_path: Any) -> None:
    outcomes = pool.run(train_on_ranks, str(tmp_path), 1, 1)
    assert all("the brake is on" in told for _, _, told in outcomes)
    assert [seen[-1] for _, seen, _ in outcomes] == ["failed", "failed"]
    assert not list(tmp_path.rglob("manifest.json"))


class Rehearsal(Observer):
    """Goes to a folder of its own, saves nothing, and begins afresh."""

    def __init__(self, folder: str) -> None:
        self.scratch_folder = folder

    def may_save(self) -> bool:
        return False

    def resume_path(self) -> str:
        return ""


def test_a_rehearsal_writes_to_its_own_folder_alone(tmp_path: Any) -> None:
    train(str(tmp_path / "project"), 1)
    before = sorted(tmp_path.rglob("*"))
    handle = register_observer(lambda project, config: Rehearsal(str(tmp_path / "scratch")))
    try:
        accel = Accelerator(
            cpu=True,
            project_dir=str(tmp_path / "project"),
            log_with="jsonl",
            callbacks=[Checkpoint(str(tmp_path / "project" / "checkpoints"))],
        )
    finally:
        handle.remove()
    model, optimizer, loader = accel.prepare(*parts())
    with accel.run("road") as run:
        assert run.resumed_from is None
        for x, y in loader:
            accel.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert accel.save_state(str(tmp_path / "own")) == ""
    assert run.global_step == 6
    scratch = [path for path in tmp_path.rglob("*") if "scratch" in path.parts]
    assert any("journal" in path.parts for path in scratch)
    assert sorted({*tmp_path.rglob("*")} - {*scratch}) == before


def test_what_is_registered_must_return_an_observer() -> None:
    with pytest.raises(TypeError, match="pass a function of the project and the configuration"):
        register_observer("odometer")
    handle = register_observer(lambda project, config: object())
    try:
        with pytest.raises(
            TypeError, match=r"return a subclass of accel_callbacks\.callbacks\.Obs"
        ):
            Accelerator(cpu=True)
    finally:
        handle.remove()
    Accelerator(cpu=True)
