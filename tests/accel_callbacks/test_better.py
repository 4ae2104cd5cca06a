"""What users of other libraries report as bugs or wish for: a test for each, named after it."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import checkpoint_io
from accel_callbacks import (
    Accelerator,
    AcceleratorState,
    Callback,
    ProjectConfiguration,
    gather_object,
    set_seed,
    skip_first_batches,
)
from accel_callbacks.callbacks import Checkpoint
from accel_callbacks.distributed.topology import destroy_topology
from loggers import read_jsonl
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def tidy():
    yield
    destroy_topology()


def accelerator(**options) -> Accelerator:
    return Accelerator(cpu=True, timeout=BOUND, **options)


class Counted(Dataset):
    """The numbers from 0 on, and a note of which were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor([float(index)])


def numbers(batches) -> list[float]:
    return [number for batch in batches for number in batch.flatten().tolist()]


# --- resume ---------------------------------------------------------------------------------


def start(folder: str, samples: int = 13, batch_size: int = 2):
    set_seed(1)
    accel = accelerator(project_dir=folder)
    data = Counted(samples)
    return accel, data, accel.prepare(DataLoader(data, batch_size, shuffle=True))


def straight(folder: str, epochs: int = 3) -> list[list[float]]:
    _, _, loader = start(folder)
    return [numbers(loader) for _ in range(epochs)]


@pytest.mark.parametrize("how", ["the loader", "skip_first_batches"])
@pytest.mark.parametrize("done", [1, 3, 6])
def test_a_resume_in_mid_epoch_yields_the_remaining_samples_then_the_next_order(
    tmp_path, done, how
):
    whole = straight(str(tmp_path))
    accel, _, loader = start(str(tmp_path))
    for _ in loader:
        pass
    for number, _ in enumerate(loader, 1):
        if number == done:
            path = accel.save_state()
            break
    accel, _, loader = start(str(tmp_path))
    accel.load_state(path)
    rest = loader if how == "the loader" else skip_first_batches(loader, done)
    assert numbers(rest) == whole[1][2 * done :]
    assert numbers(loader) == whole[2]


def test_a_resume_reads_none_of_the_samples_before_it(tmp_path):
    accel, _, loader = start(str(tmp_path), samples=1000)
    for number, _ in enumerate(loader, 1):
        if number == 400:
            path = accel.save_state()
            break
    accel, data, loader = start(str(tmp_path), samples=1000)
    accel.load_state(path)
    assert len(numbers(loader)) == len(data.read) == 200


def half_an_epoch(folder: str) -> list[float]:
    accel, _, loader = start(folder, batch_size=1)
    seen = []
    for batch in loader:
        seen += accel.gather_for_metrics(batch).flatten().tolist()
        if len(seen) == 6:
            accel.save_state(folder + "/saved")
            break
    return seen


def test_a_resume_on_another_number_of_processes_yields_the_rest(pool, tmp_path):
    whole = straight(str(tmp_path))
    first, second = pool.run(half_an_epoch, str(tmp_path))
    assert first == second == whole[0][:6]
    accel, _, loader = start(str(tmp_path))
    with pytest.warns(UserWarning, match="saved by 2 processes"):
        accel.load_state(str(tmp_path / "saved"))
    assert numbers(loader) == whole[0][6:]
    assert numbers(loader) == whole[1]


def draws_after_a_resume(folder: str) -> tuple[float, float]:
    set_seed(3, device_specific=True)
    accel = accelerator()
    accel.save_state(folder)
    before = torch.rand(1).item()
    torch.rand(5)
    accel.load_state(folder)
    return before, torch.rand(1).item()


def test_random_generators_are_stored_per_rank(pool, tmp_path):
    (first, again), (second, again_second) = pool.run(draws_after_a_resume, str(tmp_path / "saved"))
    assert (first, second) == (again, again_second)
    assert first != second


def test_a_restore_that_cannot_be_exact_is_not_swallowed(pool, tmp_path):
    pool.run(draws_after_a_resume, str(tmp_path / "saved"))
    accel = accelerator()
    with pytest.warns(UserWarning, match="random generators are not restored"):
        accel.load_state(str(tmp_path / "saved"))
    with pytest.raises(RuntimeError, match="random generators are not restored"):
        accel.load_state(str(tmp_path / "saved"), strict=True)


# --- checkpoints ----------------------------------------------------------------------------


def training(folder: Path, *callbacks) -> tuple:
    accel = accelerator(project_dir=str(folder), callbacks=callbacks)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accel, *accel.prepare(model, optimizer, DataLoader(torch.ones(4, 1)))


