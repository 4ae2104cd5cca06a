"""What DistributedDataParallelKwargs changes on two processes, and what DDP is not given."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from accel_callbacks import (
    Accelerator,
    AORecipeKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from tests.support.bound import BOUND

pytestmark = pytest.mark.distributed


def accelerator(options: dict | None = None, **others) -> Accelerator:
    handlers = [] if options is None else [DistributedDataParallelKwargs(**options)]
    return Accelerator(cpu=True, timeout=BOUND, kwargs_handlers=handlers, **others)


class Two(torch.nn.Module):
    """Two layers, of which each forward may use one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(8, 8)
        self.b = torch.nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
        for name in use:
            x = getattr(self, name)(x)
        return x


def value_of(accel: Accelerator) -> torch.Tensor:
    return torch.full((4, 8), accel.process_index + 1.0)


# --- options of DDP itself -----------------------------------------------------------------

READERS = {
    "dim": lambda ddp: ddp.dim,
    "broadcast_buffers": lambda ddp: ddp.broadcast_buffers,
    "bucket_cap_mb": lambda ddp: ddp.bucket_bytes_cap,
    "find_unused_parameters": lambda ddp: ddp.find_unused_parameters,
    "gradient_as_bucket_view": lambda ddp: ddp.gradient_as_bucket_view,
    "static_graph": lambda ddp: ddp.static_graph,
}


def attribute_of(name: str, value: object) -> object:
    return READERS[name](accelerator({name: value}).prepare(Two()))


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("dim", 1, 1),
        ("broadcast_buffers", False, False),
        ("bucket_cap_mb", 3, 3 * 2**20),
        ("find_unused_parameters", True, True),
        ("gradient_as_bucket_view", True, True),
        ("static_graph", True, True),
    ],
)
def test_each_option_reaches_ddp(pool, name, value, seen):
    default = DistributedDataParallelKwargs()
    assert pool.run(attribute_of, name, value) == [seen] * 2
    assert pool.run(attribute_of, name, getattr(default, name))[0] != seen


def warned_of_check_reduction(value: bool) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator({"check_reduction": value}).prepare(Two())
    return any("check_reduction" in str(one.message) for one in caught)


def test_check_reduction_is_passed_on_and_torch_warns(pool):
    assert pool.run(warned_of_check_reduction, True) == [True] * 2
    assert pool.run(warned_of_check_reduction, False) == [False] * 2


def buffers_after_a_forward(broadcast: bool) -> float:
    accel = accelerator({"broadcast_buffers": broadcast})
    model = accel.prepare(Two())
    model.module.count.fill_(accel.process_index)
    accel.backward(model(value_of(accel)).sum())
    return model.module.count.item()


def test_buffers_follow_the_first_process_unless_told_otherwise(pool):
    assert pool.run(buffers_after_a_forward, True) == [0.0, 0.0]
    assert pool.run(buffers_after_a_forward, False) == [0.0, 1.0]


