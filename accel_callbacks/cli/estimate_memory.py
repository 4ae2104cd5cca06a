"""``accel estimate-memory``: estimate the memory of a model without allocating its weights."""

from __future__ import annotations

import json
import os
import shlex
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from accel_callbacks.cli.parser import CommandError, CommandParser, positive_int, suggestion
from accel_callbacks.plugins.parallelism import AXES, ParallelismConfig
from accel_callbacks.terminal_text import size_of, table, to_json

if TYPE_CHECKING:
    import torch

    from accel_callbacks.models.memory_estimate import MemoryEstimate, ModelSizes
    from accel_callbacks.models.offload import Plan, Weights
    from accel_callbacks.models.sharded_memory import ShardedMemory

PATIENCE = 3.0  # seconds for the hub to answer
POLICIES = ("auto", "sequential", "balanced", "balanced_low_0")
_PLANNED = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_STORED = (".safetensors", ".bin", ".pt", ".pth")
DTYPES = ("fp32", "fp16", "bf16", "int8", "int4")
_NOTES = """\
Inference: weights and buffers. Training with Adam: fp32 weights, gradients and two states; with
fp16 and bf16 (mixed precision) also the 16-bit copies of the weights that autocast makes.
Not counted: activations, which grow with the batch; temporary memory; torch itself."""

_PLAN_NOTES = """\
Reserve: the window of what is offloaded (its largest part twice: one runs, one is fetched), and
--activations. Parts on cpu and disk run on the first device. Not counted: torch itself."""

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
        "--kwargs",
        type=_keywords,
        default={},
        metavar="JSON",
        help="keyword arguments of the factory, as a JSON object",
    )
    parser.option(
        "--device",
        choices=["meta", "cpu"],
        default="meta",
        help="where the model is made: meta takes no memory (default); cpu for code that needs "
        "real numbers",
    )
    parser.option(
        "--trust_remote_code", action="store_true", help="run the code that comes with the config"
    )
    parser.option(
        "--parallelism",
        type=_axes,
        metavar="AXIS=N,...",
        help="bytes of each process on a mesh, such as dp_shard=8,dp_replicate=2 or tp=2",
    )
    parser.option(
        "--tp_plan",
        type=_keywords,
        metavar="JSON",
        help="plan of tensor parallelism, as a JSON object of patterns and styles (default: that "
        "of the model)",
    )
    parser.option(
        "--plan",
        action="store_true",
        help="print on which device each part is for inference, with the reason; the model may "
        "also be a folder, file or URL of weights, of which only the headers are read",
    )
    parser.option(
        "--max_memory",
        type=_memory,
        metavar="DEVICE=SIZE,...",
        help="for --plan: what each device may hold, such as 0=8GB,cpu=16GB (default: what is "
        "free here)",
    )
    parser.option(
        "--policy",
        choices=POLICIES,
        help="for --plan: how accelerators share what they hold whole (default: auto)",
    )
    parser.option("--activations", metavar="SIZE", help="for --plan: kept free to compute")
    parser.option(
        "--kv_cache",
        metavar="SIZE",
        help="for --plan: cache of keys and values, of all blocks",
    )
    parser.option("--every_unit", action="store_true", help="for --plan: a line for each part")
    parser.option("--json", action="store_true", help="print bytes as JSON")


def _keywords(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text!r} is not a JSON object such as '{{\"layers\": 2}}'")
    return value


def _memory(text: str) -> dict[int | str, str]:
    """Parse sizes by device."""
    sizes: dict[int | str, str] = {}
    for part in text.split(","):
        device, equals, size = (word.strip() for word in part.partition("="))
        if not (device and equals and size):
            raise ArgumentTypeError(f"{part.strip()!r} is not DEVICE=SIZE, such as 0=8GB")
        sizes[int(device) if device.isdecimal() else device] = size
    return sizes


def _axes(text: str) -> ParallelismConfig:
    """Parse the sizes of a mesh."""
    sizes: dict[str, Any] = {f"{axis}_size": 1 for axis in AXES}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        key = f"{name.strip().removesuffix('_size')}_size"
        if key not in sizes:
            raise ArgumentTypeError(f"there is no axis {name!r}{suggestion(name, AXES)}")
        sizes[key] = positive_int(number)
    nothing_shards = sizes["dp_shard_size"] == sizes["cp_size"] == 1
    if sizes["tp_size"] > 1 and sizes["dp_replicate_size"] > 1 and nothing_shards:
        raise ArgumentTypeError("tp does not go with dp_replicate alone: give a dp_shard")
    return ParallelismConfig(**sizes)


