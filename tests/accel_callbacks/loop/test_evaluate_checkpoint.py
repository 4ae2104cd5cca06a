"""evaluate(checkpoint=...): the weights of a checkpoint for a block, then those of the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import checkpoint_io
from accel_callbacks import Accelerator, Callback
from accel_callbacks.callbacks import EMA, Checkpoint, WeightAveraging
from accel_callbacks.errors import ResumeError

SCORES = (0.5, 0.2, 0.4, 0.9)
STEPS = 3  # of an epoch


def network(dtype=torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    net.register_buffer("cache", torch.zeros(2), persistent=False)
    return net.to(dtype)


class Job:
    """A small training whose weights after each epoch are known."""

    def __init__(self, *callbacks, dtype=torch.float32, **options) -> None:
        self.accel = Accelerator(cpu=True, callbacks=list(callbacks), **options)
        self.net = network(dtype)
        adam = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        data = torch.randn(STEPS * 2, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        self.model, self.optimizer, self.data = self.accel.prepare(self.net, adam, loader)
        self.after: list[dict[str, torch.Tensor]] = []  # the weights at the end of each epoch

    def fit(self, epochs=4, each=lambda run: None, **options):
        with self.accel.run("job", **options) as run:
            for epoch in run.epochs(epochs):
                for batch in self.data:
                    self.accel.backward(self.model(batch).square().mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.after.append(copied(self.net))
                self.accel.log({"val": SCORES[epoch]})
                each(run)
        return run

    def everything(self) -> dict[str, object]:
        """All that an evaluation may not change."""
        state, _ = self.accel.training_state.capture()
        modes = [module.training for module in self.net.modules()]
        buffers = {name: (id(b), b.clone()) for name, b in self.net.named_buffers()}
        own = {name: state[name] for name in ("models", "optimizers", "callbacks", "run")}
        return {"state": snapshot(own), "modes": modes, "buffers": buffers}


def copied(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def snapshot(tree):
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: snapshot(value) for key, value in tree.items()}
    return [snapshot(one) for one in tree] if isinstance(tree, (list, tuple)) else tree


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def holds(net: torch.nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    return same(copied(net), weights)


def saver(folder, **options) -> Checkpoint:
    return Checkpoint(folder, every="1 epoch", keep_last=None, monitor="val", **options)


def test_best_and_last_are_evaluated_in_a_run_and_all_is_put_back_bitwise(tmp_path):
    job, seen = Job(saver(tmp_path)), []

    def each(run):
        if run.current_epoch == 3:
            before = job.everything()
            with job.accel.evaluate(job.model, checkpoint="best"):
                seen.append(holds(job.net, job.after[1]))
                seen.append(not job.net.training and not torch.is_grad_enabled())
            with job.accel.evaluate(job.model, checkpoint="last", stage="test"):
                seen.append(holds(job.net, job.after[2]))
            seen.append(same(before, job.everything()))

    job.fit(each=each)
    assert seen == [True] * 4
    plain = Job()
    plain.fit()
    assert same(job.after, plain.after)  # the optimizer went on as if nothing had been


def test_a_path_is_evaluated_and_an_error_in_the_block_puts_all_back(tmp_path):
    job = Job()
    path = job.accel.save_state(tmp_path / "start")
    start = copied(job.net)
    job.fit(2)
    before = job.everything()
    inside = []

    def fails():
        inside.append(holds(job.net, start))
        job.net.cache.fill_(3)  # a buffer that no checkpoint has
        job.net[1].running_mean = torch.ones(4)  # one that is replaced
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), job.accel.evaluate(checkpoint=Path(path)):
        fails()
    assert inside == [True]
    assert same(before, job.everything())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_averages_stored_in_the_checkpoint_are_evaluated_not_the_last(tmp_path, dtype, device):
    job = Job(EMA(0.8, device=device), saver(tmp_path), dtype=dtype)
    averaged = []

    def each(run):
        with job.accel.evaluate(job.model):
            averaged.append(copied(job.net))

    job.fit(each=each)
    before = job.everything()
    with job.accel.evaluate(job.model, checkpoint="best"):
        assert holds(job.net, averaged[1])
    assert not same(averaged[1], averaged[3])
    with job.accel.evaluate(job.model):  # around a block as well
        with job.accel.evaluate(job.model, checkpoint="best"):
            assert holds(job.net, averaged[1])
        assert holds(job.net, averaged[3])
    assert same(before, job.everything())
    assert holds(job.net, job.after[3])


def test_the_weights_are_evaluated_where_no_average_is_used(tmp_path):
    averages = [EMA(0.8, evaluate_with_average=False), WeightAveraging(start_epoch=2)]
    job = Job(*averages, saver(tmp_path))
    job.fit()
    with job.accel.evaluate(checkpoint="best"):  # saved before there was a mean
        assert holds(job.net, job.after[1])
    with job.accel.evaluate(checkpoint="last"):
        assert not holds(job.net, job.after[3])


def test_applied_averages_and_nested_blocks_come_back_in_order(tmp_path):
    ema = EMA(0.8)
    job = Job(ema, saver(tmp_path))
    job.fit()
    before = job.everything()
    with ema.applied():
        average = copied(job.net)
        with job.accel.evaluate(checkpoint="best"):
            best = copied(job.net)
            with job.accel.evaluate(checkpoint="last"):
                assert holds(job.net, average)
            assert holds(job.net, best)
        assert holds(job.net, average)
    assert same(before, job.everything())


def test_hooks_at_both_ends_see_the_weights_of_the_checkpoint(tmp_path):
    seen = []

    class Look(Callback):
        def on_test_start(self, run, model):
            seen.append(copied(model))

        def on_test_end(self, run, model):
            seen.append(copied(model))

    job = Job(EMA(0.8), saver(tmp_path), Look())
    job.fit()
    with job.accel.evaluate(checkpoint="best", stage="test"):
        inside = copied(job.net)
    assert same(seen, [inside, inside])


def test_one_of_several_models_is_evaluated(tmp_path):
    job = Job()
    other = job.accel.prepare(torch.nn.Linear(2, 2))
    path = job.accel.save_state(tmp_path / "c")
    start = copied(other)
    with torch.no_grad():
        other.weight.add_(1)
        job.net[0].weight.add_(1)
    now, net = copied(other), copied(job.net)
    with job.accel.evaluate(other, checkpoint=path):
        assert holds(other, start)
        assert holds(job.net, net)
    with job.accel.evaluate(checkpoint=path):
        assert holds(other, start)
        assert not holds(job.net, net)
    assert holds(other, now)
    assert holds(job.net, net)
    with (
        pytest.raises(ValueError, match="prepare"),
        job.accel.evaluate(network(), checkpoint=path),
    ):
        pass


def test_a_script_without_a_run_evaluates_best_and_last_of_the_folder(tmp_path):
    trained = Job(EMA(0.8), saver(tmp_path))
    averaged = []

    def each(run):
        with trained.accel.evaluate():
            averaged.append(copied(trained.net))

    trained.fit(each=each)
    job = Job(EMA(0.8), saver(tmp_path))
    before = job.everything()
    with job.accel.evaluate(checkpoint="best"):
        assert holds(job.net, averaged[1])
    with job.accel.evaluate(checkpoint="last"):
        assert holds(job.net, averaged[3])
    assert same(before["state"]["models"], job.everything()["state"]["models"])
    assert holds(Job(saver(tmp_path)).net, copied(network()))


def test_steps_saves_and_loads_in_the_block_are_refused_and_save_model_is_not(tmp_path):
    job = Job(saver(tmp_path / "run"))
    job.fit(2)
    with job.accel.evaluate(checkpoint="best"):
        for refused in (job.optimizer.step, job.accel.save_state, job.accel.load_state):
            with pytest.raises(RuntimeError, match=r"evaluate\(checkpoint="):
                refused()
        job.accel.save_model(job.model, tmp_path / "best")
    exported = network()
    exported.load_state_dict(checkpoint_io.load_model_state(tmp_path / "best"))
    assert holds(exported, job.after[1])
    job.accel.save_state(tmp_path / "after")


def test_what_is_missing_says_what_to_do(tmp_path):
    def entering(job, checkpoint):
        before = job.everything()
        try:
            with job.accel.evaluate(checkpoint=checkpoint):
                pass
        finally:
            assert same(before, job.everything())

    with pytest.raises(ValueError, match=r"callbacks=\[Checkpoint"):
        entering(Job(), "best")
    with pytest.raises(ValueError, match="monitor='val/loss'"):
        entering(Job(Checkpoint(tmp_path / "a")), "best")
    with pytest.raises(FileNotFoundError, match="log 'val' before"):
        entering(Job(saver(tmp_path / "b")), "best")
    with pytest.raises(FileNotFoundError, match="save one first"):
        entering(Job(Checkpoint(tmp_path / "c")), "last")
    with pytest.raises(checkpoint_io.CheckpointNotFoundError):
        entering(Job(), tmp_path / "nothing")
    checkpoint_io.save(tmp_path / "foreign", {"weight": torch.ones(1)})
    with pytest.raises(ResumeError, match="save_state"):
        entering(Job(), tmp_path / "foreign")


def test_a_best_that_was_removed_says_how_to_keep_it(tmp_path):
    newest = Checkpoint(tmp_path, every="1 epoch", monitor="val", keep=checkpoint_io.keep_last(1))
    job = Job(newest)
    job.fit()
    with (
        pytest.raises(FileNotFoundError, match=r"keep_best\(1, 'val'\)"),
        job.accel.evaluate(checkpoint="best"),
    ):
        pass


def test_a_checkpoint_that_does_not_fit_or_is_damaged_leaves_all_as_it_was(tmp_path):
    job = Job(EMA(0.8))
    job.fit(1)
    other = Accelerator(cpu=True)
    other.prepare(torch.nn.Linear(5, 5))
    path = other.save_state(tmp_path / "other")
    before = job.everything()
    with pytest.raises(ResumeError), job.accel.evaluate(checkpoint=path):
        pass
    path = job.accel.save_state(tmp_path / "own")
    for file in Path(path).glob("*.safetensors"):
        data = file.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        file.write_bytes(data[:header] + bytes(77 for _ in data[header:]))
    with (
        pytest.raises(checkpoint_io.CorruptCheckpointError),
        job.accel.evaluate(checkpoint=path),
    ):
        pass
    assert same(before, job.everything())
    job.accel.save_state(tmp_path / "goes-on")


def test_of_several_savers_the_first_monitor_is_best_and_the_newest_save_is_last(tmp_path):
    steps = Checkpoint(tmp_path / "steps", every="1 step", keep_last=None)
    best = Checkpoint(tmp_path / "best", monitor="val", keep_last=None)
    job, seen = Job(steps, best), []

    def each(run):
        with job.accel.evaluate(checkpoint="last"):
            seen.append(holds(job.net, job.after[-1]))

    job.fit(each=each)
    assert seen == [True] * 4
    with job.accel.evaluate(checkpoint="best"):
        assert holds(job.net, job.after[1])


def test_a_model_that_loads_in_its_own_way_is_lent_and_put_back(tmp_path):
    class Counts(torch.nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    accel = Accelerator(cpu=True)
    model = Counts(1, 1)
    model = accel.prepare(model)
    path = accel.save_state(tmp_path / "c")
    start, model.seen = model.bias.item(), 5
    torch.nn.init.constant_(model.bias, 9.0)
    with accel.evaluate(checkpoint=path):
        assert (model.seen, model.bias.item()) == (0, start)
    assert (model.seen, model.bias.item()) == (5, 9.0)


def test_a_load_hook_brings_the_weights_that_a_save_hook_wrote(tmp_path):
    job = Job()

    def save(models, weights, folder):
        torch.save(weights.pop(), f"{folder}/own.pt")

    def load(models, folder):
        models.pop().load_state_dict(torch.load(f"{folder}/own.pt", weights_only=True))

    job.accel.register_save_state_pre_hook(save)
    job.accel.register_load_state_pre_hook(load)
    path = job.accel.save_state(tmp_path / "c")
    start = copied(job.net)
    job.fit(1)
    before = job.everything()
    with job.accel.evaluate(checkpoint=path):
        assert holds(job.net, start)
    assert same(before, job.everything())


# --- best_path and last_path after a resume -------------------------------------------------------


def resumed(folder, **options) -> Checkpoint:
    callback = saver(folder)
    Job(callback).fit(0, **options)
    return callback


def paths(callback: Checkpoint) -> tuple[str | None, str | None]:
    return callback.best_path, callback.last_path


@pytest.mark.parametrize("where", ["memory://evaluate-best", None])
def test_best_and_last_paths_are_right_after_a_resume_on_disks_and_urls(tmp_path, where):
    folder = where or str(tmp_path)
    Job(saver(folder)).fit(3)
    assert paths(resumed(folder)) == (f"{folder}/step-00000006", f"{folder}/step-00000009")


def test_best_and_last_paths_follow_a_folder_that_moved(tmp_path):
    Job(Checkpoint(every="1 epoch", monitor="val"), project_dir=tmp_path / "old").fit(3)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = tmp_path / "new/checkpoints"
    again = Checkpoint(every="1 epoch", monitor="val")
    job = Job(again, project_dir=tmp_path / "new")
    job.fit(3)
    assert paths(again) == (str(moved / "step-00000006"), str(moved / "step-00000009"))
    elsewhere = Checkpoint(every="1 epoch", monitor="val")
    job = Job(elsewhere, project_dir=tmp_path / "third")
    with job.accel.run("third", resume=str(moved / "step-00000009")):
        assert paths(elsewhere) == (str(moved / "step-00000006"), str(moved / "step-00000009"))
        with job.accel.evaluate(checkpoint="best"):
            pass


def test_best_path_is_the_best_that_is_left_where_it_was_pruned_by_hand(tmp_path):
    Job(saver(tmp_path)).fit(3)
    shutil.rmtree(tmp_path / "step-00000006")
    callback = resumed(tmp_path)
    assert paths(callback) == (str(tmp_path / "step-00000009"), str(tmp_path / "step-00000009"))
    shutil.rmtree(tmp_path / "step-00000009")
    callback = resumed(tmp_path)
    assert paths(callback) == (str(tmp_path / "step-00000003"), str(tmp_path / "step-00000003"))


@pytest.mark.filterwarnings("ignore::checkpoint_io.CheckpointWarning")
def test_a_newest_checkpoint_that_is_only_partly_there_is_neither_best_nor_last(tmp_path):
    job = Job(saver(tmp_path))
    job.fit(2)
    for file in (tmp_path / "step-00000006").glob("*.safetensors"):
        file.unlink()
    callback = resumed(tmp_path)
    assert paths(callback) == (str(tmp_path / "step-00000003"), str(tmp_path / "step-00000003"))


def test_a_rewound_run_does_not_take_later_checkpoints_for_its_own(tmp_path):
    Job(saver(tmp_path)).fit(3)
    callback, seen = saver(tmp_path), []
    job = Job(callback)
    with job.accel.run("rewound", resume=str(tmp_path / "step-00000003")):
        seen += paths(callback)
    assert seen == [str(tmp_path / "step-00000003")] * 2
