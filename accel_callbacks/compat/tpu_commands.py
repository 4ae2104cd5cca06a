"""``accelerate tpu-config``: commands that run on all machines of a TPU, by gcloud."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

from accel_callbacks.compat.commands import default_config_file, load_config_from_file

__all__ = ["tpu_command_launcher", "tpu_command_parser"]

_NAME = "tpu-config"
_ABOUT = "Run commands on all machines of a TPU, before accel launch."
_DEVELOPMENT = "git+https://github.com/huggingface/accelerate.git"


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of the options.

    Args:
        subparsers: of a command line that has it as a subcommand.
    """
    if subparsers is None:
        parser = argparse.ArgumentParser(_NAME, description=_ABOUT)
    else:
        parser = subparsers.add_parser(_NAME, description=_ABOUT)
        parser.set_defaults(func=tpu_command_launcher)
    parser.add_argument("--config_file", help="the file that has what is not given here")
    parser.add_argument("--tpu_name", help="name of the TPU")
    parser.add_argument("--tpu_zone", help="zone of the TPU")
    parser.add_argument("--use_alpha", action="store_true", help="call gcloud alpha")
    parser.add_argument("--command_file", help="file with a command on each line")
    parser.add_argument("--command", action="append", nargs="+", help="one command; repeatable")
    parser.add_argument(
        "--install_accelerate", action="store_true", help="install Accelerate on them first"
    )
    parser.add_argument(
        "--accelerate_version", default="latest", help="of Accelerate: a version, latest or dev"
    )
    parser.add_argument("--debug", action="store_true", help="print the call, and make it not")
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the commands on all machines.

    Args:
        args: of the parser; what they leave out, a config file may have.

    Raises:
        ValueError: there is no command, or no name or zone.
        FileNotFoundError: gcloud is not installed, or a file is not there.
        subprocess.CalledProcessError: a command failed.
    """
    config: dict[str, Any] = {}
    if args.config_file is not None or os.path.isfile(default_config_file):
        config = load_config_from_file(args.config_file).to_dict()
    command = [
        *("gcloud", *(["alpha"] if args.use_alpha else []), "compute", "tpus", "tpu-vm", "ssh"),
        *(_value_of(args, config, "tpu_name"), "--zone", _value_of(args, config, "tpu_zone")),
        *("--command", "; ".join(_lines(args, config)), "--worker", "all"),
    ]
    if args.debug:
        print(f"Running {' '.join(command)}")
        return
    subprocess.run(command, check=True)
    print("All machines of the TPU have run the commands.")


def _value_of(args: argparse.Namespace, config: dict[str, Any], name: str) -> str:
    value = getattr(args, name) or config.get(name)
    if not value:
        raise ValueError(f"the TPU is not known: give --{name}, or {name} in the config file.")
    return str(value)


def _lines(args: argparse.Namespace, config: dict[str, Any]) -> list[str]:
    """Return the commands: of the arguments, else of the config file."""
    file, given = args.command_file, args.command
    if not file and not given:
        file, given = config.get("command_file"), config.get("commands")
    lines = Path(file).read_text().splitlines() if file else _flat(given or [])
    if not lines:
        raise ValueError("there is no command to run: give --command or --command_file.")
    version = args.accelerate_version
    known = {"latest": "accelerate -U", "dev": _DEVELOPMENT}
    install = f"pip install {known.get(version, f'accelerate=={version}')}"
    return ["cd /usr/share", *([install] if args.install_accelerate else []), *lines]


def _flat(commands: list[Any]) -> list[str]:
    """Return the words of ``--command``, which is a list for each, as one list."""
    lists = (one if isinstance(one, list) else [one] for one in commands)
    return [line for one in lists for line in one]