def future_warnings_of(broadcast: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator({"broadcast_buffers": broadcast}).prepare(Two())
    return [str(one.message) for one in caught if one.category is FutureWarning]


def test_buffers_that_are_left_alone_are_no_call_that_torch_warns_of(pool):
    assert pool.run(future_warnings_of, False) == [[], []]


# --- parameters that come and go -----------------------------------------------------------


def trained_in_turns(options: dict) -> list[list[float]]:
    """Gradients with `b` unused, then with `a` frozen, then with all."""
    accel = accelerator(options)
    model = accel.prepare(Two())
    inner, seen = accel.unwrap_model(model), []
    for use, frozen in (("a", ""), ("ab", "a"), ("ab", "")):
        inner.a.requires_grad_(frozen != "a")
        accel.backward(model(value_of(accel), use).sum())
        grads = (inner.a.weight.grad, inner.b.weight.grad)
        seen.append([0.0 if g is None else g.abs().sum().item() for g in grads])
        model.zero_grad()
    return seen


def test_parameters_may_be_unused_and_frozen_between_steps(pool):
    first, second = pool.run(trained_in_turns, {"find_unused_parameters": True})
    assert first == second  # averaged, although each process had other inputs
    assert [[value > 0 for value in step] for step in first] == [
        [True, False],
        [False, True],
        [True, True],
    ]


def test_without_find_unused_parameters_torch_says_what_is_wrong(pool):
    for kind, text in pool.outcomes(trained_in_turns, {}):
        assert kind == "RuntimeError"
        assert "find_unused_parameters" in text


def trained_after_thawing(names: str) -> None:
    accel = accelerator({"find_unused_parameters": True})
    model = Two()
    model.a.requires_grad_(False)
    model = accel.prepare(model)
    accel.backward(model(value_of(accel)).sum())
    accel.unwrap_model(model).get_submodule(names).requires_grad_(True)
    accel.backward(model(value_of(accel)).sum())


def test_training_what_was_frozen_when_it_was_prepared_is_an_error_and_not_a_drift(pool):
    for kind, text in pool.outcomes(trained_after_thawing, "a"):
        assert kind == "RuntimeError"
        assert "'a.weight' was frozen when the model was prepared" in text
    assert pool.run(trained_after_thawing, "b") == [None, None]


# --- how gradients are sent ----------------------------------------------------------------


def types_sent(options: dict, steps: int = 1) -> list[list]:
    """For each step the types (and sizes) of what is reduced, and the weight's gradient."""
    accel = accelerator(options)
    model = accel.prepare(Two())
    sent: list = []
    real = dist.all_reduce

    def spy(tensor: torch.Tensor, *args, **kwargs):
        sent.append((str(tensor.dtype), tensor.numel()))
        return real(tensor, *args, **kwargs)

    seen = []
    dist.all_reduce = spy
    try:
        for _ in range(steps):
            model.zero_grad()
            sent.clear()
            accel.backward(model(value_of(accel)).sum())
            seen.append([list(sent), model.module.b.bias.grad[0].item()])
    finally:
        dist.all_reduce = real
    return seen


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_gradients_travel_in_half_precision(pool, half):
    dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[half]
    first, second = pool.run(types_sent, {"comm_hook": half})
    assert first == second == [[[(dtype, 144)], 4.0]]
    assert pool.run(types_sent, {})[0] == [[[], 4.0]]  # DDP's own reduction is not in Python


@pytest.mark.parametrize("hook", ["power_sgd", "batched_power_sgd"])
def test_power_sgd_sends_everything_first_and_then_little(pool, hook):
    options = {"comm_hook": hook, "comm_state_option": {"start_powerSGD_iter": 2}}
    steps = pool.run(types_sent, options, 4)[0]
    counts = [sum(count for _, count in sent) for sent, _ in steps]
    assert counts[0] == counts[1] == 144
    assert counts[3] < 100


@pytest.mark.parametrize("hook", ["power_sgd", "batched_power_sgd"])
def test_power_sgd_of_full_rank_changes_nothing(pool, hook):
    state = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 12}
    options = {"comm_hook": hook, "comm_state_option": {**state, "min_compression_rate": 0.01}}
    first, second = pool.run(types_sent, options, 4)
    assert first == second
    assert [value for _, value in first] == pytest.approx([4.0] * 4, rel=1e-3)
    assert len(first[3][0]) > 1  # it did compress


def test_the_rank_of_power_sgd_is_an_option(pool):
    def count(rank: int) -> int:
        state = {"start_powerSGD_iter": 2, "matrix_approximation_rank": rank}
        options = {"comm_hook": "power_sgd", "comm_state_option": state}
        state["min_compression_rate"] = 1
        return sum(n for _, n in pool.run(types_sent, options, 4)[0][3][0])

    assert count(1) < count(2)


@pytest.mark.parametrize("wrapper", ["fp16", "bf16"])
def test_a_wrapper_compresses_what_power_sgd_sends(pool, wrapper):
    options = {
        "comm_hook": "power_sgd",
        "comm_wrapper": wrapper,
        "comm_state_option": {"start_powerSGD_iter": 2},
    }
    sent = pool.run(types_sent, options)[0][0][0]
    assert sent == [({"fp16": "torch.float16", "bf16": "torch.bfloat16"}[wrapper], 144)]


