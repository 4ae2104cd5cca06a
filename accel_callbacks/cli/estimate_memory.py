"""``accel estimate-memory``: estimate the memory of a model without allocating its weights."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from accel_callbacks.cli.parser import CommandError, CommandParser, positive_int, suggestion
from accel_callbacks.terminal_text import size_of, table, to_json

if TYPE_CHECKING:
    import torch

AXES = ("dp_replicate", "dp_shard", "cp", "sp")
DTYPES = ("fp32", "fp16", "bf16", "int8", "int4")
_NOTES = """\
Inference: weights and buffers. Training with Adam: fp32 weights, gradients and two states; with
fp16 and bf16 (mixed precision) also the 16-bit copies of the weights that autocast makes.
Not counted: activations, which grow with the batch; temporary memory; torch itself."""

_SHARDED_NOTES = """\
Weights, gradients, optimizer (Adam): the parts of the first process, which has the largest, and
all buffers. Masters: the type of the weights that Adam updates. A unit is gathered whole, in the
type to compute in, before it computes: expect two of them on top, and the largest twice.
Not counted: activations, which grow with the batch; temporary memory; torch itself."""


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel estimate-memory``."""
    parser.add_argument(
        "model",
        help="folder with a config.json of transformers, such a file, the name of a model on the "
        "hub, or module:factory, where calling factory makes a torch.nn.Module",
    )
    parser.option(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=list(DTYPES),
        metavar="DTYPE",
        help=f"which ones of {', '.join(DTYPES)} (default: all)",
    )
    parser.option(
        "--trust_remote_code", action="store_true", help="run the code that comes with the config"
    )
    parser.option(
        "--parallelism",
        type=_axes,
        metavar="AXIS=N,...",
        help="bytes of each process on a mesh, such as dp_shard=8,dp_replicate=2",
    )
    parser.option("--json", action="store_true", help="print bytes as JSON")


def _axes(text: str) -> dict[str, int]:
    """Parse the sizes of a mesh."""
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        axis = name.strip().removesuffix("_size")
        if axis in ("tp", "pp"):
            raise ArgumentTypeError(
                f"{axis} is not estimated: divide the bytes of the layers that it cuts by its size"
            )
        if axis not in sizes:
            raise ArgumentTypeError(f"there is no axis {name!r}{suggestion(name, AXES)}")
        sizes[axis] = positive_int(number)
    return sizes


