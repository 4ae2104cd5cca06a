"""Activation checkpointing: what is kept, what is computed again, and what does not change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import accel_callbacks.utils
from accel_callbacks import Accelerator, TorchDynamoPlugin, apply_activation_checkpointing

aten = torch.ops.aten


class Block(torch.nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.dropout = torch.nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, context_fn: float = 1.0) -> torch.Tensor:
        """The keyword has the name of one that torch's checkpoint takes for its own."""
        self.calls += 1
        return (
            x
            + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x))))) * context_fn
        )


class Net(torch.nn.Module):
    def __init__(self, blocks: int = 4, width: int = 8, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = torch.nn.Linear(4, width)
        self.blocks = torch.nn.ModuleList(Block(width, dropout) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = block(x, context_fn=0.5)
        return x.square().mean()


@contextmanager
def counted() -> Iterator[list[int]]:
    """The number of elements of each tensor that autograd saves."""
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def saved(model: torch.nn.Module, x: torch.Tensor) -> int:
    with counted() as sizes:
        model(x)
    return sum(sizes)


def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


X = torch.linspace(-1, 1, 64).reshape(16, 4)


def keep_gelu(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = operator == aten.gelu.default
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = [True, "full", 2, "selective", [aten.addmm.default], keep_gelu]


@pytest.mark.parametrize("policy", POLICIES, ids=["all", "full", "second", "ops", "list", "rule"])
def test_gradients_are_bitwise_those_without_it(policy: Any) -> None:
    plain = gradients(Net(), X)
    model = Net()
    apply_activation_checkpointing(model, policy)
    found = gradients(model, X)
    assert len(found) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_dropout_that_draws_anew_gives_other_gradients() -> None:
    model = Net()
    apply_activation_checkpointing(model, preserve_rng_state=False)
    pairs = zip(gradients(model, X), gradients(Net(), X), strict=True)
    assert not all(torch.equal(one, other) for one, other in pairs)


def test_fewer_tensors_are_saved_the_more_is_computed_again() -> None:
    def with_policy(policy: Any) -> int:
        model = Net()
        apply_activation_checkpointing(model, policy)
        return saved(model, X)

    plain, half, all_of_them = saved(Net(), X), with_policy(2), with_policy(True)
    outside = saved(Net(0), X)
    of_a_block = (plain - outside) // 4
    # A checkpointed block saves its input alone, of 16 x 8 elements.
    assert all_of_them <= outside + 4 * 16 * 8
    assert half <= outside + 2 * of_a_block + 2 * 16 * 8


@pytest.mark.parametrize("policy", [True, 2, "selective"])
def test_inputs_of_blocks_are_kept_in_host_memory(policy: Any) -> None:
    kept, offloaded = Net(), Net()
    apply_activation_checkpointing(kept, policy)
    names = apply_activation_checkpointing(offloaded, policy, offload=True)
    pairs = zip(gradients(offloaded, X), gradients(kept, X), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    # Hooks that are further out do not see what is offloaded: an input of each block.
    inputs = len(names) * len(X) * 8
    assert saved(copy.deepcopy(offloaded), X) == saved(kept, X) - inputs


def test_what_is_computed_again_is_counted() -> None:
    model = Net()
    assert apply_activation_checkpointing(model, 2) == ["blocks.1", "blocks.3"]
    gradients(model, X)
    assert [block.calls for block in model.blocks] == [1, 2, 1, 2]


def operators_run_again(policy: Any) -> set[Any]:
    """The operators of the backward pass that belong to a forward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[Any] = set()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.add(func)
            return func(*args, **(kwargs or {}))

    model = Net()
    apply_activation_checkpointing(model, policy)
    loss = model(X)
    with Record() as record:
        loss.backward()
    return record.seen


def test_selective_keeps_products_and_computes_the_rest_again() -> None:
    forward = {aten.addmm.default, aten.gelu.default}
    assert operators_run_again(True) & forward == forward
    assert operators_run_again("selective") & forward == {aten.gelu.default}
    assert operators_run_again(keep_gelu) & forward == {aten.addmm.default}


def test_names_do_not_change() -> None:
    model = Net()
    names, kinds = list(model.state_dict()), [type(one) for one in model.modules()]
    apply_activation_checkpointing(model)
    assert list(model.state_dict()) == names
    assert [type(one) for one in model.modules()] == kinds


def test_it_is_undone_and_replaced() -> None:
    model = Net()
    apply_activation_checkpointing(model)
    apply_activation_checkpointing(model, blocks=[model.blocks[0]])
    gradients(model, X)
    assert [block.calls for block in model.blocks] == [2, 1, 1, 1]
    assert apply_activation_checkpointing(model, False) == []
    assert not any("forward" in vars(block) for block in model.blocks)


def test_a_forward_of_the_instance_stays_it() -> None:
    model = Net(2)
    own: Callable[..., Any] = lambda x, context_fn: x * 2  # noqa: E731
    model.blocks[0].forward = own
    apply_activation_checkpointing(model)
    assert model(X).grad_fn is not None
    apply_activation_checkpointing(model, False)
    assert model.blocks[0].forward is own


@pytest.mark.parametrize(
    "blocks", [["Block"], "Block", [Block], lambda module: isinstance(module, Block)]
)
def test_blocks_are_chosen(blocks: Any) -> None:
    names = [f"blocks.{at}" for at in range(4)]
    assert apply_activation_checkpointing(Net(), blocks=blocks) == names


def test_nothing_is_computed_again_without_gradients() -> None:
    model = Net()
    apply_activation_checkpointing(model)
    with torch.no_grad():
        model(X)
    assert [block.calls for block in model.blocks] == [1, 1, 1, 1]


def test_a_copy_has_its_own_forward() -> None:
    model = Net()
    apply_activation_checkpointing(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert float(other(X)) != 0
    assert [block.calls for block in other.blocks] == [1, 1, 1, 1]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="name them with blocks="):
        apply_activation_checkpointing(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"'selectiv' is unknown.*selective"):
        apply_activation_checkpointing(Net(), "selectiv")
    with pytest.raises(ValueError, match="must be positive"):
        apply_activation_checkpointing(Net(), -1)
    with pytest.raises(ValueError, match=r"no module of class 'Blok'.*Block"):
        apply_activation_checkpointing(Net(), blocks=["Blok"])
    with pytest.raises(ValueError, match=r"no operator with an overload"):
        apply_activation_checkpointing(Net(), [aten.addmm])
    twice = Net()
    twice.blocks[2].gradient_checkpointing = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"'blocks.2'.*gradient_checkpointing_disable"):
        apply_activation_checkpointing(twice)


def test_it_is_where_scripts_look_for_it() -> None:
    assert accel_callbacks.utils.apply_activation_checkpointing is apply_activation_checkpointing


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_prepared_models_train_alike(precision: str) -> None:
    def weights(policy: Any) -> list[torch.Tensor]:
        accel = Accelerator(cpu=True, mixed_precision=precision)
        model = Net()
        apply_activation_checkpointing(model, policy)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accel.prepare(model, optimizer)
        torch.manual_seed(1)
        for _ in range(2):
            accel.backward(model(X))
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, weights(True), weights(False)))


@pytest.mark.parametrize(
    ("regional", "policy"),
    [
        (True, "selective"),
        (False, True),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, "selective", marks=pytest.mark.slow),
    ],
)
def test_blocks_are_compiled_with_it(policy: Any, regional: bool) -> None:
    def prepared(policy: Any) -> torch.nn.Module:
        torch._dynamo.reset()
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
        model = Net(dropout=0.0)
        apply_activation_checkpointing(model, policy)
        return Accelerator(cpu=True, dynamo_plugin=plugin).prepare(model)

    for one, other in zip(
        gradients(prepared(policy), X), gradients(Net(dropout=0.0), X), strict=True
    ):
        torch.testing.assert_close(one, other)
    # What the compiled code keeps between the passes.
    assert saved(prepared(policy), X) < saved(prepared(False), X)


def gpt2() -> Any:
    import transformers

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=16, **sizes))


def llama() -> Any:
    import transformers

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
    config = transformers.LlamaConfig(vocab_size=16, intermediate_size=16, **sizes)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("policy", [True, "selective"])
def test_layers_of_transformers_leave_their_cache_alone(build: Any, policy: Any) -> None:
    pytest.importorskip("transformers")

    def trained(policy: Any) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = build()
        if policy:
            assert len(apply_activation_checkpointing(model, policy)) == 2
        torch.manual_seed(1)
        ids = torch.arange(8)[None]
        outputs = model(input_ids=ids, labels=ids, use_cache=True)
        outputs.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return outputs.past_key_values.get_seq_length(), gradients

    (cached, expected), (kept, gradients) = trained(False), trained(policy)
    assert all(map(torch.equal, gradients, expected))
    assert (cached, kept) == (8, 0)


def test_checkpointing_of_transformers_that_is_on_is_refused() -> None:
    pytest.importorskip("transformers")
    model = gpt2()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="of its own on"):
        apply_activation_checkpointing(model)
