"""torch.compile: what is compiled, how often, and that names and identity stay."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo import OptimizedModule, reset

from accel_callbacks import Accelerator, AutocastKwargs, TorchDynamoPlugin


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    reset()
    yield
    reset()


class Counting:
    """A backend that counts the graphs it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list = []

    def __call__(self, graph, inputs, **options):
        self.graphs.append((graph, options))
        return graph.forward

    @property
    def layers(self) -> int:
        """Linear layers in all graphs together."""
        nodes = [node for graph, _ in self.graphs for node in graph.graph.nodes]
        return sum("linear" in str(node.target) for node in nodes)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.seen: list = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


class Stack(torch.nn.Module):
    """An embedding, four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(3, 4)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(4)])
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled_with(backend, precision: str = "no", **options) -> Accelerator:
    plugin = TorchDynamoPlugin(backend=backend, **options)
    return Accelerator(cpu=True, mixed_precision=precision, dynamo_plugin=plugin)


def compiled(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._compiled_call_impl]


def train(accel: Accelerator, model: torch.nn.Module, steps: int = 3) -> torch.Tensor:
    optimizer = accel.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        accel.backward((model(torch.full((8, 3), step + 1.0)) - 1).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_whole_model_is_compiled_in_place_into_one_graph():
    backend, model = Counting(), Stack()
    accel = compiled_with(backend, fullgraph=True)
    prepared = accel.prepare(model)
    assert prepared is model
    assert compiled(model) == [""]
    torch.testing.assert_close(model(torch.ones(2, 3)), Stack()(torch.ones(2, 3)))
    assert (len(backend.graphs), backend.layers) == (1, 6)
    assert list(model.state_dict()) == list(Stack().state_dict())


def test_regions_are_compiled_once_for_all_blocks_of_a_class():
    backend, model = Counting(), Stack()
    compiled_with(backend, use_regional_compilation=True).prepare(model)
    assert compiled(model) == [f"blocks.{index}" for index in range(4)]
    torch.testing.assert_close(model(torch.ones(2, 3)), Stack()(torch.ones(2, 3)))
    assert (len(backend.graphs), backend.layers) == (1, 1)
    assert list(model.state_dict()) == list(Stack().state_dict())


def test_regions_are_found_in_depth_and_in_sequentials():
    inner = torch.nn.Sequential(Block(), Block())
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    mixed = torch.nn.Sequential(Block(), torch.nn.ReLU())
    model = torch.nn.ModuleDict({"inner": inner, "layers": layers, "mixed": mixed})
    compiled_with(Counting(), use_regional_compilation=True).prepare(model)
    assert compiled(model) == ["inner.0", "inner.1"]


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole():
    model = Block()
    compiled_with(Counting(), use_regional_compilation=True).prepare(model)
    assert compiled(model) == [""]


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_compiled_training_is_the_training_that_is_not_compiled(precision, backend, regional):
    accel = compiled_with(backend, precision, use_regional_compilation=regional)
    plain = Accelerator(cpu=True, mixed_precision=precision)
    result = train(accel, accel.prepare(Stack()))
    torch.testing.assert_close(result, train(plain, plain.prepare(Stack())), atol=1e-2, rtol=1e-2)


@pytest.mark.slow
def test_inductor_trains(monkeypatch):
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # inductor leaves it behind
    accel = compiled_with("inductor")
    result = train(accel, accel.prepare(Stack()))
    plain = Accelerator(cpu=True)
    torch.testing.assert_close(result, train(plain, plain.prepare(Stack())))


@dataclass
class Outputs:
    logits: torch.Tensor
    rest: dict


class Rich(torch.nn.Module):
    """Outputs as models return them: a dataclass with nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Outputs:
        hidden = self.layer(x)
        return Outputs(hidden, {"pair": (hidden, hidden.argmax(-1))})