STATE = {
    "matrix_approximation_rank": 3,
    "start_powerSGD_iter": 5,
    "min_compression_rate": 4,
    "use_error_feedback": False,
    "warm_start": False,
    "orthogonalization_epsilon": 0.5,
    "random_seed": 7,
    "compression_stats_logging_frequency": 11,
    "batch_tensors_with_same_shape": True,
}


def power_sgd_state(options: dict) -> dict:
    found = []
    real = DistributedDataParallel.register_comm_hook

    def spy(self, state, hook):
        found.append(state)
        real(self, state, hook)

    DistributedDataParallel.register_comm_hook = spy
    try:
        accelerator({"comm_hook": "power_sgd", "comm_state_option": options}).prepare(Two())
    finally:
        DistributedDataParallel.register_comm_hook = real
    (state,) = found
    assert isinstance(state, PowerSGDState)
    return {name: getattr(state, name) for name in STATE if name != "random_seed"}


def test_each_option_of_power_sgd_reaches_its_state(pool):
    given, default = pool.run(power_sgd_state, STATE)[0], pool.run(power_sgd_state, {})[0]
    for name, value in given.items():
        assert value == STATE[name] != default[name]


def trained(options: dict, precision: str) -> list[float]:
    accel = accelerator(options, mixed_precision=precision)
    model = Two()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(6):
        accel.backward(model(value_of(accel)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return accel.unwrap_model(model).b.bias.tolist()


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("hook", ["fp16", "bf16", "power_sgd", "batched_power_sgd"])
def test_training_with_a_hook_keeps_the_replicas_alike(pool, hook, precision):
    options = {"comm_hook": hook}
    if "power_sgd" in hook:
        options["comm_state_option"] = {"start_powerSGD_iter": 2, "min_compression_rate": 1}
    first, second = pool.run(trained, options, precision)
    assert first == second
    assert first == pytest.approx(pool.run(trained, {}, precision)[0], abs=1e-2)


# --- what DDP is not given -----------------------------------------------------------------


def prepared_for_evaluation() -> list[str]:
    accel = accelerator()
    frozen = Two().requires_grad_(False)
    return [
        type(accel.prepare_model(Two(), evaluation_mode=True)).__name__,
        type(accel.prepare_model(Two())).__name__,
        type(accel.prepare_model(frozen)).__name__,
    ]


def test_a_model_that_is_not_trained_is_not_wrapped(pool):
    assert pool.run(prepared_for_evaluation)[0] == ["Two", "DistributedDataParallel", "Two"]


def refused(kind: str) -> None:
    accel = accelerator()
    model = Two()
    if kind == "device_map":
        model.hf_device_map = {"a": 0, "b": "cpu"}
    elif kind == "meta":
        model.a.to("meta")
        model.a = torch.nn.Linear(8, 8, device="meta")
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        model.a.weight = torch.nn.Parameter(distribute_tensor(model.a.weight.data, mesh))
    accel.prepare(model)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("device_map", "device_map={''"), ("meta", "to_empty"), ("dtensor", "is a DTensor")],
)
def test_a_model_that_cannot_be_a_replica_is_refused(pool, kind, text):
    for name, told in pool.outcomes(refused, kind):
        assert name == "ValueError"
        assert text in told


def one_device_map() -> str:
    model = Two()
    model.hf_device_map = {"": "cpu"}
    return type(accelerator().prepare(model)).__name__


def test_a_device_map_with_one_device_is_no_hindrance(pool):
    assert pool.run(one_device_map)[0] == "DistributedDataParallel"


# --- with compilation, fp8 and options of the process group --------------------------------