def run(args: Namespace) -> int:
    """Instantiate the model, by default on the meta device, and print its sizes."""
    if args.kwargs and not _is_factory(args.model):
        raise CommandError("--kwargs is for module:factory; a config defines its model itself")
    if args.plan:
        return _planned(args)
    for name in ("max_memory", "policy", "activations", "kv_cache", "every_unit"):
        if getattr(args, name):
            raise CommandError(f"--{name} is for --plan: add it")
    from_cache = _is_on_hub(args.model) and not _answers()
    if from_cache:  # before torch and transformers are imported, and transformers retries
        _require_cached(args.model)
    if args.tp_plan is not None and (args.parallelism is None or args.parallelism.tp_size == 1):
        raise CommandError("--tp_plan is for --parallelism with a tp above 1")
    if args.parallelism is not None:
        return _sharded(args, from_cache)
    from accel_callbacks.models.memory_estimate import model_sizes  # imports torch

    sizes = model_sizes(_make(args, from_cache), args.dtypes)
    print(_as_json(args.model, sizes) if args.json else _as_text(args.model, sizes))
    return 0


def _planned(args: Namespace) -> int:
    """Print on which device each part of the model is."""
    from accel_callbacks.models.offload import PlanError, plan
    from accel_callbacks.models.offload.budgets import get_max_memory

    if args.parallelism is not None:
        raise CommandError("--plan is for one process: leave --parallelism out")
    weights = _weights(args)
    if not any(unit.nbytes for unit in weights.units):
        raise CommandError(f"{args.model} has no parameters and no buffers: nothing to plan", 1)
    try:
        memory_plan = plan(
            weights,
            get_max_memory() if args.max_memory is None else args.max_memory,
            args.policy or "auto",
            activations=args.activations or 0,
            kv_cache=args.kv_cache or 0,
        )
    except PlanError as error:
        raise CommandError(str(error), 1) from error
    except ValueError as error:  # a device or a size
        raise CommandError(str(error)) from error
    if args.json:
        print(to_json(_plan_as_json(args.model, memory_plan)))
        return 0
    moved = f", of which {size_of(memory_plan.offloaded)} are fetched for each pass"
    print(f"{args.model}: {size_of(weights.nbytes)}{moved if memory_plan.offloaded else ''}")
    print(f"{memory_plan.table(every_unit=args.every_unit)}\n{_PLAN_NOTES}")
    return 0


def _weights(args: Namespace) -> Weights:
    """Return the sizes of a model, from the headers of its weights where there are any."""
    from accel_callbacks.models.offload import Weights
    from checkpoint_io import CheckpointError

    dtype = _PLANNED.get(args.dtypes[0]) if len(args.dtypes) == 1 else None
    if len(args.dtypes) == 1 and dtype is None:
        raise CommandError(f"--plan: {args.dtypes[0]} is not among {', '.join(_PLANNED)}")
    if _has_weights(args.model):
        try:
            return Weights.of_checkpoint(args.model, dtype)
        except (CheckpointError, OSError, ImportError) as error:
            raise CommandError(_first_line(error), 1) from error
    from_cache = _is_on_hub(args.model) and not _answers()
    if from_cache:
        _require_cached(args.model)
    return Weights.of_model(_make(args, from_cache), dtype=dtype)


def _has_weights(name: str) -> bool:
    """Return whether a name is that of stored weights, and not of a model's definition."""
    path = Path(name)
    if "://" in name:
        return True
    if path.is_dir():
        names = [file.name for file in path.iterdir()]
        return "config.json" not in names or any(name.endswith(_STORED) for name in names)
    return path.is_file() and (path.name.endswith(_STORED) or path.name.endswith(".index.json"))


def _plan_as_json(name: str, memory_plan: Plan) -> dict[str, Any]:
    """Return a plan in plain values."""
    return {
        "model": name,
        "bytes": memory_plan.weights.nbytes,
        "offloaded": memory_plan.offloaded,
        "execution_device": memory_plan.execution_device,
        "devices": [
            {**vars(use), "reserve": use.reserve, "left": use.left} for use in memory_plan.devices
        ],
        "units": [
            {"name": unit, "bytes": nbytes, "device": device, "reason": reason}
            for unit, _, nbytes, device, reason in memory_plan.runs(every_unit=True)
        ],
        "device_map": memory_plan.device_map,
    }