def fit(folder: Path, *callbacks, epochs: int = 1) -> Accelerator:
    accel, model, optimizer, loader = training(folder, *callbacks)
    with accel.run("better") as run:
        for _ in run.epochs(epochs):
            for batch in loader:
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
    return accel


def test_keeping_one_and_a_failing_write_never_lose_the_last_good_checkpoint(tmp_path, monkeypatch):
    fit(tmp_path, Checkpoint(every_n_epochs=1, keep_last=1))
    good = checkpoint_io.CheckpointFolder(str(tmp_path / "checkpoints")).latest()

    class Full(Callback):
        def state_dict(self):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        fit(tmp_path, Checkpoint(every_n_epochs=1, keep_last=1), Full(), epochs=2)
    assert checkpoint_io.CheckpointFolder(str(tmp_path / "checkpoints")).latest() == good
    assert fit(tmp_path, epochs=1).load_state()


def test_resume_and_then_save_does_not_raise_already_exists(tmp_path):
    accel = training(tmp_path)[0]
    saved = accel.save_state()
    accel = training(tmp_path)[0]
    assert accel.load_state() == saved
    assert accel.save_state() == saved


def numbered(folder: Path, **options) -> Accelerator:
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **options)
    accel = accelerator(project_config=config)
    accel.prepare(torch.nn.Linear(1, 1))
    return accel


def test_a_total_limit_of_one_and_a_failing_write_never_lose_the_last_good_checkpoint(tmp_path):
    class Full:
        full = False

        def state_dict(self) -> dict:
            if self.full:
                raise OSError("no space left on device")
            return {}

        def load_state_dict(self, state: dict) -> None:
            pass

    accel, disk = numbered(tmp_path, total_limit=1), Full()
    accel.register_for_checkpointing(disk=disk)
    accel.save_state()
    good = accel.save_state()
    disk.full = True
    with pytest.raises(OSError, match="no space"):
        accel.save_state()
    left = [path.name for path in (tmp_path / "checkpoints").glob("[!.]*")]
    assert left == ["checkpoint_1"]
    assert numbered(tmp_path).load_state() == good


def test_resume_and_then_save_with_automatic_naming_does_not_raise_already_exists(tmp_path):
    accel = numbered(tmp_path)
    saved = [accel.save_state() for _ in range(3)]
    accel = numbered(tmp_path)
    assert accel.load_state() == saved[-1]
    assert accel.save_state().endswith("checkpoint_3")
    accel = numbered(tmp_path)
    accel.load_state(saved[0])  # an older one, by hand
    assert accel.save_state().endswith("checkpoint_4")


def test_a_partial_save_is_detected_and_passed_over(tmp_path):
    accel, model, optimizer, loader = training(tmp_path)
    whole = accel.save_state()
    for batch in loader:
        accel.backward(model(batch).sum())
        optimizer.step()
    partial = Path(accel.save_state())
    (partial / "manifest.json").unlink()
    accel = training(tmp_path)[0]
    assert accel.load_state() == whole
    with pytest.raises(checkpoint_io.CheckpointError):
        accel.load_state(partial)


@pytest.mark.s3
def test_save_state_goes_to_object_storage(tmp_path, s3_options):
    accel = training(tmp_path)[0]
    url = accel.save_state("s3://bucket/better", storage_options=s3_options)
    assert accel.load_state(url, storage_options=s3_options) == url
    assert fsspec.filesystem("s3", **s3_options).exists("bucket/better/manifest.json")


@pytest.mark.s3
def test_save_state_goes_to_object_storage_while_training_goes_on(tmp_path, s3_options):
    accel, model, optimizer, loader = training(tmp_path)
    url = "s3://bucket/better-background"
    weight = model.weight.detach().clone()
    assert accel.save_state(url, async_save=True, storage_options=s3_options) == url
    for batch in loader:
        accel.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    accel.wait_for_save()
    assert not torch.equal(model.weight, weight)
    accel.load_state(url, storage_options=s3_options)
    assert torch.equal(model.weight, weight)


def test_pruning_never_deletes_the_checkpoints_of_another_run(tmp_path):
    fit(tmp_path, Checkpoint(tmp_path / "shared", every_n_epochs=1, keep_last=1), epochs=2)
    other = sorted(path.name for path in (tmp_path / "shared").glob("step-*"))
    accel, model, optimizer, loader = training(
        tmp_path, Checkpoint(tmp_path / "shared", every_n_steps=1, keep_last=1)
    )
    with accel.run("another", resume=False) as run:
        for _ in run.epochs(1):
            for batch in loader:
                accel.backward(model(batch).sum())
                optimizer.step()
    left = sorted(path.name for path in (tmp_path / "shared").glob("step-*"))
    assert set(other) < set(left)
    assert len(left) == len(other) + 1


