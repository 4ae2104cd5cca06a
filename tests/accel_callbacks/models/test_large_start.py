"""Models larger than the memory of a rank: built without weights, sharded, filled part by part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_callbacks import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    init_empty_weights,
    initialize_weights,
    load_checkpoint_in_model,
)
from accel_callbacks.utils import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
)
from tests.support.bound import BOUND
from tests.support.rounding import reordered

pytestmark = pytest.mark.distributed


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("table", torch.arange(width) / width, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x))) + self.table


class Net(torch.nn.Module):
    """The head is tied, sizes are not divisible by the number of ranks, one part is empty."""

    def __init__(self, width: int = 15, blocks: int = 3) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.scale = torch.nn.Conv1d(1, 1, 1)
        self.batch_norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.scale(self.head(self.batch_norm(x))[:, None])[:, 0]


IDS = torch.arange(22) % 11


def accelerator(**options: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(**options.pop("plugin", {}))
    return Accelerator(cpu=True, timeout=BOUND, fsdp_plugin=plugin, **options)


def empty() -> Net:
    with init_empty_weights():
        return Net()


def full(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, whole, under all names."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
        for name, one in tensors.items()
    }


def differences(model: torch.nn.Module, seed: int) -> list[str]:
    """The tensors that are not those of a model that this seed makes."""
    torch.manual_seed(seed)
    plain, mine = full(Net()), full(model)
    assert list(plain) == list(mine)
    return [name for name in plain if not torch.equal(plain[name], mine[name])]


def write(folder: str, seed: int = 5, width: int = 15, blocks: int = 3) -> None:
    torch.manual_seed(seed)
    model = Net(width, blocks)
    Accelerator(cpu=True).save_model(model, folder, max_shard_size="2KB" if width < 99 else "5GB")


# --- weights from files ------------------------------------------------------------------------


def load_after_prepare(folder: str, sizes: list[int]) -> Any:
    config = ParallelismConfig(dp_replicate_size=sizes[0], dp_shard_size=sizes[1])
    accel = accelerator(parallelism_config=config)
    model = empty()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accel.prepare(model, optimizer)
    load_checkpoint_in_model(model, folder)
    found = differences(model, 5), model.head.weight is model.embed.weight
    accel.backward(model(IDS).square().mean())
    optimizer.step()
    # The optimizer has the parameters that were filled, and they are still tied.
    after = differences(model, 5)
    accel.end_training()
    return *found, "embed.weight" in after and "head.weight" in after, len(after)


@pytest.mark.parametrize("kind", ["folder", "index", "file"])
def test_weights_are_read_into_the_parts(pool, tmp_path: Path, kind: str) -> None:
    write(str(tmp_path))
    place = tmp_path
    if kind == "index":
        place = tmp_path / "model.safetensors.index.json"
    if kind == "file":
        torch.manual_seed(5)
        shutil.rmtree(tmp_path)
        Accelerator(cpu=True).save_model(Net(), tmp_path)
        place = tmp_path / "model.safetensors"
    for lost, tied, moved, count in pool.run(load_after_prepare, str(place), [1, 2]):
        assert lost == []
        assert tied
        assert moved
        assert count > 10


def test_weights_are_read_into_replicated_parts(pool_of_4, tmp_path: Path) -> None:
    write(str(tmp_path))
    for lost, tied, moved, _ in pool_of_4.run(load_after_prepare, str(tmp_path), [2, 2]):
        assert (lost, tied, moved) == ([], True, True)


@contextmanager
def bytes_read() -> Iterator[list[int]]:
    """The number of bytes of each span that is fetched."""
    from checkpoint_io.storage.local import LocalStore

    sizes: list[int] = []
    fetch_into = LocalStore.fetch_into

    def counted(self: LocalStore, spans: Any, views: Any, filled: Any) -> Any:
        sizes.extend(span.end - span.begin for span in spans)
        return fetch_into(self, spans, views, filled)

    LocalStore.fetch_into = counted  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        LocalStore.fetch_into = fetch_into  # type: ignore[method-assign]


def read_large(folder: str) -> tuple[int, int]:
    accel = accelerator()
    with init_empty_weights():
        model = Net(512, 4)
    model = accel.prepare(model)
    with bytes_read() as sizes:
        load_checkpoint_in_model(model, folder)
    accel.end_training()
    return sum(sizes), os.path.getsize(os.path.join(folder, "model.safetensors"))


def test_each_rank_reads_its_part(pool_of_4, tmp_path: Path) -> None:
    write(str(tmp_path), width=512, blocks=4)
    found = pool_of_4.run(read_large, str(tmp_path))
    for read, size in found:
        assert read <= size / 4 * 1.1  # buffers and small gaps are read by all
    assert sum(read for read, _ in found) >= found[0][1] * 0.98


def resume_without_weights(folder: str) -> Any:
    accel = accelerator()
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer = accel.prepare(model, optimizer)
    accel.backward(model(IDS).square().mean())
    optimizer.step()
    accel.save_state(folder)
    before = full(model)
    accel.end_training()
    accel = accelerator()
    model = empty()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer = accel.prepare(model, optimizer)
    accel.load_state(folder)
    after = full(model)
    model(IDS)
    accel.end_training()
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_a_resume_fills_a_model_without_weights(pool, tmp_path: Path) -> None:
    assert pool.run(resume_without_weights, str(tmp_path / "state")) == [[], []]


# --- weights that are missing ------------------------------------------------------------------


def forward_without_weights(written: str) -> str:
    accel = accelerator()
    model = accel.prepare(empty())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if written == "in place" and name != "blocks.1.norm.bias":
                parameter.zero_()
            if written == "by data" and name != "scale.bias":
                parameter.data.fill_(1.0)
    try:
        model(IDS)
    finally:
        accel.end_training()
    return "it ran"


def test_absent_weights_are_not_computed_with(pool) -> None:
    for kind, text in pool.outcomes(forward_without_weights, ""):
        assert kind == "ValueError"
        assert "'embed.weight', 'blocks.0.norm.weight'" in text
        assert "load_checkpoint_in_model" in text
    for kind, text in pool.outcomes(forward_without_weights, "in place"):
        assert kind == "ValueError"
        assert "'blocks.1.norm.bias' of FSDPNet has no values" in text


def test_a_rank_whose_part_is_empty_raises_too(pool) -> None:
    """The bias has one element, of which rank 1 has nothing."""
    (kind, text), (other, remote) = pool.outcomes(forward_without_weights, "by data")
    assert (kind, other) == ("ValueError", "RemoteError")
    assert "'scale.bias'" in text
    assert "'scale.bias'" in remote


class Scored(Net):
    """Methods beside the forward, which do not call it."""

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(self.embed(ids))

    generate = score


def marked_without_weights(name: str, fill: bool) -> Any:
    accel = accelerator()
    with init_empty_weights():
        model = Scored()
    model = accel.prepare(model, forward_methods=["score"])
    if not fill:
        return getattr(model, name)(IDS).sum().item()
    initialize_weights(model)
    results = [getattr(model, name)(IDS) for _ in range(2)]  # the first of them looks for weights
    return torch.isfinite(results[0]).all().item(), torch.equal(*results)


@pytest.mark.parametrize(
    ("world", "name"), [("pool", "score"), ("pool", "generate"), ("alone", "score")]
)
def test_marked_methods_do_not_compute_with_absent_weights(request, world, name) -> None:
    ranks = request.getfixturevalue(world)
    for kind, text in ranks.outcomes(marked_without_weights, name, False):
        assert kind == "ValueError"
        assert "'embed.weight', 'blocks.0.norm.weight'" in text
    for finite, again in ranks.run(marked_without_weights, name, True):
        assert finite
        assert again


def initialized_from(seed: int, way: str) -> Any:
    accel = accelerator(plugin={"param_init_fn": reset} if way == "plugin" else {})
    torch.manual_seed(seed + accel.process_index)
    if way == "all on meta":
        with torch.device("meta"):
            model = Net(blocks=0)
    else:
        model = empty()
    model = accel.prepare(model)
    names = initialize_weights(model, reset if way == "function" else None)
    state = torch.get_rng_state()
    torch.manual_seed(seed + accel.process_index)
    own_again = torch.equal(torch.get_rng_state(), state)
    found = full(model)
    again = initialize_weights(model)
    model(IDS)
    accel.end_training()
    return names, {name: one.tolist() for name, one in found.items()}, own_again, again


def reset(module: torch.nn.Module) -> None:
    """As functions for FSDP1 begin."""
    module.to_empty(device="cpu", recurse=False)
    module.reset_parameters()


def whole_from(seed: int) -> dict[str, Any]:
    """What one process has, whose modules draw once when they are built, in their order."""
    torch.manual_seed(seed)
    model = Net()
    torch.manual_seed(seed)
    for module in model.modules():
        if module is not model.head and hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return {name: one.tolist() for name, one in full(model).items()}


@pytest.mark.parametrize("way", ["modules", "function", "plugin"])
def test_weights_are_initialized_as_on_one_process(pool, way: str) -> None:
    (names, first, _, again), (_, second, own, _) = pool.run(initialized_from, 3, way)
    assert first == second == whole_from(3)
    assert "embed.weight" in names
    assert "blocks.2.linear.bias" in names
    assert again == []
    assert own  # rank 1 draws its own numbers afterwards


def test_persistent_buffers_on_meta_are_reset(pool) -> None:
    names = pool.run(initialized_from, 3, "all on meta")[0][0]
    assert "batch_norm.running_mean" in names
    assert "batch_norm.num_batches_tracked" in names


def tables_on_meta(folder: str) -> str:
    accel = accelerator()
    with torch.device("meta"):
        model = Net()
    model = accel.prepare(model)
    try:
        load_checkpoint_in_model(model, folder)
        model(IDS)
    finally:
        accel.end_training()
    return "it ran"


def test_tables_that_no_checkpoint_has_are_named(pool, tmp_path: Path) -> None:
    write(str(tmp_path))
    for kind, text in pool.outcomes(tables_on_meta, str(tmp_path)):
        assert kind == "ValueError"
        assert "'blocks.0.table', 'blocks.1.table', 'blocks.2.table' of FSDPNet have no" in text
        assert "init_empty_weights()" in text


def load_partly(folder: str) -> Any:
    import warnings

    accel = accelerator()
    model = accel.prepare(empty())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_checkpoint_in_model(model, folder)
    lost = differences(model, 5)
    values = full(model)["blocks.2.norm.weight"].tolist()
    model(IDS)
    accel.end_training()
    return [str(one.message) for one in caught], lost, values


def test_what_the_checkpoint_lacks_is_initialized(pool, tmp_path: Path) -> None:
    from checkpoint_io import save_model

    torch.manual_seed(5)
    state = Net().state_dict()
    del state["blocks.2.norm.weight"], state["blocks.2.linear.weight"]
    save_model(state, tmp_path)
    for messages, lost, values in pool.run(load_partly, str(tmp_path)):
        assert lost == ["blocks.2.linear.weight"]
        assert values == [1.0] * 15
        assert any(
            "initialized what" in one and "blocks.2.linear.weight, blocks.2.norm.weight" in one
            for one in messages
        )


def load_other_names(folder: str) -> None:
    accel = accelerator()
    model = accel.prepare(empty())
    try:
        load_checkpoint_in_model(model, folder)
    finally:
        accel.end_training()


def test_a_checkpoint_of_another_model_initializes_nothing(pool, tmp_path: Path) -> None:
    from checkpoint_io import save_model

    save_model({"other.weight": torch.zeros(2)}, tmp_path)
    for kind, text in pool.outcomes(load_other_names, str(tmp_path)):
        assert kind == "ValueError"
        assert "has none of the names of FSDPNet" in text


def with_adapter(folder: str) -> Any:
    """Base weights from a file, beside an adapter that was built with values."""
    accel = accelerator()
    model = empty()
    torch.manual_seed(0)
    model.adapter = torch.nn.Linear(15, 15, bias=False)
    expected = model.adapter.weight.tolist()
    model = accel.prepare(model)
    load_checkpoint_in_model(model, folder)
    found = full(model)
    adapter = found.pop("adapter.weight").tolist()
    torch.manual_seed(5)
    plain = full(Net())
    model(IDS)
    accel.end_training()
    return adapter == expected, [n for n in plain if not torch.equal(plain[n], found[n])]


@pytest.mark.filterwarnings("ignore:.*did not have")
def test_an_adapter_keeps_its_values(pool, tmp_path: Path) -> None:
    write(str(tmp_path))
    assert pool.run(with_adapter, str(tmp_path)) == [(True, [])] * 2


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def without_reset() -> None:
    accel = accelerator()
    with init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), Own())
    model = accel.prepare(model)
    try:
        initialize_weights(model)
    finally:
        accel.end_training()


def test_a_module_without_reset_is_named(pool) -> None:
    for kind, text in pool.outcomes(without_reset):
        assert kind == "ValueError"
        assert "'1.weight' cannot be initialized: Own has no reset_parameters" in text


# --- weights that only rank 0 has --------------------------------------------------------------


def sent_from_rank_0(how: str, sizes: list[int]) -> Any:
    config = ParallelismConfig(dp_replicate_size=sizes[0], dp_shard_size=sizes[1])
    accel = accelerator(
        parallelism_config=config, plugin={"sync_module_states": how != "own values"}
    )
    if how == "rank 0 only" and accel.process_index:
        model = empty()
        for buffer in model.buffers():
            buffer.zero_()  # as transformers does: rank 0's are right
    else:
        torch.manual_seed(5 if how == "alike" else 5 + accel.process_index)
        model = Net()
    sent: list[int] = []
    import accel_callbacks.models.initial_weights as module

    broadcast = module.collectives.broadcast

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor.numel())
        return broadcast(tensor)

    module.collectives.broadcast = counted
    try:
        model = accel.prepare(model)
    finally:
        module.collectives.broadcast = broadcast
    lost = differences(model, 5)
    tied = model.head.weight is model.embed.weight
    finite = bool(model(IDS).isfinite().all())
    accel.end_training()
    return lost, tied, finite, sum(sent)


@pytest.mark.parametrize("how", ["rank 0 only", "alike", "other values"])
def test_the_values_of_rank_0_count(pool, how: str) -> None:
    elements = sum(one.numel() for one in full_once(Net()))
    for lost, tied, finite, sent in pool.run(sent_from_rank_0, how, [1, 2]):
        assert (lost, tied, finite) == ([], True, True)
        # Each element once, and none if all have the same.
        assert sent <= (0 if how == "alike" else elements)


def full_once(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def test_the_values_of_rank_0_count_in_all_replicas(pool_of_4) -> None:
    for lost, tied, finite, _ in pool_of_4.run(sent_from_rank_0, "rank 0 only", [2, 2]):
        assert (lost, tied, finite) == ([], True, True)


def test_each_rank_keeps_its_own_values_on_request(pool) -> None:
    for lost, _, _, sent in pool.run(sent_from_rank_0, "own values", [1, 2]):
        assert "embed.weight" in lost
        assert sent == 0


def prepare_other_models(how: str) -> None:
    accel = accelerator()
    first = accel.process_index == 0
    try:
        if how == "shapes":
            accel.prepare(Net(15 if first else 16))
        else:
            accel.prepare(empty() if first else Net())
    finally:
        accel.end_training()


def test_models_that_differ_are_refused_on_all_ranks(pool) -> None:
    for kind, text in pool.outcomes(prepare_other_models, "shapes"):
        assert kind == "ValueError"
        assert "embed.weight is [11, 15] on rank 0, [11, 16] on 1" in text
    for kind, text in pool.outcomes(prepare_other_models, "meta on rank 0"):
        assert kind == "ValueError"
        assert "rank 0 has embed.weight" in text


# --- memory ------------------------------------------------------------------------------------


@contextmanager
def largest_memory(*held: torch.Tensor) -> Iterator[dict[str, int]]:
    """The most elements of these tensors, and of those made here, that were alive at a time."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = {"first": 0, "most": 0}
    alive: dict[Any, tuple[StorageWeakRef, int]] = {}

    def see(one: torch.Tensor) -> None:
        storage = one.untyped_storage()
        mark = StorageWeakRef(storage)
        alive.setdefault(mark.cdata, (mark, storage.nbytes() // one.element_size()))

    def measure() -> int:
        for key in [key for key, (mark, _) in alive.items() if mark.expired()]:
            del alive[key]
        return sum(size for _, size in alive.values())

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            for one in torch.utils._pytree.tree_leaves(out):
                plain = type(one) in (torch.Tensor, torch.nn.Parameter)
                if plain and not one.is_meta and one.is_floating_point():
                    see(one)
            counts["most"] = max(counts["most"], measure())
            return out

    for tensor in held:
        see(tensor)
    counts["first"] = measure()
    del held
    with Count():
        yield counts


def memory_of_prepare(folder: str, how: str) -> Any:
    accel = accelerator()
    width, blocks = 64, 6
    held: list[torch.Tensor] = []
    if how == "empty":
        with init_empty_weights():
            model = Net(width, blocks)
    else:
        model = Net(width, blocks)
        held = list(model.parameters())
    with largest_memory(*held) as counts:
        model = accel.prepare(model)
        if how == "empty":
            load_checkpoint_in_model(model, folder)
    local = sum(one.to_local().numel() for one in model.parameters())
    unit = sum(one.numel() for one in Net(width, blocks).blocks[0].parameters())
    left = sum(one.numel() for one in held)
    accel.end_training()
    return counts["most"] - counts["first"], local, unit, left


def test_prepare_holds_a_part_and_at_most_a_unit(pool_of_4, tmp_path: Path) -> None:
    write(str(tmp_path), width=64, blocks=6)
    for most, local, unit, _ in pool_of_4.run(memory_of_prepare, str(tmp_path), "empty"):
        assert local <= most <= local + unit
    for more, local, unit, left in pool_of_4.run(memory_of_prepare, str(tmp_path), "real"):
        assert 0 < more <= unit < local
        assert left == 0  # the user's parameters, which an optimizer may hold, are empty


# --- one process -------------------------------------------------------------------------------


def alone_with_weights(folder: str) -> Any:
    accel = accelerator()
    model = empty()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accel.prepare(model, optimizer)
    load_checkpoint_in_model(model, folder)
    lost = differences(model, 5)
    accel.backward(model(IDS).square().mean())
    optimizer.step()
    moved = differences(model, 5)
    accel.end_training()
    return lost, "embed.weight" in moved


def test_the_same_script_runs_on_one_process(alone, tmp_path: Path) -> None:
    write(str(tmp_path))
    assert alone.run(alone_with_weights, str(tmp_path)) == [([], True)]


# --- transformers ------------------------------------------------------------------------------


def write_gpt2(folder: str) -> Any:
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    return model


def load_pretrained(folder: str, way: str) -> Any:
    import transformers

    accel = accelerator(plugin={"cpu_ram_efficient_loading": way != "off"})
    before = dict(os.environ)
    if way == "config":
        config = transformers.GPT2Config.from_pretrained(folder)
        with accel.init_module():
            model = transformers.GPT2LMHeadModel(config)
    elif way == "switched":
        enable_fsdp_ram_efficient_loading()
        model = transformers.GPT2LMHeadModel.from_pretrained(folder)
        disable_fsdp_ram_efficient_loading()
    else:
        with accel.cpu_ram_efficient_loading():
            model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    allocated = sum(one.numel() for one in model.parameters() if not one.is_meta)
    asked = transformers.modeling_utils.is_fsdp_enabled()  # the answer is for the context only
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accel.prepare(model, optimizer)
    if way == "config":
        load_checkpoint_in_model(model, folder)
    whole = {name: one.tolist() for name, one in full(model).items()}
    ids = torch.arange(8)[None]
    loss = model(input_ids=ids, labels=ids).loss
    accel.backward(loss)
    accel.end_training()
    return allocated, whole, float(loss), asked, dict(os.environ) == before


@pytest.mark.parametrize("way", ["on", "off", "config", "switched"])
def test_pretrained_weights_are_loaded_by_rank_0(pool, tmp_path: Path, way: str) -> None:
    pytest.importorskip("transformers")
    model = write_gpt2(str(tmp_path))
    elements = sum(one.numel() for one in model.parameters())
    ids = torch.arange(8)[None]
    expected = float(model.eval()(input_ids=ids, labels=ids).loss)
    names = {name: one.tolist() for name, one in full(model).items()}
    found = pool.run(load_pretrained, str(tmp_path), way)
    counts = {"off": [elements, elements], "config": [0, 0]}.get(way, [elements, 0])
    assert [allocated for allocated, *_ in found] == counts
    for _, whole, loss, asked, same_environment in found:
        assert whole == names
        if way != "config":  # which is in training mode, with dropout
            assert loss == reordered(expected)
        assert not asked
        assert same_environment


# --- activation checkpointing ------------------------------------------------------------------


def train_checkpointed(policy: Any, kind: str, offload: bool = False) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if kind == "compiled":
        from accel_callbacks import TorchDynamoPlugin

        torch._dynamo.reset()
        options["dynamo_plugin"] = TorchDynamoPlugin(
            backend="aot_eager", use_regional_compilation=True
        )
    if kind == "ddp":
        from accel_callbacks import apply_activation_checkpointing

        accel = Accelerator(cpu=True, timeout=BOUND)
        model = Net()
        apply_activation_checkpointing(model, policy)
    else:
        plugin = {
            "activation_checkpointing": policy,
            "activation_checkpointing_offload": offload,
        }
        accel = accelerator(plugin=plugin, **options)
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accel.prepare(model, optimizer)
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    for _ in range(3):
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(IDS)
        accel.backward(loss.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    found = {name: one.tolist() for name, one in full(accel.unwrap_model(model)).items()}
    names = list(accel.unwrap_model(model).state_dict())
    accel.end_training()
    return found, sum(sizes), names


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        # Each policy with shards, and another one with each other kind; the rest is slow.
        pytest.param(policy, kind, marks=[] if quick else [pytest.mark.slow])
        for policy in (True, 2, "selective")
        for kind in ("fsdp", "ddp", "compiled")
        for quick in [kind == "fsdp" or (policy, kind) in [(2, "ddp"), ("selective", "compiled")]]
    ],
)
def test_checkpointed_blocks_train_alike(pool, kind: str, policy: Any) -> None:
    plain, most, names = pool.run(train_checkpointed, False, kind)[0]
    for found, saved, own_names in pool.run(train_checkpointed, policy, kind):
        assert found == plain
        assert saved < most
        assert own_names == names


def test_checkpointed_blocks_of_shards_train_alike_from_host_memory(pool) -> None:
    plain, kept, _ = pool.run(train_checkpointed, True, "fsdp")[0]
    for weights, saved, _ in pool.run(train_checkpointed, True, "fsdp", True):
        assert weights == plain
        assert saved < kept  # what hooks that are further out see
    for _, text in pool.outcomes(train_checkpointed, False, "fsdp", True):
        assert "set activation_checkpointing=True as well" in text