def _sharded(args: Namespace, from_cache: bool) -> int:
    """Print the sizes of the parts on each process."""
    from accel_callbacks.engines.fsdp.units import find_units
    from accel_callbacks.models.sharded_memory import sharded_memory
    from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin

    dtypes = [name for name in args.dtypes if name not in ("int8", "int4")]
    if not dtypes:
        raise CommandError(f"{', '.join(args.dtypes)}: nothing is trained in these")
    model = _make(args, from_cache)
    sizes = args.parallelism.sizes
    shards = sizes["dp_shard"] * sizes["cp"] * sizes["sp"]
    units = [unit.modules for unit in find_units(model, FullyShardedDataParallelPlugin())]
    plan = _plan(model, args) if sizes["tp"] > 1 else {}
    try:
        estimates = sharded_memory(
            model, shards, units, dtypes, tensor_parallel=sizes["tp"], plan=plan, stages=sizes["pp"]
        )
    except ValueError as error:
        raise CommandError(str(error), 1) from error
    always = ("dp_replicate", "dp_shard")
    mesh = {axis: size for axis, size in sizes.items() if axis in always or size > 1}
    if args.json:
        ranks = [{**vars(estimate), "total": estimate.total} for estimate in estimates]
        print(to_json({"model": args.model, "mesh": mesh, "processes": ranks}))
        return 0
    rows = [
        (estimate.dtype, estimate.masters, *(size_of(size) for size in _sizes(estimate)))
        for estimate in estimates
    ]
    head = ("DTYPE", "MASTERS", "WEIGHTS", "GRADIENTS", "OPTIMIZER", "TOTAL", "LARGEST UNIT")
    count = sum(parameter.numel() for parameter in model.parameters())
    shown = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    print(f"{args.model}: {count:,} parameters on {shown}, bytes of each process")
    largest = f"Largest unit: {estimates[0].unit_name}."
    if shards == 1:
        engine = ", layers are cut" if plan else ": DDP" if sizes["pp"] == 1 else ""
        largest = f"Nothing is sharded{engine}."
    if sizes["pp"] > 1:
        largest += " Each process has the layers of one stage; this is the largest."
    print(f"{table(head, rows)}\n{largest}\n{_SHARDED_NOTES}")
    return 0


def _plan(model: torch.nn.Module, args: Namespace) -> Mapping[str, Any]:
    """Return the plan that was given, or that the model brings along."""
    from accel_callbacks.engines.tensor.plan import plan_of, propose_plan

    if plan := args.tp_plan or plan_of(model):
        return plan
    try:
        proposal = f"--tp_plan {shlex.quote(json.dumps(propose_plan(model)))} goes by usual names"
    except ValueError as error:
        proposal = f"give one with --tp_plan ({error})"
    raise CommandError(
        f"{args.model} has no plan of tensor parallelism, to say how layers are cut: {proposal}",
        1,
    )


def _sizes(estimate: ShardedMemory) -> tuple[int, ...]:
    return (
        estimate.weights,
        estimate.gradients,
        estimate.optimizer,
        estimate.total,
        estimate.largest_unit,
    )


# --- the model ------------------------------------------------------------------------------


def _is_factory(name: str) -> bool:
    """Return whether a name is ``module:factory``, not a path or a name on the hub."""
    return ":" in name and "/" not in name and os.sep not in name and not Path(name).exists()


def _is_on_hub(name: str) -> bool:
    """Return whether a name can only be that of a model on the hub."""
    path = Path(name)
    if _is_factory(name) or path.exists():
        return False
    if path.is_absolute() or name.startswith(".") or path.suffix in (".json", ".py"):
        raise CommandError(f"no file or folder {name!r} (looked from {os.getcwd()})")
    return True


def _hub() -> str:
    """Return the URL of the hub."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _answers() -> bool:
    """Return whether the hub answers, through a proxy too, before the patience ends."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answered: Queue[bool] = Queue()

    def ask() -> None:
        try:
            with urlopen(Request(_hub(), method="HEAD"), timeout=PATIENCE):
                answered.put(True)
        except HTTPError:
            answered.put(True)
        except (OSError, ValueError):
            answered.put(False)

    # In a thread, because a timeout does not cover the lookup of the name.
    Thread(target=ask, name="ask-hub", daemon=True).start()
    try:
        return answered.get(timeout=PATIENCE)
    except Empty:
        return False