class Counting:
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def trained_compiled(how: str) -> list:
    torch._dynamo.reset()
    backend, inner = Counting(), Two()
    plugin = TorchDynamoPlugin(backend=backend) if how == "plugin" else None
    accel = accelerator(dynamo_plugin=plugin, mixed_precision="bf16")
    model = inner
    if how == "user":
        model = torch.compile(inner, backend=backend)
    elif how == "user around DDP":
        model = torch.compile(DistributedDataParallel(inner), backend=backend)
    model, optimizer = accel.prepare(model, torch.optim.SGD(inner.parameters(), lr=0.1))
    for _ in range(2):
        accel.backward(model(value_of(accel)).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert accel.unwrap_model(model) is inner
    assert list(accel.get_state_dict(model)) == list(Two().state_dict())
    return [backend.graphs > 0, inner.b.bias.tolist()]


@pytest.mark.parametrize("how", ["plugin", "user", "user around DDP"])
def test_compiled_replicas_train_as_others_do(pool, how):
    expected = pool.run(trained_compiled, "not")[0]
    assert expected[0] is False
    for was_compiled, bias in pool.run(trained_compiled, how):
        assert was_compiled
        assert bias == pytest.approx(expected[1], abs=1e-3)


def trained_in_fp8() -> list[float]:
    from torchao.float8 import Float8LinearConfig

    recipe = AORecipeKwargs(
        config=Float8LinearConfig(emulate=True), module_filter_func=lambda module, name: True
    )
    accel = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe], timeout=BOUND)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    before = copy.deepcopy(model)
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accel.backward(model(torch.ones(16, 16) * (accel.process_index + 1)).sum())
    optimizer.step()
    after = accel.unwrap_model(model).state_dict()
    assert list(after) == list(before.state_dict())
    assert not torch.equal(after["0.weight"], before[0].weight)
    return after["0.weight"].sum().tolist()


def test_fp8_replicas_stay_alike(pool):
    pytest.importorskip("torchao")
    first, second = pool.run(trained_in_fp8)
    assert first == second


@pytest.fixture
def fresh_pool(pool, tmp_path):
    """Two processes that are in no group yet."""
    fresh = type(pool)(2, tmp_path)
    try:
        yield fresh
        fresh.close()
    finally:
        fresh.kill()


def joined_as_told(path: str) -> list:
    options = InitProcessGroupKwargs(backend="gloo", init_method=f"file://{path}", timeout=33)
    accel = Accelerator(cpu=True, kwargs_handlers=[options])
    total = accel.reduce(torch.tensor(1.0)).item()
    group = dist.distributed_c10d._get_default_group()
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return [total, dist.get_backend(), timeout.total_seconds()]


def test_the_processes_are_joined_as_the_handler_says(fresh_pool, tmp_path):
    assert fresh_pool.run(joined_as_told, str(tmp_path / "meet")) == [[2.0, "gloo", 33.0]] * 2
    assert (tmp_path / "meet").exists()


# --- a static graph in a gradient window ----------------------------------------------------


def train_windows(static: bool, each: bool) -> list[float]:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
    accel = accelerator({"static_graph": static}, gradient_accumulation_plugin=plugin)
    model = Two()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for factor in (1.0, 2.0, 3.0, 4.0):
        with accel.accumulate(model):
            accel.backward(model(factor * value_of(accel)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.sum().item() for parameter in model.parameters()]


def test_a_static_graph_is_refused_with_a_window_and_trains_if_each_batch_averages(pool):
    for kind, text in pool.outcomes(train_windows, True, False):
        assert kind == "ValueError"
        assert "static_graph=True) does not work with a gradient window of 2" in text
        assert "GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)" in text
    usual = pool.run(train_windows, False, False)
    for values, wanted in zip(pool.run(train_windows, True, True), usual, strict=True):
        assert values == pytest.approx(wanted, rel=1e-4)


def prepare_evaluated() -> bool:
    accel = accelerator({"static_graph": True}, gradient_accumulation_steps=2)
    return accel.prepare_model(Two(), evaluation_mode=True)(value_of(accel)).requires_grad


def test_a_model_that_is_only_evaluated_has_no_window(pool):
    assert pool.run(prepare_evaluated) == [True, True]
