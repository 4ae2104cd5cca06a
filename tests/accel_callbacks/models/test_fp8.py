"""fp8 with torchao, emulated on the CPU: what is converted, what stays, and that it trains."""

from __future__ import annotations

import copy
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file

from accel_callbacks import Accelerator, AORecipeKwargs

float8 = pytest.importorskip("torchao.float8")
Float8Linear = pytest.importorskip("torchao.float8.float8_linear").Float8Linear


def accelerator(**recipe) -> Accelerator:
    recipe.setdefault("config", float8.Float8LinearConfig(emulate=True))
    return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(**recipe)])


def network(width: int = 32) -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(16, width), torch.nn.ReLU()]
    layers += [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(width, 1))


def converted(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def losses(accel: Accelerator, model, optimizer, steps: int = 30) -> list[float]:
    torch.manual_seed(4)
    x = torch.randn(64, 16)
    y = x.sum(1, keepdim=True)
    seen = []
    for _ in range(steps):
        loss = (model(x) - y).pow(2).mean()
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_it_trains_whenever_the_optimizer_was_prepared(optimizer_first):
    accel, model = accelerator(), network()
    before = dict(model.named_parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if optimizer_first:
        optimizer = accel.prepare(optimizer)
        model = accel.prepare(model)
    else:
        model, optimizer = accel.prepare(model, optimizer)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    seen = losses(accel, model, optimizer)
    assert seen[-1] < seen[0] / 4


def test_fp8_layers_compute_in_fp8_and_the_outputs_are_fp32():
    x = torch.randn(4, 16)
    plain = network()(x)
    model = accelerator().prepare(network())
    output = model(x)
    assert output.dtype is torch.float32
    bf16 = Accelerator(cpu=True, mixed_precision="bf16").prepare(network())(x)
    assert not torch.equal(output, bf16)
    torch.testing.assert_close(output, plain, atol=0.05, rtol=0.1)


def test_all_but_the_first_and_the_last_layer_of_fitting_size_are_converted():
    assert converted(accelerator().prepare(network())) == ["2", "4"]
    with pytest.warns(UserWarning, match="no layer of Sequential was converted"):
        model = accelerator().prepare(network(width=24))
    assert converted(model) == []


def test_a_filter_picks_other_layers():
    def first(module: torch.nn.Module, name: str) -> bool:
        return name == "0"

    assert converted(accelerator(module_filter_func=first).prepare(network())) == ["0"]


def test_padding_is_that_of_the_config_unless_the_recipe_says_otherwise():
    config = float8.Float8LinearConfig(emulate=True, pad_inner_dim=False)
    for given, expected in ((None, False), (True, True)):
        model = accelerator(config=config, pad_inner_dim=given).prepare(network())
        assert model[2].config.pad_inner_dim is expected
    assert not config.pad_inner_dim


def test_a_subclass_of_linear_is_left_alone():
    class Mine(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(
        torch.nn.Linear(16, 16), Mine(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
    )
    assert converted(accelerator().prepare(model)) == ["2"]


def test_names_and_files_are_those_of_the_plain_model(tmp_path):
    accel = accelerator()
    model = network()
    model, optimizer = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    losses(accel, model, optimizer, steps=2)
    assert list(model.state_dict()) == list(network().state_dict())
    accel.save_model(model, tmp_path)
    fresh = network()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(fresh[2].weight, model[2].weight)


def test_a_checkpoint_brings_weights_and_optimizer_back(tmp_path):
    def prepared():
        accel, model = accelerator(), network()
        return accel, *accel.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))

    accel, model, optimizer = prepared()
    losses(accel, model, optimizer, steps=3)
    accel.save_state(tmp_path / "c")
    expected = losses(accel, model, optimizer, steps=3)
    accel, model, optimizer = prepared()
    accel.load_state(tmp_path / "c")
    assert losses(accel, model, optimizer, steps=3) == expected


def test_hooks_and_modes_of_layers_survive_the_conversion_and_the_way_back():
    model, calls = network(), []
    model[2].register_forward_hook(lambda *_: calls.append("forward"))
    model[2].eval()
    accel = accelerator()
    weight = model[2].weight
    model = accel.prepare(model)
    assert (converted(model), model[2].training) == (["2", "4"], False)
    model(torch.ones(1, 16))
    assert calls == ["forward"]
    bare = accel.unwrap_model(model, keep_fp32_wrapper=False)
    assert converted(bare) == []
    assert type(bare[2]) is torch.nn.Linear
    assert (bare[2].weight is weight, bare[2].training) == (True, False)
    bare(torch.ones(1, 16))
    assert calls == ["forward"] * 2
    assert accel.unwrap_model(model) is model


def test_an_accelerator_of_another_precision_brings_the_plain_layers_back():
    model = accelerator().prepare(network())
    copied = copy.deepcopy(model)
    Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert (converted(model), converted(copied)) == ([], ["2", "4"])
    with torch.no_grad():
        copied[2].weight.zero_()
    assert not torch.equal(copied(torch.ones(1, 16)), model(torch.ones(1, 16)))


def test_a_model_that_is_one_layer_says_what_to_do():
    accel = accelerator(module_filter_func=lambda module, name: True)
    with pytest.raises(ValueError, match="Sequential"):
        accel.prepare(torch.nn.Linear(16, 16))


def test_a_device_without_fp8_is_refused_unless_it_is_emulated():
    with pytest.raises(ValueError, match="emulate"):
        Accelerator(cpu=True, mixed_precision="fp8")
    with pytest.raises(ValueError, match="emulate"):
        accelerator(config=float8.Float8LinearConfig())


def test_a_gather_in_fp8_has_no_effect_on_one_device_and_is_said_once_to_have_none():
    config = float8.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    accel, model = accelerator(config=config), network()
    weight = model[2].weight
    with pytest.warns(UserWarning, match="enable_fsdp_float8_all_gather has no effect"):
        model = accel.prepare(model)
    assert model[2].weight is weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accel.prepare(network())


def test_nobody_hears_of_it_who_has_not_asked_for_it(recwarn):
    accelerator().prepare(network())
    accelerator(enable_fsdp_float8_all_gather=False).prepare(network())
    assert [str(one.message) for one in recwarn] == []


def test_without_a_config_weights_are_gathered_in_fp8(monkeypatch):
    monkeypatch.setattr(
        "accel_callbacks.models.fp8.precision._check_capability", lambda device: None
    )
    plain = Accelerator(cpu=True, mixed_precision="fp8")
    assert plain.precision.float8_config.enable_fsdp_float8_all_gather
    refused = AORecipeKwargs(enable_fsdp_float8_all_gather=False)
    other = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[refused])
    assert not other.precision.float8_config.enable_fsdp_float8_all_gather


def test_scales_of_rows_cannot_be_gathered():
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    with pytest.raises(ValueError, match=r"tensorwise.*gathered in their own dtype"):
        accelerator(config=config, enable_fsdp_float8_all_gather=True)


def test_inference_mode_computes_as_without_gradients():
    model = accelerator().prepare(network())
    with torch.no_grad():
        expected = model(torch.ones(1, 16))
    with torch.inference_mode():
        assert torch.equal(model(torch.ones(1, 16)), expected)


def test_the_launcher_chooses_what_the_script_leaves_out(monkeypatch):
    monkeypatch.setattr(
        "accel_callbacks.models.fp8.precision._check_capability", lambda device: None
    )
    monkeypatch.setenv("ACCEL_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "0")
    monkeypatch.setenv("ACCEL_FP8_PAD_INNER_DIM", "0")

    def options(**recipe) -> tuple[bool, bool]:
        handlers = [AORecipeKwargs(**recipe)] if recipe else []
        accel = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)
        config = accel.precision.float8_config
        return config.enable_fsdp_float8_all_gather, config.pad_inner_dim

    assert options() == (False, False)
    assert options(module_filter_func=lambda *_: True) == (False, False)
    assert options(enable_fsdp_float8_all_gather=True) == (True, False)
    own = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, pad_inner_dim=True)
    assert options(config=own) == (True, True)


def test_a_config_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="Float8LinearConfig"):
        accelerator(config={"emulate": True})


def test_without_torchao_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    for name in [name for name in sys.modules if name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="pip install torchao"):
        Accelerator(cpu=True, mixed_precision="fp8")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device with fp8",
)
def test_it_trains_on_a_device_with_fp8():
    accel, model = Accelerator(mixed_precision="fp8"), network()
    model, optimizer = accel.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    assert converted(model) == ["2", "4"]
    x = torch.randn(64, 16, device=accel.device)
    first = last = None
    for _ in range(30):
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        accel.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        first, last = first if first is not None else loss.item(), loss.item()
    assert last < first / 4
