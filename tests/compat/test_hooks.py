"""Hooks around a forward: attached, copied, compiled, and weights that come and go."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

from accel_callbacks import init_empty_weights
from accel_callbacks.compat.folder import OffloadedWeightsLoader, offload_state_dict
from accel_callbacks.compat.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    outside_graphs,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_callbacks.compat.tensors import (
    align_module_device,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from accel_callbacks.models.offload.placeholder import AbsentWeight, AbsentWeightError, is_absent
from accel_callbacks.models.offload.residence import onloaded

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Net(torch.nn.Module):
    """A tied head, a buffer that the forward writes, and one that no state dict has."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x, *, factor=1.0):
        return self.last(self.norm(self.first(x)) * self.scale) * factor


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


class Recorder(ModelHook):
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def init_hook(self, module):
        self.calls.append(f"{self.name} init")
        return module

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append(f"{self.name} pre")
        return args, {**kwargs, "factor": kwargs.get("factor", 1.0) * 2}

    def post_forward(self, module, output):
        self.calls.append(f"{self.name} post")
        return output + 1

    def forward_failed(self, module):
        self.calls.append(f"{self.name} failed")

    def detach_hook(self, module):
        self.calls.append(f"{self.name} detach")
        return module


def test_a_hook_sees_and_changes_arguments_and_output(net):
    expected, calls = net(X, factor=6.0) + 1, []
    assert add_hook_to_module(net, Recorder("a", calls)) is net
    assert torch.equal(net(X, factor=3.0), expected)
    assert torch.equal(net.forward(X, factor=3.0), expected)
    assert calls == ["a init", *["a pre", "a post"] * 2]
    assert torch.equal(net._old_forward(X, factor=6.0) + 1, expected)


def test_the_signature_the_name_and_the_doc_are_those_of_the_module(net):
    before = inspect.signature(net.forward)
    add_hook_to_module(net, ModelHook())
    assert inspect.signature(net.forward) == before
    assert net.forward.__name__ == "forward"


def test_a_keyword_named_module_reaches_the_forward():
    class Named(torch.nn.Module):
        def forward(self, x, module):
            return x + module

    assert add_hook_to_module(Named(), ModelHook())(1, module=2) == 3


def test_a_second_hook_replaces_the_first_or_joins_it(net):
    calls = []
    add_hook_to_module(net, Recorder("a", calls))
    add_hook_to_module(net, Recorder("b", calls))
    assert calls == ["a init", "a detach", "b init"]
    add_hook_to_module(net, Recorder("c", calls), append=True)
    assert [hook.name for hook in net._hf_hook.hooks] == ["b", "c"]
    calls.clear()
    assert torch.equal(net(X), net._old_forward(X, factor=4.0) + 2)
    assert calls == ["b pre", "c pre", "b post", "c post"]


def test_a_replaced_hook_brings_its_weights_back_first(net):
    expected = net(X)
    add_hook_to_module(net, AlignDevicesHook("cpu", offload=True, place_submodules=True))
    add_hook_to_module(net, ModelHook())
    assert not is_absent(net.first.weight)
    assert torch.equal(net(X), expected)


def test_removed_hooks_leave_nothing(net):
    own, parameters = set(vars(net)), list(net.parameters())
    expected = net(X)
    add_hook_to_module(net, ModelHook())
    attach_align_device_hook(net.first, "cpu", offload=True)
    vars(net)["to"] = lambda *a: 1 / 0  # as `dispatch_model` does
    remove_hook_from_module(net, recurse=True)
    assert set(vars(net)) == own
    assert set(vars(net.first)) == set(vars(torch.nn.Linear(1, 1)))
    assert [a is b for a, b in zip(net.parameters(), parameters, strict=True)] == [True] * 5
    assert torch.equal(net(X), expected)
    remove_hook_from_submodules(net)  # nothing to do


def test_a_forward_that_others_have_set_comes_back(net):
    theirs = lambda x: x + 5  # noqa: E731
    net.forward = theirs
    add_hook_to_module(net, ModelHook())
    assert torch.equal(net(X), X + 5)
    assert remove_hook_from_module(net).forward is theirs


