"""ModelSummary: counts of real models, shapes and FLOPs, and that the model is as before."""

from __future__ import annotations

import io
import re

import pytest
import torch
from torch import nn

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Checkpoint, ModelSummary, model_summary, summarize


class Tied(nn.Module):
    """A language model of the smallest kind: the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


def by_name(summary) -> dict:
    return {layer.name: layer for layer in summary.layers}


def test_tied_parameters_count_once_in_the_total_and_are_named():
    summary = summarize(Tied())
    rows = by_name(summary)
    assert summary.total.parameters == 40 + 20
    assert rows["embed"].parameters == rows["head"].parameters == 40
    assert rows["head"].tied_to == ("embed",)
    assert rows["embed"].tied_to == ()
    assert rows["body"].parameters == rows["body.0"].parameters == 20
    assert summary.total.tied_to == ()
    assert "tied to" in str(summary)


def test_a_module_used_twice_counts_once():
    layer = nn.Linear(3, 3)
    assert summarize(nn.Sequential(layer, nn.ReLU(), layer)).total.parameters == 12


def test_frozen_parameters_and_their_types_and_sizes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).bfloat16(), nn.BatchNorm1d(2))
    model[0].requires_grad_(False)
    summary = summarize(model)
    rows = by_name(summary)
    assert (rows["0"].parameters, rows["0"].trainable) == (20, 0)
    assert (rows["1"].bytes, rows["1"].dtypes) == (20, ("bfloat16",))
    assert summary.total.dtypes == ("bfloat16", "float32")
    assert summary.total.trainable == 10 + 4
    assert summary.buffer_bytes == 2 * 2 * 4 + 8
    assert "34 parameters (14 trainable, 20 frozen), 116 B, buffers 24 B" in str(summary)


def test_lazy_parameters_are_not_in_the_numbers_until_an_example_gives_them_a_shape():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    summary = summarize(model)
    assert summary.total.lazy
    assert summary.total.parameters == 4
    assert "whose shapes depend on the first batch" in str(summary)
    assert summarize(model, example=torch.ones(2, 5)).total.parameters == 18 + 4


def test_models_without_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
        example = torch.ones(1, 1000)
    summary = summarize(model, example=example)
    assert summary.total.parameters == 1_001_000 + 10_010
    assert summary.total.flops == 2 * (1000 * 1000 + 1000 * 10)


def test_depth():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(1, 1))))
    assert [layer.name for layer in summarize(model).layers] == ["0", "0.0"]
    assert [layer.name for layer in summarize(model, -1).layers] == ["0", "0.0", "0.0.0"]
    assert summarize(model, 0).layers == ()
    assert str(summarize(model, 0)).count("\n") == 1
    for call in (lambda: summarize(model, -2), lambda: ModelSummary(-2)):
        with pytest.raises(ValueError, match="max_depth=-2"):
            call()


def test_an_example_gives_shapes_and_flops():
    summary = summarize(Tied(), example=torch.tensor([[1, 2, 3]]))
    rows = by_name(summary)
    assert rows["body"].inputs == ((1, 3, 4),)
    assert rows["head"].outputs == ((1, 3, 10),)
    assert rows["embed"].flops == 0
    assert rows["body"].flops == rows["body.0"].flops == 2 * 3 * 4 * 4
    assert summary.total.flops == 2 * 3 * 4 * (4 + 10)


def test_examples_may_be_several_arguments_or_named():
    class Two(nn.Module):
        def forward(self, first: torch.Tensor, *, second: torch.Tensor) -> dict:
            return {"sum": first + second}

    given = {"first": torch.ones(2), "second": torch.ones(2)}
    assert summarize(Two(), example=given).total.inputs == ((2,), (2,))
    assert summarize(nn.Bilinear(2, 3, 1), example=(torch.ones(1, 2), torch.ones(1, 3))).total


def test_the_example_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    summarize(model, example=torch.ones(4, 2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert [module.training for module in model] == [True, True, False]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)
    with pytest.raises(RuntimeError):
        summarize(model, example=torch.ones(4, 3))
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)


def test_it_is_printed_once_a_run(training):
    text = io.StringIO()
    summary = ModelSummary(example=torch.ones(1, 1), file=text)
    kit = training(summary)
    for expected in (1, 2):
        with kit.accel.run("summary") as run:
            for _ in run.epochs(2):
                for batch in kit.train:
                    kit.step(batch)
        assert text.getvalue().count("Linear: 2 parameters") == expected
    assert [one.total.flops for one in summary.summaries] == [2]


def test_a_resume_prints_it_again_only_if_the_model_is_another(training, tmp_path):
    def printed(freeze: bool = False, resume: bool = True) -> bool:
        text = io.StringIO()
        kit = training(ModelSummary(file=text), Checkpoint(tmp_path))
        kit.model.bias.requires_grad_(not freeze)
        with kit.accel.run("resumed", resume=resume) as run:
            for batch in kit.train:
                kit.step(batch)
            assert (run.resumed_from is not None) == resumes
        return "Linear: 2 parameters" in text.getvalue()

    resumes = False
    assert printed()
    resumes = True
    assert not printed()
    assert printed(freeze=True)
    resumes = False
    assert printed(resume=False)


def test_modes_and_what_is_frozen_are_told():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Sequential(nn.Dropout()))
    model[1].eval().requires_grad_(False)
    summary = summarize(model, 1)
    rows = by_name(summary)
    assert [rows[name].mode for name in "012"] == ["train", "eval, frozen", "train"]
    assert (summary.in_train_mode, summary.in_eval_mode) == (4, 1)
    assert str(summary).endswith("modules: 4 in train mode, 1 in eval mode")


@pytest.mark.parametrize("rich", [True, False])
def test_on_a_terminal_it_is_in_color_and_wraps_at_words(monkeypatch, rich):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not rich:
        monkeypatch.setattr(model_summary, "find_spec", lambda name: None)
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1).requires_grad_(False))
    screen = Terminal()
    model_summary._show(summarize(model), screen)
    text = screen.getvalue()
    frozen = next(line for line in text.splitlines() if "frozen" in line)
    assert ("\x1b[2m" in frozen or "\x1b[2;" in frozen) == rich
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert max(len(line.rstrip()) for line in lines) < 60
    words = " ".join(lines).split()
    assert not {
        "BatchNorm1d",
        "trainable",
        "Sequential:",
        "parameters",
        "trainable,",
        "buffers",
        "modules:",
    } - set(words)


def test_without_a_model_nothing_is_printed():
    text = io.StringIO()
    with Accelerator(cpu=True, callbacks=[ModelSummary(file=text)]).run("nothing"):
        pass
    assert text.getvalue() == ""


def test_compiled_models_are_looked_at_without_compiling():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.compile(backend=backend)
    assert summarize(model, example=torch.ones(1, 2)).total.flops == 8
    assert compiled == []