def _require_cached(name: str) -> None:
    """Raise CommandError if the hub's cache on this machine has no config of a model."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return  # transformers is missing too, which is reported later
    with suppress(ValueError):  # no valid name of a model
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    raise CommandError(
        f"{name!r} is no file or folder here (looked from {os.getcwd()}), {_hub()} does not answer "
        "(or HF_HUB_OFFLINE is set), and its cache on this machine has no such model: give a local "
        "folder or config.json, or module:factory",
        1,
    )


def _make(args: Namespace, from_cache: bool) -> torch.nn.Module:
    """Instantiate the model."""
    import torch

    with torch.device(args.device):
        if _is_factory(args.model):
            return _from_factory(args.model, args.kwargs, args.device)
        return _from_config(args.model, args.trust_remote_code, from_cache)


def _from_factory(name: str, kwargs: Mapping[str, Any], device: str) -> torch.nn.Module:
    """Import and call ``module:factory``, which is user code."""
    import torch

    module_name, _, path = name.partition(":")
    with _importing_from_here():
        try:
            member: Any = import_module(module_name)
        except Exception as error:
            raise CommandError(f"cannot import {module_name!r}: {_first_line(error)}") from error
        for part in path.split("."):
            if not hasattr(member, part):
                hint = suggestion(part, dir(member))
                raise CommandError(f"{module_name!r} has no {path!r}{hint}")
            member = getattr(member, part)
        try:
            model = member if isinstance(member, torch.nn.Module) else member(**kwargs)
        except Exception as error:
            advice = "; if it needs real numbers, add --device cpu" if device == "meta" else ""
            raise CommandError(f"{name} failed: {_first_line(error)}{advice}", 1) from error
    if not isinstance(model, torch.nn.Module):
        raise CommandError(f"{name} makes a {type(model).__name__}, not a torch.nn.Module")
    return model


@contextmanager
def _importing_from_here() -> Iterator[None]:
    """Import from the working directory too, as ``python -m`` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def _from_config(name: str, trust: bool, from_cache: bool) -> torch.nn.Module:
    """Instantiate the model of a transformers config."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise CommandError(f"{name} has no config.json: name the folder of a transformers model")
    try:
        import transformers
    except ImportError as error:
        raise CommandError(
            f"a transformers config needs that package: pip install transformers ({error})"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            name, trust_remote_code=trust, local_files_only=from_cache
        )
        return _of_config(transformers, config, trust)
    except OSError as error:
        raise CommandError(_unread(name, path, error), 1) from error
    except Exception as error:  # old configs, and remote code, can raise anything
        raise CommandError(
            f"transformers makes no model of {name}: {type(error).__name__}: {_first_line(error)}",
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


def _unread(name: str, path: Path, error: OSError) -> str:
    """Describe why the config cannot be read."""
    if path.exists():
        return f"transformers cannot read {name}: {_first_line(error)}"
    return (
        f"{name!r} is no file or folder here, and the hub did not give its config (no such model, "
        "or no access): give a local folder or config.json, or module:factory. "
        f"transformers says: {_first_line(error)}"
    )


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


# --- the output -----------------------------------------------------------------------------


def _as_text(name: str, sizes: ModelSizes) -> str:
    """Return the table with notes."""
    rows = [
        (
            estimate.dtype,
            size_of(estimate.weights),
            size_of(estimate.largest_layer),
            "-" if estimate.training is None else size_of(estimate.training.total),
        )
        for estimate in sizes.estimates.values()
    ]
    head = ("DTYPE", "INFERENCE", "LARGEST LAYER", "TRAINING")
    frozen = sizes.parameters - sizes.trainable
    held = f"{sizes.parameters:,} parameters" + (f", {frozen:,} of them frozen" if frozen else "")
    named = ", ".join(dict.fromkeys(e.layer_name for e in sizes.estimates.values()))
    return f"{name}: {held}\n{table(head, rows)}\nLargest layer: {named}.\n{_NOTES}"


def _as_json(name: str, sizes: ModelSizes) -> str:
    """Return every number in bytes."""
    return to_json(
        {
            "model": name,
            "parameters": sizes.parameters,
            "trainable": sizes.trainable,
            "buffers": sizes.buffers,
            "counts_activations": False,
            "dtypes": {e.dtype: _plain(e) for e in sizes.estimates.values()},
        }
    )


def _plain(estimate: MemoryEstimate) -> dict[str, Any]:
    parts = estimate.training
    return {
        "inference": estimate.weights,
        "largest_layer": estimate.largest_layer,
        "largest_layer_name": estimate.layer_name,
        "training": None if parts is None else {**vars(parts), "total": parts.total},
    }