def test_a_forward_that_raises_tells_its_hooks(net):
    calls = []
    for name in "ab":
        add_hook_to_module(net, Recorder(name, calls), append=True)
    calls.clear()
    with pytest.raises(RuntimeError, match="shapes"):
        net(torch.ones(3, 5))
    assert calls == ["a pre", "b pre", "a failed", "b failed"]


def test_the_first_hook_cleans_up_if_the_second_one_raises(net):
    class Bad(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            raise OSError("gone")

    calls = []
    add_hook_to_module(net, SequentialHook(Recorder("a", calls), Bad()))
    with pytest.raises(OSError, match="gone"):
        net(X)
    assert calls == ["a init", "a pre", "a failed"]


def test_no_grad_of_a_hook_in_a_chain_counts(net):
    class Frozen(ModelHook):
        no_grad = True

    add_hook_to_module(net, SequentialHook(ModelHook(), Frozen()))
    assert not net(X).requires_grad


def test_a_graph_module_can_be_compiled_again_while_it_has_a_hook():
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    expected = traced(X)
    add_hook_to_module(traced, Recorder("a", calls := []))
    traced._hf_hook.pre_forward = lambda module, *a, **k: (a, k)
    assert torch.equal(traced(X), expected + 1)
    assert calls == ["a init", "a post"]
    remove_hook_from_module(traced)
    traced.graph.output_node().args = (next(iter(traced.graph.nodes)),)
    traced.recompile()
    assert torch.equal(traced(X), X)


# --- offloaded weights ------------------------------------------------------------------------


@pytest.fixture(params=["memory", "dict", "folder", "safetensors"])
def weights(request, net, tmp_path):
    """What `weights_map` may be; "memory" leaves it to the hook."""
    state = net.state_dict()
    if request.param == "memory":
        return None
    if request.param == "dict":
        return {name: tensor.clone() for name, tensor in state.items()}
    if request.param == "folder":
        offload_state_dict(tmp_path, state)
        return OffloadedWeightsLoader(save_folder=tmp_path)
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in state.items()}, file)
    return OffloadedWeightsLoader(index={name: {"safetensors_file": str(file)} for name in state})


@pytest.mark.parametrize("buffers", [False, True], ids=["keep_buffers", "offload_buffers"])
def test_an_offloaded_model_is_the_resident_one(net, weights, buffers):
    expected, state = net(X), {name: one.clone() for name, one in net.state_dict().items()}
    attach_align_device_hook(net, "cpu", offload=True, weights_map=weights, offload_buffers=buffers)
    assert all(isinstance(one, AbsentWeight) for one in net.parameters())
    assert isinstance(net.norm.running_mean, AbsentWeight) is buffers
    assert not net.scale.is_meta
    assert net.last.weight is net.first.weight
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(net(X), expected)
    assert all(isinstance(one, AbsentWeight) for one in net.parameters())
    for found in (net.state_dict(), get_state_dict_offloaded_model(net)):
        assert list(found) == list(state)
        assert all(torch.equal(found[name], one) for name, one in state.items())
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(X).detach(), expected)
        assert other.last.weight is other.first.weight
        assert other.forward is not net.forward
        assert all(isinstance(one, AbsentWeight) for one in other.parameters())
    remove_hook_from_submodules(net)
    assert torch.equal(net(X), expected)
    assert net.last.weight is net.first.weight
    assert [type(one) for one in net.parameters()] == [torch.nn.Parameter] * 5


def test_a_tied_weight_is_one_tensor_in_the_state_dict_of_all(net, weights):
    attach_align_device_hook(net, "cpu", offload=True, weights_map=weights)
    found = get_state_dict_offloaded_model(net)
    assert found["first.weight"].data_ptr() == found["last.weight"].data_ptr()


def test_a_copy_has_weights_of_its_own(net):
    attach_align_device_hook(net, "cpu", offload=True)
    other = copy.deepcopy(net)
    remove_hook_from_submodules(other)
    with torch.no_grad():
        other.first.weight.zero_()
    remove_hook_from_submodules(net)
    assert net.first.weight.abs().sum() > 0


