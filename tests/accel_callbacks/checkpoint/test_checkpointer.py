"""save_state and load_state: bitwise, exact at every step, and all or nothing."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import checkpoint_io
from accel_callbacks import Accelerator, Callback, ResumeError
from accel_callbacks.callbacks import Checkpoint

EPOCHS, BATCHES, WINDOW = 3, 5, 2
STEPS = EPOCHS * 3  # five micro-batches are windows of two, two and one


def dataset() -> torch.utils.data.TensorDataset:
    rows = torch.randn(BATCHES * 4, 3, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(rows, rows.sum(dim=1, keepdim=True))


class Job:
    """Dropout, Adam, a shuffled loader, a validation and a scheduler: fresh objects each time."""

    def __init__(self, *callbacks: Callback, project_dir: Path | None = None, seed: int = 0):
        self.accel = Accelerator(
            cpu=True,
            gradient_accumulation_steps=WINDOW,
            callbacks=callbacks,
            project_dir=project_dir,
        )
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)
        train = torch.utils.data.DataLoader(dataset(), 4, shuffle=True)
        check = torch.utils.data.DataLoader(dataset(), 6)
        self.model, self.optimizer, self.scheduler, self.train, self.check = self.accel.prepare(
            model, optimizer, scheduler, train, check
        )

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with self.accel.accumulate(self.model):
            self.accel.backward(torch.nn.functional.mse_loss(self.model(inputs), targets))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def validate(self) -> None:
        with self.accel.evaluate(self.model):
            for inputs, _ in self.check:
                self.model(inputs)
        self.accel.log({"val/loss": 1.0})

    def fit(self, resume: bool | str = True, epochs: int = EPOCHS) -> dict[str, torch.Tensor]:
        """With ``run`` and ``epochs``."""
        with self.accel.run("job", resume=resume) as run:
            for _ in run.epochs(epochs):
                for inputs, targets in self.train:
                    self.batch(inputs, targets)
                self.validate()
        return self.weights()

    def fit_plainly(self, saver=lambda place: None) -> dict[str, torch.Tensor]:
        """With the user's own count of epochs; ``saver`` is called after each micro-batch."""
        for epoch in range(self.accel.current_run.epochs_done, EPOCHS):
            for index, (inputs, targets) in enumerate(self.train):
                self.batch(inputs, targets)
                saver((epoch, index))
            self.validate()
            saver((epoch, "end"))
        return self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def everything(self) -> dict:
        """All that a failed load must leave as it was."""
        return {
            "model": self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loader": self.train.state_dict(),
            "run": self.accel.current_run.state_dict(),
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
        }


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def simple(**options) -> tuple:
    """An Accelerator, a linear model and its Adam after one step."""
    torch.manual_seed(options.pop("seed", 0))
    accel = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accel.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    accel.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    return accel, model, optimizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict[str, torch.Tensor], Path]:
    """The weights of a run that nobody disturbed, and its checkpoint of every step."""
    folder = tmp_path_factory.mktemp("whole")
    saver = Checkpoint(folder, every_n_steps=1, keep_last=None)
    return Job(saver).fit(), folder


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_resumed_at_any_step_ends_with_the_same_weights(whole, step):
    weights, folder = whole
    job = Job(seed=99)
    random.seed(step)
    resumed = job.fit(resume=str(folder / f"step-{step:08d}"))
    assert same(resumed, weights)
    assert job.accel.current_run.global_step == STEPS
    assert job.accel.current_run.epochs_done == EPOCHS


def test_the_plain_loop_resumed_after_any_micro_batch_ends_with_the_same_weights(tmp_path):
    job, places = Job(), []

    def save(place) -> None:
        places.append(place)
        job.accel.save_state(tmp_path / str(len(places)))

    weights = job.fit_plainly(save)
    assert len(places) == EPOCHS * (BATCHES + 1)
    for number, place in enumerate(places, start=1):
        fresh = Job(seed=99)
        fresh.accel.load_state(tmp_path / str(number))
        assert same(fresh.fit_plainly(), weights), f"resumed at {place}"