def test_callbacks_keep_their_state_through_save_state_by_name_and_in_place(tmp_path):
    class Count(Callback):
        def __init__(self, name: str) -> None:
            self.name, self.seen = name, [0]

        @property
        def state_key(self):
            return self.name

        def state_dict(self):
            return {"seen": self.seen[0]}

        def load_state_dict(self, state):
            self.seen[0] = state["seen"]

    first, second = Count("first"), Count("second")
    first.seen[0], second.seen[0] = 1, 2
    path = training(tmp_path, first, second)[0].save_state()
    second, first = Count("second"), Count("first")
    held = first.seen
    training(tmp_path, second, first)[0].load_state(path)
    assert (held, second.seen) == ([1], [2])


def test_trackers_resume_the_same_run_and_keep_its_history(tmp_path):
    class Logs(Callback):
        def on_train_batch_end(self, run, model, outputs, batch, batch_idx):
            run.accelerator.log({"step": run.global_step})

    def part(epochs: int) -> str:
        accel = accelerator(
            project_dir=str(tmp_path),
            log_with="jsonl",
            callbacks=[Logs(), Checkpoint(every_n_epochs=1)],
        )
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accel.prepare(model, optimizer, DataLoader(torch.ones(4, 1)))
        with accel.run("tracked") as run:
            for _ in run.epochs(epochs):
                for batch in loader:
                    accel.backward(model(batch).sum())
                    optimizer.step()
        return run.run_id

    assert part(1) == part(2)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, 9))


# --- the step -------------------------------------------------------------------------------


def test_six_micro_batches_in_windows_of_four_are_averaged_in_both():
    accel = accelerator(gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    gradients = []
    for batch in accel.prepare(DataLoader(torch.ones(6, 1))):
        with accel.accumulate(model):
            accel.backward(-model(batch).sum())
            if accel.sync_gradients:
                gradients.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert gradients == [-1.0, -1.0]


def learning_rate_after_one_step() -> float:
    accel = accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accel.prepare(model, optimizer, scheduler)
    accel.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    return scheduler.get_last_lr()[0]


def test_the_scheduler_is_not_stepped_world_size_times(pool):
    assert pool.run(learning_rate_after_one_step) == [0.5, 0.5]


# --- metrics and processes ------------------------------------------------------------------


def metrics_of_an_odd_number(skipped: int) -> list[float]:
    accel = accelerator()
    loader = skip_first_batches(accel.prepare(DataLoader(Counted(7), 2)), skipped)
    return numbers(accel.gather_for_metrics(batch) for batch in loader)


@pytest.mark.parametrize("skipped", [0, 1])
def test_gather_for_metrics_drops_duplicates_after_skip_first_batches_too(pool, skipped):
    expected = [float(number) for number in range(4 * skipped, 7)]
    assert pool.run(metrics_of_an_odd_number, skipped) == [expected] * 2


def gathered_dicts() -> list:
    return gather_object({"rank": accelerator().process_index})


def test_gather_object_keeps_dicts(pool):
    assert pool.run(gathered_dicts) == [[{"rank": 0}, {"rank": 1}]] * 2


def two_side_by_side() -> list:
    exact = accelerator(gradient_accumulation_steps=2)
    fast = accelerator(mixed_precision="bf16")
    seen = []
    for accel in (exact, fast):
        model = torch.nn.Linear(1, 1)
        model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in accel.prepare(DataLoader(torch.ones(8, 1))):
            with accel.accumulate(model):
                accel.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
        seen.append((accel.mixed_precision, accel.current_run.global_step))
    return [*seen, AcceleratorState().mixed_precision]


def test_two_accelerators_in_one_process(pool):
    assert pool.run(two_side_by_side) == [[("no", 2), ("bf16", 4), "no"]] * 2


def test_a_sweep_in_one_process(tmp_path):
    losses = []
    for number, rate in enumerate((0.1, 0.01, 0.001)):
        accel = accelerator(project_dir=str(tmp_path / str(number)), log_with="jsonl")
        model = torch.nn.Linear(1, 1)
        model, optimizer, loader = accel.prepare(
            model, torch.optim.SGD(model.parameters(), rate), DataLoader(torch.ones(4, 1))
        )
        with accel.run(f"rate-{rate}") as run:
            for _ in run.epochs(1):
                for batch in loader:
                    accel.backward(model(batch).square().sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    accel.log({"rate": optimizer.param_groups[0]["lr"]})
        losses.append((run.global_step, run.callback_metrics["rate"]))
        accel.end_training()
    assert losses == [(4, 0.1), (4, 0.01), (4, 0.001)]