def test_a_child_weight_that_a_parent_uses_raises_with_its_name(net, weights):
    class Parent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.child = net.first

        def forward(self, x):
            return x @ self.child.weight

    attach_align_device_hook(net, "cpu", offload=True, weights_map=weights)
    with pytest.raises(AbsentWeightError, match=r"weight is in the weights_map"):
        Parent()(X)
    with pytest.raises(AbsentWeightError, match=r"weight is in the weights_map"):
        torch.nn.functional.linear(X, net.first.weight)


def test_attention_uses_the_weight_of_a_child_and_works():
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()
    expected = attention(X[None], X[None], X[None])[0]
    attach_align_device_hook(attention, "cpu", offload=True)
    assert isinstance(attention.out_proj.weight, AbsentWeight)
    with torch.no_grad():
        assert torch.allclose(attention(X[None], X[None], X[None])[0], expected)


def test_a_named_class_fetches_what_is_in_it(net):
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.child = torch.nn.Linear(4, 4)

        def forward(self, x):
            return x @ self.child.weight

    block = Sum()
    expected = block(X)
    attach_align_device_hook(block, "cpu", offload=True, preload_module_classes=["Sum"])
    assert torch.equal(block(X), expected)
    assert is_absent(block.child.weight)


def test_weights_go_after_a_forward_that_raises(net, weights):
    attach_align_device_hook(net, "cpu", offload=True, weights_map=weights)
    with pytest.raises(RuntimeError):
        net(torch.ones(3, 5))
    assert all(isinstance(one, AbsentWeight) for one in net.parameters())
    assert torch.isfinite(net(X)).all()


def test_weights_that_cannot_be_fetched_leave_placeholders(net, tmp_path):
    offload_state_dict(tmp_path, net.state_dict())
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    attach_align_device_hook(net, "cpu", offload=True, weights_map=loader)
    (tmp_path / "first.bias.dat").unlink()
    for _ in range(2):
        with pytest.raises(Exception, match=r"first\.bias\.dat is missing"):
            net(X)
    assert isinstance(net.first.weight, AbsentWeight)


def test_loading_a_state_dict_into_offloaded_weights_raises_by_name(net):
    state = {name: one.clone() for name, one in net.state_dict().items()}
    attach_align_device_hook(net, "cpu", offload=True)
    with pytest.raises(RuntimeError, match=r"first\.weight"):
        net.load_state_dict(state)


def test_assigned_weights_are_used_and_stay(net):
    attach_align_device_hook(net, "cpu", offload=True)
    own = torch.nn.Parameter(torch.zeros(4, 4))
    net.last.weight = own
    assert torch.equal(net(X).detach(), net.state_dict()["last.bias"].expand(3, 4))
    assert net.last.weight is own
    assert torch.equal(net.state_dict()["last.weight"], own)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_buffer_that_the_forward_writes_is_kept(net, weights, mode):
    plain = copy.deepcopy(net).train()
    with torch.no_grad():
        plain(X)
    attach_align_device_hook(net, "cpu", offload=True, offload_buffers=True, weights_map=weights)
    with mode():
        net.train()(X)
    for name in ("running_mean", "num_batches_tracked"):
        assert torch.equal(net.state_dict()[f"norm.{name}"], getattr(plain.norm, name))
    with mode():
        net(X)
    assert net.state_dict()["norm.num_batches_tracked"] == 2


def test_a_buffer_that_the_forward_writes_stays_the_same_object(net):
    running_mean = net.norm.running_mean
    attach_align_device_hook(net, "cpu", offload=True, offload_buffers=True)
    net.train()(X)
    remove_hook_from_submodules(net)
    assert net.norm.running_mean is running_mean
    assert running_mean.count_nonzero() == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_buffer_that_the_forward_writes_outside_of_training_is_kept(tmp_path, mode):
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            return x * self.calls.add_(1)

    offload_state_dict(tmp_path, Counter().state_dict())
    counter, loader = Counter().eval(), OffloadedWeightsLoader(save_folder=tmp_path)
    attach_align_device_hook(counter, "cpu", offload=True, offload_buffers=True, weights_map=loader)
    with mode():
        assert torch.equal(counter(X), X)
        assert torch.equal(counter(X), 2 * X)
    assert counter.state_dict()["calls"].item() == 2