def test_saving_does_not_disturb_the_run():
    saving = Job()
    weights = saving.fit_plainly(lambda place: saving.accel.save_state("memory://undisturbed"))
    assert same(weights, Job().fit_plainly())


def test_a_checkpoint_of_an_open_window_saved_again_before_the_next_batch_keeps_the_gradients(
    tmp_path,
):
    job = Job()
    for inputs, targets in job.train:
        job.batch(inputs, targets)
        job.accel.save_state(tmp_path / "first")
        break
    wanted = job.model[0].weight.grad
    assert wanted is None or wanted.abs().sum() > 0
    second = Job(seed=1)
    second.accel.load_state(tmp_path / "first")
    second.accel.save_state(tmp_path / "second")
    third = Job(seed=2)
    third.accel.load_state(tmp_path / "second")
    assert third.model[0].weight.grad is not None
    assert torch.equal(third.model[0].weight.grad, second.model[0].weight.grad)


def test_zero_grad_before_the_loop_spares_the_gradients_of_a_resumed_window(tmp_path):
    job = Job()
    for inputs, targets in job.train:
        job.batch(inputs, targets)
        job.accel.save_state(tmp_path / "c")
        break
    fresh = Job(seed=1)
    fresh.accel.load_state(tmp_path / "c")
    assert fresh.model[0].weight.grad is not None
    fresh.optimizer.zero_grad()
    assert fresh.model[0].weight.grad is not None


def test_going_back_in_the_same_process_is_exact_too(tmp_path):
    job = Job()
    for index, (inputs, targets) in enumerate(job.train):
        job.batch(inputs, targets)
        if index == 1:
            job.accel.save_state(tmp_path / "c")
        if index == 2:
            break  # in the middle of a window, whose gradients must not stay
    job.accel.load_state(tmp_path / "c")
    assert same(job.fit_plainly(), Job().fit_plainly())


def test_a_run_that_stopped_inside_an_epoch_goes_on_there(tmp_path):
    class StopAt(Callback):
        can_vote = True

        def on_after_optimizer_step(self, run, model, optimizer):
            if run.global_step == 4:
                run.stop("machine is wanted back")

    folder = tmp_path / "c"
    stopped = Job(StopAt(), Checkpoint(folder))
    stopped.fit()
    assert stopped.accel.current_run.global_step == 4
    assert same(Job(Checkpoint(folder), seed=9).fit(), Job().fit())


def test_an_epoch_that_the_loop_cuts_short_is_over_for_a_resume_too(tmp_path):
    def fit(job: Job, epochs: int) -> dict[str, torch.Tensor]:
        with job.accel.run("job") as run:
            for _ in run.epochs(epochs):
                for index, (inputs, targets) in enumerate(job.train):
                    job.batch(inputs, targets)
                    if index == 3:
                        break
        return job.weights()

    weights = fit(Job(), 3)
    fit(Job(Checkpoint(tmp_path / "c")), 1)
    assert same(fit(Job(Checkpoint(tmp_path / "c"), seed=9), 3), weights)


def test_a_look_at_one_batch_before_the_loop_is_not_an_epoch():
    ended = []

    class Look(Callback):
        def on_train_epoch_start(self, run, model):
            ended.append(("start", run.current_epoch))

        def on_train_epoch_end(self, run, model):
            ended.append(("end", run.epochs_done))

    job = Job(Look())
    with job.accel.run("job") as run:
        next(iter(job.train))
        for _ in run.epochs(2):
            for inputs, targets in job.train:
                job.batch(inputs, targets)
    assert ended == [("start", 0), ("end", 1), ("start", 1), ("end", 2)]


@pytest.mark.parametrize("url", ["local", "memory://round-trip"])
def test_weights_and_optimizer_state_come_back_bitwise(tmp_path, url):
    path = str(tmp_path / "c") if url == "local" else url
    accel, model, optimizer = simple()
    assert accel.save_state(path) == path
    fresh, other, its_optimizer = simple(seed=5)
    assert fresh.load_state(path) == path
    assert same(other.state_dict(), model.state_dict())
    assert same(its_optimizer.state_dict(), optimizer.state_dict())
    assert fresh.current_run.run_id == accel.current_run.run_id
    assert fresh.current_run.resumed_from == path