def run(args: Namespace) -> int:
    """Build the model without memory for its weights, and print its sizes."""
    if args.parallelism is not None:
        return _print_sharded(args, args.parallelism)
    model = _build(args)
    from accel_callbacks.models.memory_estimate import estimate_memory  # imports torch

    estimates = estimate_memory(model, args.dtypes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if args.json:
        dtypes = {estimate.dtype: vars(estimate) for estimate in estimates}
        shown = {"model": args.model, "parameters": parameters, "trainable": trained}
        print(to_json({**shown, "dtypes": dtypes}))
        return 0
    rows = [
        (
            estimate.dtype,
            size_of(estimate.inference),
            size_of(estimate.largest_layer),
            "-" if estimate.training is None else size_of(estimate.training),
        )
        for estimate in estimates
    ]
    frozen = f", {parameters - trained:,} of them frozen" if trained < parameters else ""
    named = ", ".join(dict.fromkeys(estimate.layer_name for estimate in estimates))
    print(f"{args.model}: {parameters:,} parameters{frozen}")
    print(table(("DTYPE", "INFERENCE", "LARGEST LAYER", "TRAINING"), rows))
    print(f"Largest layer: {named}.\n{_NOTES}")
    return 0


def _print_sharded(args: Namespace, sizes: Mapping[str, int]) -> int:
    """Print the sizes of the parts on each process."""
    dtypes = [name for name in args.dtypes if name not in ("int8", "int4")]
    if not dtypes:
        raise CommandError(f"{', '.join(args.dtypes)}: nothing is trained in these")
    model = _build(args)
    from accel_callbacks.engines.fsdp.units import find_units
    from accel_callbacks.models.memory_estimate import sharded_memory
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin

    shards = sizes["dp_shard"] * sizes["cp"] * sizes["sp"]
    units = [unit.modules for unit in find_units(model, FullyShardedDataParallelPlugin())]
    estimates = sharded_memory(model, shards, units, dtypes)
    always = ("dp_replicate", "dp_shard")
    mesh = {axis: size for axis, size in sizes.items() if axis in always or size > 1}
    if args.json:
        ranks = [{**vars(estimate), "total": estimate.total} for estimate in estimates]
        print(to_json({"model": args.model, "mesh": mesh, "processes": ranks}))
        return 0
    rows = [
        (
            estimate.dtype,
            estimate.masters,
            size_of(estimate.weights),
            size_of(estimate.gradients),
            size_of(estimate.optimizer),
            size_of(estimate.total),
            size_of(estimate.largest_unit),
        )
        for estimate in estimates
    ]
    head = ("DTYPE", "MASTERS", "WEIGHTS", "GRADIENTS", "OPTIMIZER", "TOTAL", "LARGEST UNIT")
    count = sum(parameter.numel() for parameter in model.parameters())
    shown = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    largest = f"Largest unit: {estimates[0].unit_name}." if shards > 1 else "Nothing is sharded."
    print(f"{args.model}: {count:,} parameters on {shown}, bytes of each process")
    print(f"{table(head, rows)}\n{largest}\n{_SHARDED_NOTES}")
    return 0


# --- the model ------------------------------------------------------------------------------


def _build(args: Namespace) -> torch.nn.Module:
    """Build the model without memory for its weights."""
    from accel_callbacks.models.empty_weights import init_empty_weights

    name = args.model
    with init_empty_weights():
        if ":" in name and os.sep not in name and "/" not in name and not Path(name).exists():
            return _from_factory(name)
        return _from_config(name, args.trust_remote_code)


def _from_factory(name: str) -> torch.nn.Module:
    """Import and call ``module:factory``, which is user code."""
    import torch

    folder = os.getcwd()
    sys.path.insert(0, folder)  # as `python -m` does
    try:
        member: Any = resolve_name(name)
        model = member if isinstance(member, torch.nn.Module) else member()
    except Exception as error:
        raise CommandError(f"{name} failed: {_first_line(error)}", 1) from error
    finally:
        sys.path.remove(folder)
    if not isinstance(model, torch.nn.Module):
        raise CommandError(f"{name} makes a {type(model).__name__}, not a torch.nn.Module")
    return model


def _from_config(name: str, trust: bool) -> torch.nn.Module:
    """Instantiate the model of a transformers config."""
    try:
        import transformers
    except ImportError as error:
        raise CommandError(
            f"a transformers config needs that package: pip install transformers ({error})"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust)
        return _of_config(transformers, config, trust)
    except Exception as error:  # old configs, and remote code, can raise anything
        raise CommandError(
            f"transformers makes no model of {name!r} (looked from {os.getcwd()}): give a folder "
            "with a config.json, a name on the hub, or module:factory. It says: "
            f"{type(error).__name__}: {_first_line(error)}",
            1,
        ) from error


def _of_config(transformers: Any, config: Any, trust: bool) -> torch.nn.Module:
    """Instantiate the class that the config names, which includes the head, or the base model."""
    for name in getattr(config, "architectures", None) or ():
        if (known := getattr(transformers, name, None)) is not None:
            return known(config)  # type: ignore[no-any-return]
    for auto in getattr(config, "auto_map", None) or {}:
        if auto.startswith("AutoModel") and (known := getattr(transformers, auto, None)):
            return known.from_config(config, trust_remote_code=trust)  # type: ignore[no-any-return]
    return transformers.AutoModel.from_config(config)  # type: ignore[no-any-return]


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