def test_the_autocast_around_a_model_is_part_of_its_one_graph():
    backend = Counting()
    model = compiled_with(backend, "bf16", fullgraph=True).prepare(Stack())
    assert model(torch.ones(1, 3)).dtype is torch.float32
    (graph, _), *others = backend.graphs
    assert not others
    assert "autocast" in str(graph.graph)


def test_rich_outputs_of_a_compiled_model_are_upcast():
    model = compiled_with(Counting(), "bf16").prepare(Rich())
    output = model(torch.ones(1, 3))
    assert output.logits.dtype is torch.float32
    assert output.rest["pair"][0].dtype is torch.float32
    assert output.rest["pair"][1].dtype is torch.int64


def test_blocks_know_the_autocast_that_they_run_in():
    accel = compiled_with("eager", "bf16", use_regional_compilation=True)
    model = accel.prepare(Stack())
    seen = []
    model.blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model(torch.ones(1, 3))
    with accel.autocast(AutocastKwargs(enabled=False)):
        accel.unwrap_model(model, keep_fp32_wrapper=False)(torch.ones(1, 3))
    assert seen == [torch.bfloat16, torch.float32]


# --- the options ---------------------------------------------------------------------------


class Printing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return x + 1


def test_fullgraph_refuses_a_model_of_several_graphs():
    backend = Counting()
    compiled_with(backend).prepare(Printing())(torch.ones(1, 3))
    assert len(backend.graphs) == 2
    reset()
    with pytest.raises(Exception, match="graph_break"):
        compiled_with(backend, fullgraph=True).prepare(Printing())(torch.ones(1, 3))


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 3), (None, 2)])
def test_dynamic_says_how_many_shapes_a_graph_is_for(dynamic, graphs):
    backend = Counting()
    model = compiled_with(backend, dynamic=dynamic).prepare(Block())
    for size in (2, 3, 5):
        model(torch.ones(size, 4))
    assert len(backend.graphs) == graphs


def test_mode_and_options_reach_the_backend():
    with_mode, with_options = Counting(), Counting()
    compiled_with(with_mode, mode="max-autotune").prepare(Block())(torch.ones(1, 4))
    reset()
    compiled_with(with_options, options={"level": 3}).prepare(Block())(torch.ones(1, 4))
    assert with_mode.graphs[0][1]["mode"] == "max-autotune"
    assert with_options.graphs[0][1]["options"] == {"level": 3}


def test_inductor_names_an_option_that_it_does_not_have():
    with pytest.raises(Exception, match="no_such_option"):
        compiled_with("inductor", options={"no_such_option": 1}).prepare(Block())


def test_disabled_and_no_compile_nothing():
    for accel in (
        compiled_with(Counting(), disable=True),
        compiled_with("no"),
        Accelerator(cpu=True, dynamo_backend="no"),
        Accelerator(cpu=True),
    ):
        assert compiled(accel.prepare(Stack())) == []


def test_a_backend_alone_compiles():
    assert compiled(Accelerator(cpu=True, dynamo_backend="eager").prepare(Block())) == [""]


# --- unwrapping, saving, preparing again ---------------------------------------------------


@pytest.mark.parametrize("regional", [False, True])
def test_unwrap_keeps_the_compilation_or_takes_it_off(regional):
    backend, model = Counting(), Stack()
    accel = compiled_with(backend, "bf16", use_regional_compilation=regional)
    accel.prepare(model)
    assert accel.unwrap_model(model) is model
    assert compiled(model)
    bare = accel.unwrap_model(model, keep_torch_compile=False)
    assert bare is model
    assert compiled(bare) == []
    bare(torch.ones(1, 3))
    assert backend.graphs == []
    assert "forward" in vars(bare)  # the autocast around it is another matter