def test_a_buffer_that_is_stored_in_another_dtype_is_kept(net):
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state["norm.running_mean"] = state["norm.running_mean"].double()
    attach_align_device_hook(net, "cpu", offload=True, offload_buffers=True, weights_map=state)
    with torch.no_grad():
        net.train()(X)
    assert net.state_dict()["norm.running_mean"].count_nonzero() == 4


def test_a_gradient_that_would_be_lost_raises(net, weights):
    if weights is None:
        pytest.skip("the parameter itself is used, and gets its gradient")
    attach_align_device_hook(net, "cpu", offload=True, weights_map=weights)
    loss = net(X).sum()
    with pytest.raises(RuntimeError, match="requires a gradient, which would be lost"):
        loss.backward()


def test_gradients_reach_what_is_resident_through_frozen_weights(net, weights):
    net.requires_grad_(False)
    plain, other = copy.deepcopy(net), X.clone().requires_grad_()
    attach_align_device_hook(net, "cpu", offload=True, weights_map=weights)
    own = X.clone().requires_grad_()
    net(own).sum().backward()
    plain(other).sum().backward()
    assert torch.equal(own.grad, other.grad)


def test_a_weight_on_the_device_of_the_forward_gets_its_gradient(net):
    parameters = list(net.parameters())
    plain = copy.deepcopy(net)
    attach_align_device_hook(net, "cpu", offload=True)
    net(X).sum().backward()
    plain(X).sum().backward()
    for one, other in zip(parameters, plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_weights_of_another_model_in_the_folder_raise(net, tmp_path):
    other = Net()
    offload_state_dict(tmp_path, other.state_dict())
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ValueError, match=r"first\.weight has other values in .*another model"):
        attach_align_device_hook(net, "cpu", offload=True, weights_map=loader)
    with init_empty_weights():
        empty = Net().eval()
    attach_align_device_hook(empty, "cpu", offload=True, weights_map=loader)
    assert torch.equal(empty(X), other.eval()(X))


def test_a_weight_of_another_shape_raises(net):
    state = {name: torch.zeros(7) for name in net.state_dict()}
    attach_align_device_hook(net, "cpu", offload=True, weights_map=state)
    with pytest.raises(ValueError, match=r"has shape \(4, 4\), .* \(7,\)"):
        net(X)


def test_weights_without_values_and_without_a_map_raise():
    with pytest.raises(ValueError, match="meta device has no values"):
        attach_align_device_hook(torch.nn.Linear(2, 2, device="meta"), "cpu", offload=True)


def test_stored_weights_come_in_the_dtype_of_the_model(net):
    state = {name: one.clone() for name, one in net.state_dict().items()}
    net.bfloat16()
    attach_align_device_hook(net, "cpu", offload=True, weights_map=state)
    assert net(X.bfloat16()).dtype is torch.bfloat16


def test_a_hook_can_be_entered_twice(net):
    attach_align_device_hook(net, "cpu", offload=True)
    with align_module_device(net.first, "cpu"):
        net.first(X)
        assert not is_absent(net.first.weight)
    assert is_absent(net.first.weight)


def test_a_hook_that_is_removed_while_it_is_entered_puts_everything_back(net, weights):
    expected = net(X)
    attach_align_device_hook(net, "cpu", offload=True, weights_map=weights)
    for _ in range(2):
        net.first._hf_hook.pre_forward(net.first)
    remove_hook_from_submodules(net)
    assert not any(is_absent(one) for one in (*net.parameters(), *net.buffers()))
    assert torch.equal(net(X), expected)
    assert net.last.weight is net.first.weight


def test_weights_of_hooks_are_there_for_code_around(net, weights):
    """As the error of a weight that is not says."""
    expected = net.first.weight.sum().item()
    attach_align_device_hook(net, "cpu", offload=True, weights_map=weights)
    with pytest.raises(AbsentWeightError, match=r"accel_callbacks\.offload\.onloaded"):
        net.first.weight.sum()
    with onloaded(net):
        assert net.first.weight.sum().item() == net.last.weight.sum().item() == expected
    assert is_absent(net.first.weight)
    with onloaded(net.last), torch.no_grad():
        net.last.bias.fill_(7)
    assert net.state_dict()["last.bias"].tolist() == [7] * 4


