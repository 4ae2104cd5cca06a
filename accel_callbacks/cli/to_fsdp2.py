"""``accel to-fsdp2``: turn a config file for FSDP1 into one for FSDP2."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_callbacks.cli.config import nested
from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.compat.foreign_settings import to_fsdp2
from accel_callbacks.launch.config_file import expanded, read_config, values_of, write_config
from accel_callbacks.plugins.option import SettingsError

_BLOCKS = ("fsdp_config", "parallelism_config")


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel to-fsdp2``."""
    parser.option("--config_file", metavar="FILE", required=True, help="the file to convert")
    parser.option(
        "--output_file", metavar="FILE", help="where to write; default with --overwrite: in place"
    )
    parser.option("--overwrite", action="store_true", help="replace a file that is there")


def run(args: Namespace) -> int:
    """Convert the blocks of FSDP and of the mesh; all other keys stay as they are."""
    if not (args.overwrite or args.output_file):
        raise CommandError("give --output_file, or --overwrite to convert the file in place")
    target = expanded(args.output_file or args.config_file)
    if os.path.lexists(target) and not args.overwrite:
        text = f"{target} already exists: --overwrite replaces it"
        raise CommandError(text, exit_code=1) from FileExistsError(text)
    try:
        return _convert(args.config_file, target)
    except SettingsError as error:
        raise CommandError(str(error)) from None


def fsdp2_values(before: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a file for FSDP2, and a line for each that changed.

    Args:
        before: those for FSDP1.
        source: what errors call the file.
    """
    values, _ = values_of(before, source)
    values, lines = to_fsdp2(values)
    after = nested(values)
    blocks = {name: after[name] for name in _BLOCKS if name in after}
    if "fsdp_config" not in blocks:
        return dict(before), [f"{source} has no fsdp_config: nothing to convert", *lines]
    return {**before, **blocks}, lines


def _convert(source: str, target: Path) -> int:
    values, lines = fsdp2_values(read_config(source), source)
    print("".join(f"{line}\n" for line in lines), end="")
    print(f"wrote {write_config(target, values)}; comments are not kept")
    return 0
