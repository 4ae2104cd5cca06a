"""A dispatched model is the resident one: called, trained, saved, copied, compiled."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from accel_callbacks import TorchDynamoPlugin
from accel_callbacks.compat.views import put_views
from accel_callbacks.models.compile import compile_model, is_compiled, release, uncompile
from accel_callbacks.models.offload.placeholder import AbsentWeight, AbsentWeightError
from accel_callbacks.models.offload.residence import (
    _window_bytes,
    offload_hooks,
    onloaded,
)
from accel_callbacks.models.offload.source import StoredWeights
from accel_callbacks.placeholder import kept_elsewhere
from accel_callbacks.utils import remove_hook_from_submodules
from checkpoint_io import load_model, save_model
from tests.accel_callbacks.models.offload.adapted import Block, pretrained, saved, words
from tests.accel_callbacks.models.offload.attached import attached
from tests.support.pairs import pairwise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("base"))


@pytest.fixture
def plain():
    return pretrained().requires_grad_(False)


BATCH = torch.stack(words(3))


def same(model, plain, batch=BATCH):
    with torch.no_grad():
        return torch.equal(model(batch), plain(batch))


def absent(model):
    return [name for name, one in model.named_parameters() if isinstance(one, AbsentWeight)]


def input_gradients(model, run=None):
    """Return the gradient of the input of all blocks."""
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = x
    for block in model.blocks:
        y = block(y) if run is None else run(block, y)
    y.square().mean().backward()
    return x.grad


PLACES = ("resident", "held", "disk")


@pytest.mark.parametrize(
    ("start", "blocks", "parts", "direct"), pairwise(PLACES, PLACES, PLACES, [False, True])
)
def test_every_placement_gives_the_same_bits(plain, folder, start, blocks, parts, direct):
    names = {place: [] for place in PLACES}
    names[start] += ("start", "embedding")
    names[blocks] += ("blocks.0", "blocks.2")
    names[parts] += ("blocks.1.up", "blocks.3")
    offloaded = (*names["held"], *names["disk"], "nothing")
    model, offload = attached(
        plain, folder, offloaded=offloaded, held=(*names["held"], "nothing"), direct=direct
    )
    assert same(model, plain)
    assert torch.equal(input_gradients(model), input_gradients(plain))
    assert same(model, plain)
    assert all(one.startswith(offloaded) or one == "head.weight" for one in absent(model))
    assert offload.traffic.peak <= offload.window_limit
    offload.window.close()


@pytest.mark.parametrize("stored_as", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("used_as", [torch.float32, torch.bfloat16])
def test_weights_of_another_dtype_are_converted_as_a_load_does(tmp_path, stored_as, used_as):
    save_model(pretrained().to(stored_as).state_dict(), str(tmp_path))
    plain = pretrained().to(used_as).requires_grad_(False)
    load_model(plain, str(tmp_path))
    model, offload = attached(plain, tmp_path)
    assert same(model, plain)
    state = model.state_dict()
    assert all(torch.equal(state[name], one) for name, one in plain.state_dict().items())
    assert (offload.staging_bytes > 0) == (stored_as != used_as)


def test_buffers_empty_and_0_d_and_complex_tensors(tmp_path):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = torch.nn.Parameter(torch.empty(0, 3))
            self.scale = torch.nn.Parameter(torch.tensor(3.0))
            self.phase = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.register_buffer("mask", torch.tensor([True, False, True]))
            self.register_buffer("count", torch.tensor(5))

        def forward(self, x):
            return (x * self.scale + self.count) * self.phase * self.mask, self.empty.sum()

    plain = Odd().requires_grad_(False)
    save_model(plain.state_dict(), str(tmp_path))
    for direct in (False, True):
        model, _ = attached(plain, tmp_path, direct=direct)
        x = torch.ones(3)
        assert torch.equal(model(x)[0], plain(x)[0])
        assert torch.equal(model(x)[1], plain(x)[1])
        state = model.state_dict()
        assert all(torch.equal(state[name], one) for name, one in plain.state_dict().items())


def test_the_checkpoint_has_every_weight_in_the_model_s_shape(plain, tmp_path):
    state = plain.state_dict()
    state["blocks.0.up.bias"] = torch.zeros(3)
    save_model(state, str(tmp_path / "a"))
    with pytest.raises(ValueError, match=r"blocks.0.up.bias has shape \(65,\) in the model and"):
        attached(plain, tmp_path / "a")
    del state["blocks.0.up.bias"]
    save_model(state, str(tmp_path / "b"))
    with pytest.raises(ValueError, match=r"blocks.0.up.bias is to be offloaded .* not in"):
        attached(plain, tmp_path / "b")


# --- calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes(plain, folder, mode):
    model, _ = attached(plain, folder)
    for first in (mode, torch.enable_grad, mode):
        with first():
            assert torch.equal(model(BATCH), plain(BATCH))


def test_weights_are_frozen_after_the_dispatch_too(plain, folder):
    model, _ = attached(plain, folder)
    for hook in offload_hooks(model):
        for _, unit in hook.units:
            for one in unit.placeholders.values():
                one.is_trained = True  # as of a model that was not frozen before
    with pytest.raises(AbsentWeightError, match="requires a gradient, which would be lost"):
        input_gradients(model)
    model.requires_grad_(False)
    for hook in offload_hooks(model):
        for _, unit in hook.units:
            for one in unit.placeholders.values():
                one.requires_grad_(False)
    assert torch.equal(input_gradients(model), input_gradients(plain))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("held", [(), ("blocks.1",)], ids=["disk", "held"])
def test_a_weight_that_is_changed_in_place_is_an_error(plain, folder, mode, held):
    model, _ = attached(plain, folder, held=(*held, "nothing"))
    with pytest.raises(AbsentWeightError, match=r"weight of blocks.1 was changed in place"):
        with onloaded(model.blocks[1]), mode():
            model.blocks[1].up.weight.mul_(2)
    if not held:
        assert same(model, plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_that_changes_its_weight_is_an_error(plain, folder, mode):
    class Counting(Block):
        def forward(self, x):
            self.norm.bias.add_(1)
            return super().forward(x)

    model, _ = attached(plain, folder)
    model.blocks[2].__class__ = Counting
    for _ in range(2):
        with pytest.raises(AbsentWeightError, match=r"weight of blocks.2 was changed"), mode():
            model(BATCH)
    model.blocks[2].__class__ = Block
    assert same(model, plain)


def test_an_error_while_weights_are_put_leaves_the_model_as_it_was(plain, folder, monkeypatch):
    model, offload = attached(plain, folder)
    really, count = AbsentWeight.filled, itertools.count()

    def fails(*args):
        if next(count) == 4:
            raise MemoryError
        return really(*args)

    monkeypatch.setattr(AbsentWeight, "filled", fails)
    with pytest.raises(MemoryError):
        model(BATCH)
    assert len(absent(model)) == len(list(plain.parameters()))
    assert not any(entry.pins for entry in offload.window._entries.values())
    assert same(model, plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda weight: weight.data.mul_(2), id="of its data"),
        pytest.param(lambda weight: setattr(weight, "data", weight.data * 2), id="new data"),
    ],
)
def test_a_weight_whose_data_is_changed_is_an_error(plain, folder, change, mode):
    model, _ = attached(plain, folder)
    with pytest.raises(AbsentWeightError, match=r"weight of blocks.1 was changed in place"):
        with onloaded(model), mode():
            change(model.blocks[1].up.weight)
    assert same(model, plain)


@pytest.mark.parametrize("where", ["forward", "hook before", "hook after"])
def test_an_exception_leaves_the_model_as_it_was(plain, folder, where):
    model, offload = attached(plain, folder)

    def fail(*args):
        raise ValueError("mine")

    block = model.blocks[1]
    if where == "forward":
        block.forward = fail
    elif where == "hook before":
        handle = block.register_forward_pre_hook(fail, prepend=True)
    else:
        handle = block.register_forward_hook(fail)
    with pytest.raises(ValueError, match="mine"):
        model(BATCH)
    assert len(absent(model)) == len(list(plain.parameters()))
    assert not any(entry.pins for entry in offload.window._entries.values())
    if where == "forward":
        del block.forward
    else:
        handle.remove()
    assert same(model, plain)
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


def test_a_block_that_calls_itself(plain, folder):
    class Again(Block):
        def forward(self, x, depth=2):
            if depth == 1:
                raise ValueError("mine")
            if depth:
                with pytest.raises(ValueError, match="mine"):
                    self(x, depth - 1)
                x = self(x, 0)
            return super().forward(x)

    model, _ = attached(plain, folder)
    for one in (model, plain):
        one.blocks[1].__class__ = Again
    assert same(model, plain)
    assert len(absent(model)) == len(list(plain.parameters()))


def test_threads_that_run_forward_at_once(plain, folder):
    model, offload = attached(plain, folder)
    expected, failures = plain(BATCH), []

    def run():
        try:
            with torch.no_grad():
                for _ in range(10):
                    assert torch.equal(model(BATCH), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(absent(model)) == len(list(plain.parameters()))
    assert not any(entry.pins for entry in offload.window._entries.values())


def test_an_output_that_is_a_view_of_a_weight_stays_right(plain, folder):
    class View(Block):
        def forward(self, x):
            return self.up.weight[:2]

    model, offload = attached(plain, folder)
    for block in model.blocks:
        block.__class__ = View
    views = [block(None) for block in model.blocks]
    for _ in range(2):
        for block in model.blocks:
            block(None)
    for view, block in zip(views, plain.blocks, strict=True):
        assert torch.equal(view, block.up.weight[:2])
    assert offload.escaped_bytes > 0
    del views, view
    assert offload.escaped_bytes == 0


# --- backward passes


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["around the block", "inside of the block"])
def test_activation_checkpointing(plain, folder, reentrant, inside):
    class Inside(Block):
        def forward(self, x):
            return x + checkpoint(self._inner, x, use_reentrant=reentrant)

        def _inner(self, x):
            return self.down(torch.relu(self.up(self.norm(x))))

    def around(block, x):
        return checkpoint(block, x, use_reentrant=reentrant)

    model, offload = attached(plain, folder)
    if inside:
        for block in model.blocks:
            block.__class__ = Inside
    run = None if inside else around
    assert torch.equal(input_gradients(model, run), input_gradients(plain))
    gc.collect()
    assert offload.escaped_bytes == 0


@pytest.mark.filterwarnings("ignore:.*autocast makes a copy:UserWarning")
def test_autocast(plain, folder):
    model, _ = attached(plain, folder)
    gradients = []
    for one in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            gradients.append(input_gradients(one))
    assert torch.equal(*gradients)


def test_second_derivatives_and_a_second_backward_pass(plain, folder):
    model, _ = attached(plain, folder)
    found = []
    for one in (model, plain):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = x
        for block in one.blocks:
            y = block(y).tanh()
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.square().sum().backward()
        loss = one.blocks[0](x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_hooks_of_saved_tensors_outside_of_the_model_see_activations_only(plain, folder):
    model, _ = attached(plain, folder)
    packed = []
    sizes = {tuple(one.shape) for one in plain.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: (packed.append(tuple(one.shape)), one)[1], lambda one: one
    ):
        gradient = input_gradients(model)
    assert torch.equal(gradient, input_gradients(plain))
    assert (5, 65) in packed  # the input of a block's second layer
    assert not {(65, 16), (16, 65)} & sizes & set(packed)


def test_transforms_of_functions(plain, folder):
    model, _ = attached(plain, folder)
    x = torch.randn(3, 16)

    def loss(block):
        return lambda x: block(x).square().sum()

    for transform in (torch.func.grad, torch.func.hessian):
        found, expected = (transform(loss(one.blocks[0]))(x[0]) for one in (model, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found, expected = (torch.func.vmap(one.blocks[1])(x) for one in (model, plain))
    assert torch.equal(found, expected)
    assert same(model, plain)


def test_functional_call_takes_the_given_weights(plain, folder):
    model, _ = attached(plain, folder)
    given = {"blocks.0.up.weight": torch.ones(65, 16), "start": torch.zeros(16)}
    found, expected = (torch.func.functional_call(one, given, (BATCH,)) for one in (model, plain))
    assert torch.equal(found, expected)
    own = dict(model.named_parameters())
    assert torch.equal(torch.func.functional_call(model, own, (BATCH,)), plain(BATCH))
    assert same(model, plain)


# --- states


def test_the_state_dict_is_that_of_the_resident_model(plain, folder, tmp_path):
    model, _ = attached(plain, folder, held=["blocks.1"])
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], one) for name, one in expected.items())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    part = model.blocks[2].up.state_dict(prefix="x.")
    assert torch.equal(part["x.bias"], plain.blocks[2].up.bias)
    kept = model.state_dict(keep_vars=True)
    assert all(isinstance(one, torch.nn.Parameter) for one in kept.values())
    copied = copy.deepcopy(state)
    copied["start"].zero_()
    file = io.BytesIO()
    torch.save(state, file)
    assert file.tell() < 1.5 * sum(one.nbytes for one in plain.parameters()) + 10_000
    file.seek(0)
    loaded = torch.load(file)
    assert all(torch.equal(loaded[name], one) for name, one in expected.items())
    save_model(state, str(tmp_path))
    again = load_model(pretrained(5), str(tmp_path)) or StoredWeights.of_checkpoint(str(tmp_path))
    assert again is not None
    assert same(model, plain)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_on_disk_are_not_loaded_into_and_nothing_is_changed(plain, folder, assign):
    model, _ = attached(plain, folder, offloaded=["blocks"], held=["blocks.1"])
    new = {name: one * 2 for name, one in plain.state_dict().items()}
    wrapped = torch.nn.ModuleDict({"inner": model})
    for one, state in (
        (model, new),
        (model.blocks, {name[7:]: value for name, value in new.items() if name[:6] == "blocks"}),
        (wrapped, {f"inner.{name}": value for name, value in new.items()}),
    ):
        with pytest.raises(AbsentWeightError, match=r"blocks.0.up.weight is on disk and cannot be"):
            one.load_state_dict(state, assign=assign)
        assert same(model, plain)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_in_host_memory_are_loaded_into(plain, folder, assign):
    model, _ = attached(plain, folder, held=["blocks.1"])
    assert same(model, plain)
    copied = copy.deepcopy(model)
    new = {n: one * 2 for n, one in plain.state_dict().items() if n.startswith("blocks.1.")}
    model.load_state_dict(copy.deepcopy(new), strict=False, assign=assign)
    assert same(copied, plain)  # the copy has its own
    plain.load_state_dict(new, strict=False)
    assert same(model, plain)
    assert torch.equal(model.state_dict()["blocks.1.up.bias"], new["blocks.1.up.bias"])
    assert len(absent(model)) == len(list(plain.parameters()))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.blocks[1].up.load_state_dict({"bias": torch.ones(1)}, strict=False)
    assert same(model, plain)
    with pytest.raises(AbsentWeightError, match="changed in place"), onloaded(model):
        model.load_state_dict(new, strict=False)


def test_it_is_neither_moved_nor_converted_and_nothing_is_changed(plain, folder):
    model, _ = attached(plain, folder, offloaded=["blocks.2"])
    for move in (
        lambda: model.to(torch.float64),
        model.half,
        model.double,
        lambda: model.to_empty(device="meta"),
        model.share_memory,
        model.blocks[2].up.bfloat16,
    ):
        with pytest.raises(AbsentWeightError, match=r"blocks.2.up.weight is on disk, so the model"):
            move()
    assert same(model, plain)
    model.blocks[1].double()  # a part without offloaded weights


# --- copies


def duplicates():
    return pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
        ids=["deepcopy", "pickle"],
    )


@duplicates()
def test_a_copy_has_its_own_window_on_the_same_files(plain, folder, duplicate):
    model, offload = attached(plain, folder, held=["blocks.1"])
    assert same(model, plain)
    copied = duplicate(model)
    (other,) = {hook.offload for hook in offload_hooks(copied)}
    assert other is not offload
    assert other.window is not offload.window
    assert copied.head.weight is copied.embedding.weight
    assert same(copied, plain)
    assert torch.equal(input_gradients(copied), input_gradients(plain))
    with pytest.raises(AbsentWeightError):
        copied.to(torch.float64)
    gone = weakref.ref(offload)
    del model, offload
    gc.collect()
    assert gone() is None
    assert same(copied, plain)
    block = duplicate(copied.blocks[2])
    x = torch.randn(2, 16)
    assert torch.equal(block(x), plain.blocks[2](x))
    assert block is not copied.blocks[2]


def test_a_pickled_model_finds_that_its_file_has_changed(plain, tmp_path):
    model, _ = attached(plain, saved(tmp_path))
    data = pickle.dumps(model)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(RuntimeError, match="has changed since the model was dispatched"):
        pickle.loads(data)(BATCH)


def test_two_models_on_the_same_files(plain, folder):
    first, second = attached(plain, folder)[0], attached(plain, folder)[0]
    assert same(first, plain)
    assert same(second, plain)
    assert same(torch.nn.Sequential(first), torch.nn.Sequential(second))


def test_the_window_ends_with_the_model(plain, folder):
    model, offload = attached(plain, folder)
    assert same(model, plain)
    thread = offload.window._thread
    assert thread.is_alive()
    del model, offload
    gc.collect()
    thread.join()
    assert not thread.is_alive()


def test_a_model_gets_its_weights_back(plain, folder):
    model, _ = attached(plain, folder, held=["blocks.1"])
    put_views(model, torch.device("cpu"))
    before = {id(one): set(vars(one)) for one in plain.modules()}
    assert same(model, plain)
    remove_hook_from_submodules(model.blocks[0])
    assert same(model, plain)
    remove_hook_from_submodules(model)
    assert not absent(model)
    assert not list(offload_hooks(model))
    assert not kept_elsewhere(model)
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert set(vars(one)) == before[id(other)]
        assert not one._state_dict_hooks
        assert not one._load_state_dict_pre_hooks
        assert not one._load_state_dict_post_hooks
    assert model.head.weight is model.embedding.weight
    assert same(model, plain)
    with torch.no_grad():
        model.blocks[0].up.weight.zero_()  # its own memory
    assert same(attached(plain, folder)[0], plain)
    model.double()


# --- torch.compile


@pytest.fixture
def graphs():
    """A backend that counts the graphs."""
    torch._dynamo.reset()
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph.forward

    backend.graphs = found
    yield backend
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["Module.compile", "plugin", "before the dispatch"])
def test_compiled_blocks_have_no_breaks_and_compile_once(plain, folder, graphs, how):
    if how == "before the dispatch":
        plain = copy.deepcopy(plain)
        model, offload = attached(plain, folder)
        for block in model.blocks:
            block.compile(backend=graphs, fullgraph=True)
    model, offload = attached(plain, folder)
    if how == "Module.compile":
        for block in model.blocks:
            block.compile(backend=graphs, fullgraph=True)
    elif how == "plugin":
        compile_model(model, TorchDynamoPlugin(backend=graphs, use_regional_compilation=True))
        assert is_compiled(model)
    else:
        for block in model.blocks:
            block.compile(backend=graphs, fullgraph=True)
    for _ in range(3):
        assert same(model, plain)
    assert len(graphs.graphs) == 1
    copied = copy.deepcopy(model)
    assert not is_compiled(copied)
    assert same(copied, plain)
    assert torch.equal(input_gradients(model), input_gradients(plain))
    (release if how == "plugin" else uncompile)(model)
    assert not is_compiled(model)
    assert same(model, plain)
    assert offload.traffic.escapes == 0


def test_a_compiled_model_breaks_between_units_only(plain, folder, graphs, recwarn):
    model, _ = attached(plain, folder)
    compiled = torch.compile(model, backend=graphs)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(BATCH), plain(BATCH))
    blocks = [graph for graph in graphs.graphs if "layer_norm" in graph.code]
    assert len(blocks) == 1
    assert not [one for one in recwarn if "set_eval_frame" in str(one.message)]


def test_a_model_that_is_taken_back_stays_compiled(plain, folder, graphs):
    model, _ = attached(plain, folder)
    for block in model.blocks:
        block.compile(backend=graphs)
    assert same(model, plain)
    put_views(model, torch.device("cpu"))
    remove_hook_from_submodules(model)
    count = len(graphs.graphs)
    assert is_compiled(model)
    assert same(model, plain)
    assert len(graphs.graphs) == count


@pytest.mark.parametrize("free", [0.5, 2.0, None])
def test_files_are_read_past_the_page_cache_without_room_for_activations(
    plain, tmp_path, monkeypatch, free
):
    save_model(plain.state_dict(), str(tmp_path))
    size = sum(one.nbytes for one in plain.state_dict().values())
    known = None if free is None else int(free * size)
    monkeypatch.setattr("checkpoint_io.memory.free_memory", lambda: known)
    _, offload = attached(plain, tmp_path, direct=None)
    assert offload.direct == (free == 0.5)


def window_bytes(*units: tuple[str, bool], sizes: list[int]) -> int:
    """Return the bytes of units, each with the letters of the modules that need it."""
    modules = {letter: object() for letters, _ in units for letter in letters}
    made = [
        SimpleNamespace(scoped=scoped, triggers=[modules[letter] for letter in letters])
        for letters, scoped in units
    ]
    return _window_bytes(made, sizes)


def test_a_window_holds_two_consecutive_modules_and_what_is_around_them():
    assert _window_bytes([], []) == 0
    assert window_bytes(("a", False), sizes=[5]) == 5
    assert window_bytes(("a", False), ("b", False), ("c", False), sizes=[5, 7, 2]) == 12
    # From the last module to the first of the next pass.
    assert window_bytes(("a", False), ("b", False), ("c", False), sizes=[6, 1, 6]) == 12
    # A unit that both need is there once, and one around all of them beside each pair.
    assert window_bytes(("ab", False), ("a", False), ("b", False), sizes=[4, 1, 2]) == 7
    assert window_bytes(("abc", True), ("a", False), ("b", False), sizes=[10, 1, 2]) == 13
