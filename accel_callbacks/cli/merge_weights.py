"""``accel merge-weights``: convert any sharded checkpoint to plain safetensors files."""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace

from accel_callbacks.cli.parser import CommandError, CommandParser, natural_int
from accel_callbacks.utils.text import printable, size_of

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel merge-weights``."""
    parser.add_argument(
        "source",
        help="a checkpoint of ours or of torch.distributed.checkpoint, a folder or index of "
        "safetensors or torch shards, or one such file: a local path or any fsspec URL",
    )
    parser.add_argument("destination", help="folder for the files: a local path or any fsspec URL")
    parser.option("--dtype", choices=list(_DTYPES), help="convert floating-point tensors")
    parser.option(
        "--max_shard_size",
        default="5GB",
        metavar="SIZE",
        help="largest file, such as 5GB (default) or 500MiB; what fits is one file",
    )
    parser.option("--overwrite", action="store_true", help="replace a model that is there")
    parser.option(
        "--model_index",
        type=natural_int,
        default=0,
        metavar="N",
        help="which model of a checkpoint that holds several (default: 0)",
    )
    parser.option(
        "--part",
        metavar="KEYS",
        help="which part of a state of torch.distributed.checkpoint, such as app.model "
        "(default: its model)",
    )
    parser.option(
        "--storage_option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the fsspec drivers; the value may be JSON; give it several times",
    )


def run(args: Namespace) -> int:
    """Merge the weights, and print what was written."""
    import torch

    from accel_callbacks.cli.ckpt_actions import storage_options
    from checkpoint_io import CheckpointError, CheckpointWarning
    from checkpoint_io.weights import merge_weights

    if args.destination.endswith((".safetensors", ".bin", ".json")):
        raise CommandError(f"{args.destination} is the name of a file: name a folder")
    options = storage_options(args.storage_option)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        try:
            merged = merge_weights(
                args.source,
                args.destination,
                dtype=getattr(torch, _DTYPES[args.dtype]) if args.dtype else None,
                max_shard_size=args.max_shard_size,
                overwrite=args.overwrite,
                model_index=args.model_index,
                part=args.part,
                storage_options=options,
            )
        except (CheckpointError, OSError, ImportError, ValueError, MemoryError) as error:
            raise CommandError(printable(str(error) or type(error).__name__), 1) from error
        finally:
            for warning in caught:
                if issubclass(warning.category, CheckpointWarning):
                    print(printable(f"accel merge-weights: {warning.message}"), file=sys.stderr)
    if merged.skipped:
        names = ", ".join(merged.skipped[:5])
        print(printable(f"not tensors, left out: {names}"), file=sys.stderr)
    tied = f", {merged.tied} tied names" if merged.tied else ""
    files = merged.files if len(merged.files) < 4 else [merged.files[0], "...", merged.files[-1]]
    print(
        f"{merged.tensors} tensors{tied}, {size_of(merged.nbytes)} in {args.destination}: "
        f"{', '.join(files)}"
    )
    return 0
