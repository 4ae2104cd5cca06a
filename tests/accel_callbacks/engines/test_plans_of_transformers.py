"""Each plan of tensor parallelism of transformers is accepted, or refused with a reason."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from accel_callbacks.engines.tensor.plan import check_own, matched_styles, plan_of
from accel_callbacks.engines.tensor.strategy import checked_plan

transformers = pytest.importorskip("transformers", minversion="5.0")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

_PACKED = "whose name is that of several layers in one"
_SIZES = "choose a tp_size that d"
#: Plans with which the code of their models does not compute what one process does, or whose
#: default sizes two ranks cannot share, and the part of the refusal that says it.
REFUSED = {
    "CodeGenConfig": _PACKED,  # queries, values and keys of a fixed number of blocks
    "InklingTextConfig": _PACKED,  # gate and up, which it splits in the middle
    "Inkling2TextConfig": _PACKED,
    "Inkling2LoopTextConfig": _PACKED,
    "DogeConfig": "does not say what a rank computes with of its parameter 'A'",
    "Glm5NextTextConfig": "o_proj' takes a part of its input",  # of linear attention, left whole
    "DeepseekV2Config": _SIZES,  # 1407 features of an expert
    "EmbeddingGemma2TextConfig": _SIZES,  # one head of keys and values
}


def submodules(package: ModuleType) -> Iterator[ModuleType]:
    for info in pkgutil.iter_modules(package.__path__):
        yield import_module(f"{package.__name__}.{info.name}")


def configurations() -> Iterator[tuple[Any, str]]:
    """Yield each configuration that has a plan, with the name of the module of its models."""
    for package in submodules(import_module("transformers.models")):
        for info in pkgutil.iter_modules(package.__path__):
            if info.name.startswith("configuration_"):
                module = import_module(f"{package.__name__}.{info.name}")
                for value in vars(module).values():
                    own = inspect.isclass(value) and value.__module__ == module.__name__
                    if own and getattr(value, "base_model_tp_plan", None):
                        yield value, module.__name__.replace("configuration_", "modeling_")


def built(configuration: Any, modeling: str) -> Any:
    """Return a model of few layers on the meta device, or None if its defaults make none."""
    try:
        module = import_module(modeling)
        classes = [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and value.__module__ == modeling
            and getattr(value, "config_class", None) is configuration
        ]
        ranked = sorted(classes, key=lambda one: not one.__name__.endswith("ForCausalLM"))
        config = configuration()
        if getattr(config, "num_hidden_layers", 0) > 4:
            config = configuration(num_hidden_layers=4)
        with torch.device("meta"):
            return ranked[0](config)
    except Exception:  # of sizes that other configurations would bring
        return None


class Named(torch.nn.Module):
    """Has a module of each name in a plan."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        for pattern in plan:
            module: torch.nn.Module = self
            for part in pattern.replace("*", "0").split("."):
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)


def refusal(configuration: Any, modeling: str) -> tuple[str, bool]:
    """Return what is said of the plan for two ranks, "" if nothing, and if a model was built."""
    model = built(configuration, modeling)
    plan = plan_of(model) if model is not None else {}
    try:
        if plan:
            check_own(model, plan)
            checked_plan(model, plan, 2)
        else:
            plan = configuration.base_model_tp_plan
            list(matched_styles(Named(plan), plan))
    except ValueError as error:
        return str(error), model is not None
    return "", model is not None


def test_each_plan_is_accepted_or_refused_with_a_reason():
    results = {one.__name__: refusal(one, modeling) for one, modeling in configurations()}
    refused = {name: text for name, (text, _) in results.items() if text}
    assert refused.keys() == REFUSED.keys() & results.keys(), refused
    assert all(REFUSED[name] in text for name, text in refused.items())
    # Most defaults make a model; of the others the styles alone are compared.
    assert sum(is_built for _, is_built in results.values()) > 0.8 * len(results) > 80