# --- devices -----------------------------------------------------------------------------------


def test_on_meta_only_shapes_are_computed():
    """Here no operation is called, since those of meta import a lot."""
    layer, seen = torch.nn.Linear(4, 4), []
    layer.forward = lambda x: seen.append((x.is_meta, layer.weight.is_meta))
    attach_execution_device_hook(layer, "meta")
    layer(X)
    assert seen == [(True, True)]
    assert not isinstance(layer.weight, AbsentWeight)


def test_inputs_go_to_the_device_and_the_output_comes_back():
    layer = torch.nn.Linear(4, 2)
    add_hook_to_module(layer, AlignDevicesHook("meta", io_same_device=True))
    layer._hf_hook.input_device = None
    seen = []
    layer._old_forward = lambda *args, **kwargs: seen.append((args, kwargs))
    layer(X, {"a": [X], "b": X}, c=X)
    (first, second), kwargs = seen[0]
    assert [one.is_meta for one in (first, second["a"][0], second["b"], kwargs["c"])] == [True] * 4
    assert layer._hf_hook.input_device == torch.device("cpu")


def test_keys_that_are_skipped_stay():
    hook = AlignDevicesHook("meta", skip_keys=["cache"])
    args, kwargs = hook.pre_forward(None, X, cache=X, x=X)
    assert (args[0].is_meta, kwargs["cache"].is_meta, kwargs["x"].is_meta) == (True, False, True)


def test_blocks_have_devices_of_their_own():
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    expected = model[:2](X)
    attach_align_device_hook_on_blocks(
        model, {"0": "cpu", "1": "cpu", "2": "meta"}, {"0": False, "1": True, "2": False}
    )
    assert model._hf_hook.io_same_device
    assert [has_offloaded_params(one) for one in model] == [False, True, False]
    assert [is_absent(one.weight) for one in model] == [False, True, True]
    assert torch.equal(model[1](model[0](X)), expected)


@pytest.mark.parametrize("offload", [False, True])
def test_one_device_for_all_blocks(net, offload):
    expected = net(X)
    attach_align_device_hook_on_blocks(net, "cpu", offload)
    assert has_offloaded_params(net.first) is offload
    assert torch.equal(net(X), expected)


def test_only_the_root_returns_the_output_to_the_device_of_the_input(net):
    attach_align_device_hook_on_blocks(net, {"": "cpu"}, {"": True})
    assert net._hf_hook.offload or net._hf_hook.io_same_device
    assert not net.first._hf_hook.io_same_device


def test_a_hook_can_be_made_again_from_its_attributes():
    """As peft does for a copy of a module."""
    hook = AlignDevicesHook("cpu", offload=True, skip_keys="a", io_same_device=True)
    names = list(inspect.signature(AlignDevicesHook.__init__).parameters)[1:]
    assert repr(type(hook)(**{name: getattr(hook, name) for name in names})) == repr(hook)


# --- compiled ----------------------------------------------------------------------------------


def graphs_and_breaks(model):
    torch._dynamo.reset()
    found = torch._dynamo.explain(model)(X)
    return found.graph_count, found.graph_break_count


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "chain", "align"])
def test_hooks_that_fetch_nothing_break_no_graph(kind):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    if kind == "align":
        attach_execution_device_hook(model, "cpu")
        add_hook_to_module(model, AlignDevicesHook("cpu", io_same_device=True))
    else:
        for layer in (model, *model):
            hook = ModelHook() if kind == "plain" else SequentialHook(ModelHook(), ModelHook())
            add_hook_to_module(layer, hook)
    assert graphs_and_breaks(model) == (1, 0)


@pytest.mark.slow
def test_a_compiled_model_fetches_its_weights(net):
    expected = net(X)
    attach_align_device_hook(net, "cpu", offload=True)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(compiled(X), expected)
    assert is_absent(net.first.weight)


def test_what_is_kept_out_of_graphs_is_called_as_it_is():
    assert outside_graphs(divmod)(7, 2) == (3, 1)
