"""``accel merge-weights``: convert any sharded checkpoint to plain safetensors files."""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from accel_callbacks.cli.parser import CommandError, CommandParser, natural_int
from accel_callbacks.terminal_text import printable, size_of
from checkpoint_io.local_files import split_path

_CONFIG = "config.json"
_FILES = (
    *(_CONFIG, "generation_config.json", "preprocessor_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt"),
)
_LEVELS = 3  # the checkpoint, its folder, and the project
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
        "--config",
        metavar="PATH",
        help="config.json of a transformers model, or a folder with it, for from_pretrained "
        "(default: that of the checkpoint, or of a folder around it)",
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

    from accel_callbacks.checkpoint.tensor_file import save_text
    from accel_callbacks.cli.ckpt_actions import storage_options
    from checkpoint_io import CheckpointError, CheckpointWarning
    from checkpoint_io.weights import merge_weights

    if args.destination.endswith((".safetensors", ".bin", ".json")):
        raise CommandError(f"{args.destination} is the name of a file: name a folder")
    options = storage_options(args.storage_option)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        try:
            configuration = _configuration(args, options)
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
    for name, text in (configuration or {}).items():
        save_text(text, f"{args.destination.rstrip('/')}/{name}", options)
    if merged.skipped:
        names = ", ".join(merged.skipped[:5])
        print(printable(f"not tensors, left out: {names}"), file=sys.stderr)
    tied = f", {merged.tied} tied names" if merged.tied else ""
    files = merged.files if len(merged.files) < 4 else [merged.files[0], "...", merged.files[-1]]
    print(
        f"{merged.tensors} tensors{tied}, {size_of(merged.nbytes)} in {args.destination}: "
        f"{', '.join([*files, *(configuration or ())])}"
    )
    if configuration is None:
        print(
            "no config.json is in the checkpoint or around it: for from_pretrained of "
            "transformers, copy that of the model into the folder, or give --config PATH",
            file=sys.stderr,
        )
    return 0


def _configuration(args: Namespace, options: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the files of a transformers model by name: given, saved with the checkpoint, or near.

    Empty if the checkpoint is of another kind of model, or the destination has the files; None if
    that is not known.

    Raises:
        CommandError: there is none where ``--config`` says.
    """
    from checkpoint_io import CheckpointError, open_checkpoint

    if args.config is not None:
        if not (files := _files_in(args.config.removesuffix(_CONFIG) or ".", options)):
            raise CommandError(f"--config {args.config}: there is no {_CONFIG} of transformers")
        return files
    present = bool(_files_in(args.destination, options))
    if present and not args.overwrite:
        return {}
    try:
        state = open_checkpoint(args.source, storage_options=options).state
    except (CheckpointError, OSError, ImportError, ValueError):
        state = {}  # of another format; if it is damaged, the merge says so
    if saved := state.get("model_files", {}).get(str(args.model_index)):
        return {**_files_in(args.source, options), **saved}
    if "classes" in state:  # the save would have written those of a model that has some
        return {}
    folder = args.source
    for _ in range(_LEVELS):
        if files := _files_in(folder, options):
            return files
        folder = split_path(folder)[0]
    return {} if present else None


def _files_in(folder: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the files of a transformers model in a folder by name; none without its config."""
    from fsspec.core import url_to_fs

    filesystem, root = url_to_fs(folder, **options)
    files = {}
    for name in _FILES:
        path = f"{root.rstrip('/')}/{name}"
        if filesystem.isfile(path):
            files[name] = filesystem.cat_file(path).decode()
        elif name == _CONFIG:
            return {}
    # The project of a run may have a config.json of its own.
    return files if '"model_type"' in files[_CONFIG] else {}
