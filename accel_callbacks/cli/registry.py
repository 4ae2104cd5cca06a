"""Table of the subcommands: name, module and help line."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from accel_callbacks.cli.parser import CommandParser


class CommandModule(Protocol):
    """Interface of a subcommand's module; importing it must not import torch."""

    def configure(self, parser: CommandParser) -> None:
        """Add the options of the subcommand to its parser."""

    def run(self, args: Namespace) -> int:
        """Run the subcommand and return the exit code."""


@dataclass(frozen=True)
class Command:
    """Module of a subcommand, and its line in ``accel --help``."""

    module: str
    help: str

    def load(self) -> CommandModule:
        """Import the module, lazily: other subcommands should not pay for its imports."""
        return cast(CommandModule, import_module(self.module))


COMMANDS: Mapping[str, Command] = {
    "ckpt": Command("accel_callbacks.cli.ckpt", "list, verify and remove checkpoints"),
    "config": Command("accel_callbacks.cli.config", "write, update and show the config file"),
    "ctl": Command("accel_callbacks.cli.ctl", "save, evaluate, stop or set in a run that goes on"),
    "data": Command("accel_callbacks.cli.data", "show the samples of a step of a run"),
    "env": Command("accel_callbacks.cli.env", "print versions and devices, to paste in a report"),
    "estimate-memory": Command(
        "accel_callbacks.cli.estimate_memory", "print how much memory a model takes, by dtype"
    ),
    "launch": Command("accel_callbacks.cli.launch", "start a script on one or more processes"),
    "merge-weights": Command(
        "accel_callbacks.cli.merge_weights", "turn a sharded checkpoint into safetensors files"
    ),
    "replay": Command("accel_callbacks.cli.replay", "run a past step of a run again, bit by bit"),
    "report": Command(
        "accel_callbacks.cli.report", "print what runs did with their time, or write a page"
    ),
    "runs": Command("accel_callbacks.cli.runs", "list runs, and what differs between them"),
    "test": Command("accel_callbacks.cli.test", "check what is installed on what is configured"),
    "to-fsdp2": Command(
        "accel_callbacks.cli.to_fsdp2", "turn a config file for FSDP1 into FSDP2's"
    ),
    "watch": Command("accel_callbacks.cli.watch", "show in a terminal how a run goes on"),
    "migrate": Command("accel_callbacks.cli.migrate", "move a script from accelerate to us"),
    "compat": Command(
        "accel_callbacks.cli.compat", "list what sources use of accelerate, and what of it is here"
    ),
}