def test_optimizer_state_goes_by_name_even_if_the_order_of_parameters_changed(tmp_path):
    def build(swapped: bool):
        accel = Accelerator(cpu=True)
        model = torch.nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
        order = [model["b"], model["a"]] if swapped else [model["a"], model["b"]]
        return accel, *accel.prepare(model, torch.optim.SGD(order, lr=1.0, momentum=0.9))

    accel, model, optimizer = build(swapped=False)
    accel.backward((model["a"] * 3).sum() + (model["b"] * 5).sum())
    optimizer.step()
    accel.save_state(tmp_path / "c")
    fresh, model, optimizer = build(swapped=True)
    fresh.load_state(tmp_path / "c")
    assert optimizer.state[model["a"]]["momentum_buffer"].tolist() == [3.0, 3.0]
    assert optimizer.state[model["b"]]["momentum_buffer"].tolist() == [5.0, 5.0]


def test_optimizer_state_is_saved_under_names(tmp_path):
    accel, *_ = simple()
    accel.save_state(tmp_path / "c")
    state = checkpoint_io.load(tmp_path / "c").state["optimizers"]["0"]
    assert set(state["state"]) == {"0.weight", "0.bias"}
    assert state["param_groups"][0]["params"] == ["0.weight", "0.bias"]


def test_an_optimizer_made_with_named_parameters_resumes(tmp_path):
    def build():
        accel, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=1.0, momentum=0.9)
        return accel, *accel.prepare(model, optimizer)

    accel, model, optimizer = build()
    accel.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accel.save_state(tmp_path / "c")
    fresh, _, its_optimizer = build()
    fresh.load_state(tmp_path / "c")
    assert same(its_optimizer.state_dict(), optimizer.state_dict())