def test_a_compiled_model_is_saved_and_resumed_under_its_own_names(tmp_path):
    accel = compiled_with("eager")
    model = accel.prepare(Stack())
    train(accel, model)
    accel.save_model(model, tmp_path / "model")
    assert sorted(load_file(tmp_path / "model" / "model.safetensors")) == sorted(
        Stack().state_dict()
    )
    accel.save_state(tmp_path / "c")
    other = Accelerator(cpu=True)
    fresh = Stack()
    other.prepare(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1))
    other.load_state(tmp_path / "c")
    assert torch.equal(fresh.head.weight, model.head.weight)


def test_a_deep_copy_of_a_compiled_model_has_its_own_weights():
    accel = compiled_with("eager", "bf16")
    model = accel.prepare(Stack())
    x = torch.ones(1, 3)
    expected = model(x)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    assert average(x).item() == 0.0
    torch.testing.assert_close(model(x), expected)


def test_an_accelerator_that_does_not_compile_takes_back_what_another_did():
    model = Stack()
    compiled_with(Counting()).prepare(model)
    Accelerator(cpu=True).prepare(model)
    assert compiled(model) == []


def test_a_model_that_the_user_compiled_in_place_stays_as_it_is():
    mine, other, model = Counting(), Counting(), Block()
    model.compile(backend=mine)
    accel = compiled_with(other)
    accel.prepare(model)(torch.ones(1, 4))
    assert (len(mine.graphs), len(other.graphs)) == (1, 0)
    again = Block()
    again.compile(backend=mine)
    assert compiled(Accelerator(cpu=True).prepare(again)) == [""]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_torch_compile_returned_can_be_prepared(precision, tmp_path):
    backend, inner = Counting(), Stack()
    wrapper = torch.compile(inner, backend=backend, fullgraph=True)
    assert isinstance(wrapper, OptimizedModule)
    accel = Accelerator(cpu=True, mixed_precision=precision)
    model, _ = accel.prepare(wrapper, torch.optim.SGD(inner.parameters(), lr=0.1))
    assert accel.prepare(wrapper) is model
    assert len(accel.models) == 1
    model(torch.ones(2, 3))
    assert (len(backend.graphs), backend.layers) == (1, 6)
    names = list(Stack().state_dict())
    assert list(model.state_dict()) == list(accel.get_state_dict(model)) == names
    assert list(accel.get_state_dict(wrapper)) == names
    assert accel.unwrap_model(model) is accel.unwrap_model(wrapper) is inner
    train(accel, model)
    accel.save_state(tmp_path / "c")
    accel.load_state(tmp_path / "c")
    assert compiled(accel.unwrap_model(wrapper, keep_torch_compile=False)) == []


def test_evaluation_switches_between_two_graphs_and_back():
    backend = Counting()
    accel = compiled_with(backend)
    model = accel.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
    x = torch.ones(1, 4)
    for _ in range(2):
        model(x)
        with accel.evaluate(model):
            assert torch.equal(model(x), model(x))
    assert len(backend.graphs) == 2


ENCODER = {"d_model": 4, "nhead": 2, "dim_feedforward": 8, "batch_first": True, "dropout": 0.0}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_classes_of_torch_are_compiled_too(precision):
    backend = Counting()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    compiled_with(backend, precision).prepare(model)(torch.ones(1, 4))
    assert (len(backend.graphs), backend.layers) == (1, 1)


def test_blocks_that_are_classes_of_torch_share_their_graph():
    backend = Counting()
    layer = torch.nn.TransformerEncoderLayer(**ENCODER)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    expected = model(torch.ones(1, 2, 4))
    compiled_with(backend, use_regional_compilation=True).prepare(model)
    assert compiled(model) == [f"layers.{index}" for index in range(4)]
    torch.testing.assert_close(model(torch.ones(1, 2, 4)), expected)
    assert len(backend.graphs) <= 2  # the first one's input needs no gradient


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_many_models_in_one_process_are_all_compiled(precision):
    backend = Counting()
    for width in range(2, 14):
        model = torch.nn.Sequential(torch.nn.Linear(width, 3))
        compiled_with(backend, precision, dynamic=False).prepare(model)(torch.ones(1, width))
    assert len(backend.graphs) == 12
