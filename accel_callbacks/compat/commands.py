"""Names of ``accelerate.commands``: what reads and runs each command, and config files."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_callbacks.cli import main as accel
from accel_callbacks.cli.config import defaults
from accel_callbacks.cli.parser import CommandError, CommandParser
from accel_callbacks.cli.registry import COMMANDS
from accel_callbacks.cli.to_fsdp2 import fsdp2_values
from accel_callbacks.launch.config_file import default_path, read_config, write_config
from accel_callbacks.launch.machine import detect_machine

__all__ = [
    "BaseConfig",
    "ClusterConfig",
    "SageMakerConfig",
    "config_command",
    "convert_config_to_fsdp2",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "env_command",
    "env_command_parser",
    "estimate_command",
    "estimate_command_parser",
    "get_config_parser",
    "launch_command",
    "launch_command_parser",
    "load_config_from_file",
    "main_of",
    "merge_command",
    "merge_command_parser",
    "test_command",
    "test_command_parser",
    "to_fsdp2_command",
    "to_fsdp2_command_parser",
    "write_basic_config",
]

default_config_file = str(default_path(os.environ))
default_json_config_file = default_yaml_config_file = default_config_file


class BaseConfig:
    """The values of a config file, as attributes.

    Args:
        **values: by their keys in the file.
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        """Return the values by their keys."""
        return dict(vars(self))

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write them to a file, as JSON if its name ends so."""
        write_config(yaml_file, self.to_dict())

    to_json_file = to_yaml_file


class ClusterConfig(BaseConfig):
    """Those of machines of one's own."""


class SageMakerConfig(BaseConfig):
    """Those of SageMaker, which can be read, and not launched."""


def load_config_from_file(config_file: str | None) -> BaseConfig:
    """Return the values of a config file, the default one if None."""
    values = read_config(_require_file(config_file or default_config_file))
    on_sagemaker = values.get("compute_environment") == "AMAZON_SAGEMAKER"
    return (SageMakerConfig if on_sagemaker else ClusterConfig)(**values)


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config file for FSDP1 as those of one for FSDP2."""
    return fsdp2_values(config, "the config")[0]


def _require_file(config_file: str) -> str:
    if not os.path.lexists(os.path.expanduser(config_file)):
        raise FileNotFoundError(
            f"the config file {config_file} does not exist: `accel config` writes one."
        )
    return config_file


def write_basic_config(
    mixed_precision: str = "no", save_location: str = default_config_file
) -> Path | bool:
    """Write a config file that fits this machine.

    Args:
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        save_location: path of the file.

    Returns:
        The path, False if there is such a file already, which stays.
    """
    if Path(save_location).exists():
        print(f"{save_location} is there already, and stays: pass another save_location.")
        return False
    return write_config(save_location, defaults(detect_machine(os.environ), mixed_precision))


def main_of(subcommand: str, whole_process: bool = False) -> Callable[[], None]:
    """Return a function that runs ``accel`` on the arguments of this process.

    Where the command fails, the function raises ``SystemExit`` with its exit code.

    Args:
        subcommand: the one that reads them; if empty, the first of them is its name.
        whole_process: whether this process is only the command, which may replace it.
    """

    def main() -> None:
        words = [*filter(None, [subcommand]), *sys.argv[1:]]
        if whole_process:
            sys.argv[1:] = words
        code = accel.main(None if whole_process else words)
        if code:
            raise SystemExit(code)

    return main


def _functions(subcommand: str) -> tuple[Callable[..., CommandParser], Callable[..., None]]:
    """Return what makes the parser of a subcommand, and what runs the arguments that it reads."""

    def command_parser(subparsers: Any = None) -> CommandParser:
        entry = COMMANDS[subcommand]
        parser = CommandParser(prog=f"accel {subcommand}", description=entry.help)
        entry.load().configure(parser)
        if subparsers is not None:  # of a command line that has it as a subcommand
            options = {"parents": [parser], "add_help": False, "conflict_handler": "resolve"}
            parser = subparsers.add_parser(subcommand, **options)
            parser.set_defaults(func=command)
        return parser

    def command(args: argparse.Namespace) -> None:
        if hasattr(args, "as_accelerate"):  # its processes stand in too
            args.as_accelerate = True
        if getattr(args, "config_file", None) and subcommand != "config":
            _require_file(args.config_file)
        try:
            code = COMMANDS[subcommand].load().run(args)
        except CommandError as error:  # a script gets what it knows, and not the end of a command
            exists = isinstance(error.__cause__, FileExistsError)
            raise (FileExistsError if exists else ValueError)(str(error)) from None
        if code:
            raise SystemExit(code)

    return command_parser, command


env_command_parser, env_command = _functions("env")
estimate_command_parser, estimate_command = _functions("estimate-memory")
get_config_parser, config_command = _functions("config")
launch_command_parser, launch_command = _functions("launch")
merge_command_parser, merge_command = _functions("merge-weights")
test_command_parser, test_command = _functions("test")
to_fsdp2_command_parser, to_fsdp2_command = _functions("to-fsdp2")