class Tied(torch.nn.Module):
    """Shares a weight, freezes another, and keeps a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(2, 2, bias=False)
        self.two = torch.nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight
        self.frozen = torch.nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.frozen(self.two(self.one(x))))


def test_tied_and_frozen_parameters_parts_of_models_and_parameters_of_none(tmp_path):
    def build():
        accel, model = Accelerator(cpu=True), Tied()
        scale = torch.nn.Parameter(torch.rand(()))
        first = torch.optim.Adam([model.one.weight, scale], lr=0.1)
        second = torch.optim.SGD(model.norm.parameters(), lr=0.1, momentum=0.9)
        accel.register_for_checkpointing(scale=torch.nn.ParameterList([scale]))
        return accel, scale, *accel.prepare(model, first, second)

    accel, scale, model, first, second = build()
    accel.backward((model(torch.rand(4, 2)) ** 3).sum() * scale)
    for optimizer in (first, second):
        optimizer.step()
    accel.save_state(tmp_path / "c")
    fresh, its_scale, other, its_first, its_second = build()
    fresh.load_state(tmp_path / "c")
    assert same(its_scale, scale)
    assert same(other.state_dict(), model.state_dict())
    assert other.two.weight is other.one.weight
    assert not other.frozen.weight.requires_grad
    assert same(its_first.state_dict(), first.state_dict())
    assert same(its_second.state_dict(), second.state_dict())


def test_several_models_and_optimizers_keep_their_places(tmp_path):
    def build(seed: int):
        torch.manual_seed(seed)
        models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        accel = Accelerator(cpu=True)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1 * seed) for m in models]
        return accel, *accel.prepare(*models, *optimizers)

    accel, *parts = build(1)
    accel.save_state(tmp_path / "c")
    fresh, *others = build(2)
    fresh.load_state(tmp_path / "c")
    for other, part in zip(others, parts, strict=True):
        assert same(other.state_dict(), part.state_dict())


def test_every_random_generator_comes_back(tmp_path):
    accel = Accelerator(cpu=True)
    accel.save_state(tmp_path / "c")

    def draw() -> list:
        return [random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    wanted = draw()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    Accelerator(cpu=True).load_state(tmp_path / "c")
    assert draw() == wanted


def test_saving_over_a_checkpoint_replaces_it(tmp_path):
    accel, model, optimizer = simple()
    accel.save_state(tmp_path / "c")
    accel.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accel.save_state(tmp_path / "c")
    fresh, other, _ = simple(seed=5)
    fresh.load_state(tmp_path / "c")
    assert same(other.state_dict(), model.state_dict())
    assert fresh.current_run.global_step == 2


def test_metadata_and_the_run_are_in_the_manifest(tmp_path):
    accel, *_ = simple()
    accel.save_state(tmp_path / "c", metadata={"val": 0.5})
    metadata = checkpoint_io.read_manifest(tmp_path / "c").metadata
    run_id = accel.current_run.run_id
    labels = {"run_id": run_id, "run_name": "run", "step": 1, "epoch": 0, "epochs_done": 0}
    assert metadata == {**labels, "val": 0.5}


def fail_to_load(job: Job, path: Path, match: str) -> None:
    before = job.everything()
    with pytest.raises(ResumeError, match=match):
        job.accel.load_state(path)
    assert same(job.everything(), before)


class Misfit(Job):
    """A job one of whose objects is another than in the checkpoint."""

    def __init__(self, change) -> None:
        super().__init__(seed=7)
        change(self)


def wider(job: Job) -> None:
    job.model[2] = torch.nn.Linear(4, 2)


def renamed(job: Job) -> None:
    job.model.add_module("2b", job.model._modules.pop("2"))


def one_model_more(job: Job) -> None:
    job.accel.prepare(torch.nn.Linear(1, 1))


def one_loader_more(job: Job) -> None:
    job.accel.prepare(torch.utils.data.DataLoader(range(2)))


def other_parameters(job: Job) -> None:
    job.optimizer.param_groups[0]["params"].pop()


def more_groups(job: Job) -> None:
    weight = job.optimizer.param_groups[0]["params"].pop()
    job.optimizer.add_param_group({"params": [weight]})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (wider, r"'2\.\w+' has shape \(2,.*and \(1,"),
        (renamed, r"only in the (model|checkpoint)\. Did you mean '2b?\."),
        (one_model_more, "1 models, but 2 were prepared"),
        (one_loader_more, "2 loaders, but 3 were prepared"),
        (other_parameters, "'0.2.bias' is only in the checkpoint's"),
        pytest.param(more_groups, "group"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, change, match):
    job = Job()
    job.fit(epochs=1)
    job.accel.save_state(tmp_path / "c")
    fail_to_load(Misfit(change), tmp_path / "c", match)


def test_a_checkpoint_that_does_not_fit_reaches_no_callback(tmp_path):
    job = Job()
    job.accel.save_state(tmp_path / "c")
    seen = []

    class Look(Callback):
        def on_load_checkpoint(self, run, model, checkpoint):
            seen.append(checkpoint)

    other = Job(Look())
    other_parameters(other)
    with pytest.raises(ResumeError):
        other.accel.load_state(tmp_path / "c")
    assert seen == []


def damage(folder: Path, files: str = "*.safetensors") -> None:
    file = max(folder.glob(files), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_notice(tmp_path, capsys):
    accel, model, optimizer = simple(project_dir=tmp_path)
    first = accel.save_state()
    wanted = model.weight.detach().clone()
    accel.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    damage(Path(accel.save_state()))
    fresh, other, _ = simple(project_dir=tmp_path, seed=5)
    assert fresh.load_state() == first
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[accel] passed over ")
    assert "step-00000002: " in line
    assert torch.equal(other.weight, wanted)


def test_if_all_are_damaged_neither_load_state_nor_a_run_begins_again(tmp_path):
    accel, *_ = simple(project_dir=tmp_path)
    path = accel.save_state()
    damage(Path(path), "objects-*-r00000.json")  # read before the first tensor is
    fresh, model, _ = simple(project_dir=tmp_path, callbacks=[Checkpoint()], seed=5)
    before = model.weight.detach().clone()
    for attempt in (fresh.load_state, lambda: fresh.load_state(path), fresh.run("r").__enter__):
        with pytest.raises(checkpoint_io.CorruptCheckpointError):
            attempt()
    assert torch.equal(model.weight, before)


def test_with_nothing_saved_load_state_says_so(tmp_path):
    accel, *_ = simple(project_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="save_state"):
        accel.load_state()
    with pytest.raises(checkpoint_io.CheckpointNotFoundError):
        accel.load_state(tmp_path / "nowhere")


def test_strict_accepts_what_is_exact(tmp_path):
    accel, *_ = simple()
    accel.save_state(tmp_path / "c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accel.load_state(tmp_path / "c", strict=True)


class Remembers(Callback):
    """Adds to the checkpoint, and finds it again."""

    def __init__(self) -> None:
        self.loaded: dict | None = None
        self.saved: list[str] = []

    def on_save_checkpoint(self, run, model, checkpoint):
        checkpoint["mine"] = {"words": ("a", 1), "tensor": torch.arange(3)}

    def on_load_checkpoint(self, run, model, checkpoint):
        self.loaded = checkpoint["mine"]

    def on_checkpoint_saved(self, run, model, path):
        self.saved.append(path)


def test_what_a_callback_adds_comes_back_to_it(tmp_path):
    first, second = Remembers(), Remembers()
    accel, *_ = simple(callbacks=[first])
    path = accel.save_state(str(tmp_path / "c"))
    assert first.saved == [path]
    fresh, *_ = simple(callbacks=[second])
    fresh.load_state(path)
    assert second.loaded["words"] == ("a", 1)
    assert torch.equal(second.loaded["tensor"], torch.arange(3))


class Holds(Callback):
    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self) -> dict:
        return {"inner": {"value": self.value}}

    def load_state_dict(self, state_dict: dict) -> None:
        self.value = state_dict["inner"]["value"]


def test_an_object_that_cannot_be_saved_is_named_and_the_old_checkpoint_stays(tmp_path):
    holder = Holds(1)
    accel, *_ = simple(callbacks=[holder])
    accel.save_state(tmp_path / "c")
    holder.value = object()
    with pytest.raises(checkpoint_io.CheckpointError, match=r"\['Holds'\]\['inner'\]\['value'\]"):
        accel.save_state(tmp_path / "c")
    accel.load_state(tmp_path / "c")
    assert holder.value == 1


def test_the_state_of_a_callback_that_is_not_here_is_kept_for_the_next_save(tmp_path):
    accel, *_ = simple(callbacks=[Holds(7)])
    accel.save_state(tmp_path / "a")
    without, *_ = simple()
    without.load_state(tmp_path / "a")
    without.save_state(tmp_path / "b")
    holder = Holds(0)
    again, *_ = simple(callbacks=[holder])
    again.load_state(tmp_path / "b")
    assert holder.value == 7


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_save_model_is_read_by_safetensors(tmp_path, precision):
    accel, model = Accelerator(cpu=True, mixed_precision=precision), Tied()
    accel.save_model(accel.prepare(model), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert torch.equal(file.get_tensor(name), model.state_dict()[name])
        assert "one.weight" in file.keys() or "two.weight" in file.keys()  # noqa: SIM118


def test_get_state_dict_has_the_names_of_the_plain_model():
    accel, model, _ = simple()
    assert same(dict(accel.get_state_dict(model)), dict(model.state_dict()))


def test_a_plain_script_saves_in_the_project_and_finds_the_newest(tmp_path):
    accel, *_ = simple(project_dir=tmp_path)
    path = accel.save_state()
    assert path == f"{tmp_path}/checkpoints/step-00000001"
    fresh, *_ = simple(project_dir=tmp_path)
    assert fresh.load_state() == path


def test_a_metric_that_a_checkpoint_cannot_hold_is_refused_when_it_is_logged():
    accel, *_ = simple()
    with pytest.raises(TypeError, match="train/losses"):
        accel.log({"train/losses": torch.ones(3)})
    with pytest.raises(TypeError, match="object"):
        accel.log({"object": object()})
    accel.save_state("memory://metrics")
