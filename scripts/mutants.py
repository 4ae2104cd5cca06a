"""Change one place of the code at a time, and see whether the nearest tests notice.

    python scripts/mutants.py                            # all rooms
    python scripts/mutants.py --rooms window votes       # some
    python scripts/mutants.py --quick                    # without tests that start processes
    python scripts/mutants.py --again                    # once more those that survived so far

Each *mutant* is one change: ``<`` becomes ``<=``, ``and`` becomes ``or``, a statement is left out,
an ``if`` is always taken. It is *killed* if a test fails or hangs, and *survives* otherwise: then a
test is missing, or the change makes no difference that matters. ``_ROOMS`` says which files are
changed and which tests are the nearest. The sample is drawn with a seed, at most one mutant from a
line. Error texts, warnings, annotations and docstrings are left alone.

A first run of a room's tests notes which functions each test enters. A mutant then runs only the
tests that enter its function, and those that start processes, whose insides are not seen. Each runs
in a fork of a process that has imported torch already, with a time limit.

Results are appended to a file (``--out``), one JSON document a line; a run that was interrupted
continues after the last. Set the verdict of a survivor that makes no difference to ``explained``,
and ``by`` to the reason: it is counted apart, and ``--again`` leaves it out.

Needs git, Linux and the right to make namespaces (root): a mutant may remove the wrong files and
signal the wrong processes, so it sees no other processes, and can write to nothing but a copy of
the working tree.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
SEED, COUNT = 20, 22
SPARE_SECONDS = 30.0  # above twice the time that the tests of a mutant took without it

# Where a wrong result hurts: the files that are changed, and the tests that are run.
_ROOMS = """
window
    accel_callbacks/loop/gradient_window.py
    accel_callbacks/loop/accumulation.py
    accel_callbacks/loop/own_batches.py
    accel_callbacks/plugins/gradient_accumulation.py
    tests/accel_callbacks/loop/test_accumulation.py
    tests/accel_callbacks/loop/test_own_batches.py
    tests/accel_callbacks/loop/test_step.py
    tests/accel_callbacks/plugins/test_plugins.py
    tests/accel_callbacks/loop/test_accumulation_ranks.py
    tests/accel_callbacks/data/test_data_ranks.py
scaler
    accel_callbacks/precision/fp16.py
    accel_callbacks/precision/base.py
    accel_callbacks/optimizer.py
    tests/accel_callbacks/precision/test_precision.py
    tests/accel_callbacks/test_optimizer_scheduler.py
    tests/accel_callbacks/loop/test_step.py
    tests/accel_callbacks/loop/test_accumulation.py
    tests/accel_callbacks/loop/test_first_steps.py
    tests/accel_callbacks/callbacks/test_non_finite.py
    tests/accel_callbacks/models/test_forward_methods.py
    tests/accel_callbacks/models/test_fp8.py
    tests/accel_callbacks/plugins/test_plugins.py
clipping
    accel_callbacks/loop/step.py
    accel_callbacks/gradients.py
    accel_callbacks/strategy/gradients.py
    accel_callbacks/callbacks/gradient_norm.py
    tests/accel_callbacks/loop/test_step.py
    tests/accel_callbacks/loop/test_accumulation.py
    tests/accel_callbacks/callbacks/test_gradient_norm.py
    tests/accel_callbacks/loop/test_step_ranks.py
    tests/accel_callbacks/precision/test_precision.py
    tests/accel_callbacks/callbacks/test_non_finite.py
    tests/accel_callbacks/plugins/test_plugins.py
    tests/accel_callbacks/loop/test_accumulation_ranks.py
    tests/accel_callbacks/loop/test_hooks.py
    tests/accel_callbacks/engines/ddp/test_ddp_options.py
    tests/accel_callbacks/checkpoint/test_restore.py
order
    accel_callbacks/data/order.py
    accel_callbacks/data/sampler.py
    accel_callbacks/data/shard.py
    tests/accel_callbacks/data/test_generators.py
    tests/accel_callbacks/data/test_order.py
    tests/accel_callbacks/data/test_sampler.py
    tests/accel_callbacks/data/test_shard.py
    tests/accel_callbacks/data/test_loader.py
    tests/accel_callbacks/data/test_order_ranks.py
resume
    accel_callbacks/checkpoint/restore.py
    accel_callbacks/checkpoint/compatibility.py
    accel_callbacks/data/loader.py
    accel_callbacks/distributed/rng.py
    accel_callbacks/loop/run_identity.py
    tests/accel_callbacks/checkpoint/test_restore.py
    tests/accel_callbacks/checkpoint/test_checkpointer.py
    tests/accel_callbacks/checkpoint/test_selection.py
    tests/accel_callbacks/data/test_skip.py
    tests/accel_callbacks/loop/test_run_identity.py
    tests/accel_callbacks/checkpoint/test_restore_ranks.py
    tests/accel_callbacks/checkpoint/test_trainable_only.py
    tests/accel_callbacks/loop/test_run.py
    tests/accel_callbacks/test_siblings.py
    tests/accel_callbacks/test_nothing_hidden.py
    tests/accel_callbacks/distributed/test_process.py
gather
    accel_callbacks/collectives/tensors.py
    accel_callbacks/collectives/metrics.py
    accel_callbacks/collectives/nested.py
    accel_callbacks/collectives/objects.py
    tests/accel_callbacks/collectives/test_collectives.py
    tests/compat/test_operations.py
    tests/accel_callbacks/collectives/test_collectives_ranks.py
    tests/accel_callbacks/collectives/test_metrics.py
votes
    accel_callbacks/distributed/votes.py
    accel_callbacks/loop/step_boundary.py
    accel_callbacks/callbacks/preemption.py
    accel_callbacks/distributed/failures.py
    tests/accel_callbacks/distributed/test_votes.py
    tests/accel_callbacks/callbacks/test_preemption.py
    tests/accel_callbacks/distributed/test_votes_ranks.py
    tests/accel_callbacks/loop/test_hooks_fail.py
    tests/accel_callbacks/callbacks/test_preemption_ranks.py
    tests/accel_callbacks/distributed/test_process.py
streams
    accel_callbacks/data/stream.py
    tests/accel_callbacks/data/test_stream.py
    tests/accel_callbacks/data/test_stream_draws.py
    tests/accel_callbacks/data/test_stream_ranks.py
shares
    accel_callbacks/loop/input_checksums.py
    accel_callbacks/loop/local_metrics.py
    tests/mistakes/test_shares.py
leases
    accel_callbacks/checkpoint/folder_leases.py
    checkpoint_io/storage/lease.py
    tests/checkpoint_io/test_lease.py
    tests/accel_callbacks/checkpoint/test_folder_leases.py
    tests/accel_callbacks/checkpoint/test_folder_leases_ranks.py
agreement
    accel_callbacks/engines/rank_agreement.py
    accel_callbacks/engines/fsdp/unit_agreement.py
    accel_callbacks/engines/replica_agreement.py
    tests/accel_callbacks/engines/test_rank_agreement.py
    tests/accel_callbacks/engines/test_replica_agreement.py
    tests/accel_callbacks/engines/fsdp/test_unit_agreement.py
    tests/mistakes/test_ranks_agree.py
    tests/accel_callbacks/engines/fsdp/test_one_rank_forward.py
    tests/accel_callbacks/engines/pipeline/test_pipeline_ranks.py
    tests/accel_callbacks/engines/tensor/test_tensor_parallel.py
copies
    checkpoint_io/async_save/staging.py
    checkpoint_io/async_save/background.py
    tests/checkpoint_io/test_snapshot.py
    tests/checkpoint_io/test_background.py
    tests/checkpoint_io/test_saving_thread.py
pipeline
    accel_callbacks/engines/pipeline/stages.py
    accel_callbacks/engines/pipeline/rehearsal.py
    tests/accel_callbacks/engines/pipeline/test_pipeline_stages.py
    tests/accel_callbacks/engines/pipeline/test_pipeline.py
    tests/accel_callbacks/engines/pipeline/test_pipeline_models.py
retention
    checkpoint_io/folder/retention.py
    checkpoint_io/folder/removal.py
    accel_callbacks/callbacks/checkpoint.py
    tests/checkpoint_io/test_retention.py
    tests/checkpoint_io/test_folder.py
    tests/accel_callbacks/callbacks/test_checkpoint.py
    tests/accel_callbacks/callbacks/test_builtin.py
    tests/accel_callbacks/callbacks/test_preemption.py
    tests/accel_callbacks/loop/test_evaluate_checkpoint.py
    tests/accel_callbacks/checkpoint/test_async_save.py
    tests/accel_callbacks/callbacks/test_interval.py
commit
    checkpoint_io/saver/commit.py
    checkpoint_io/saver/save.py
    checkpoint_io/saver/writer.py
    checkpoint_io/format/manifest.py
    checkpoint_io/storage/local_write.py
    tests/checkpoint_io/test_job.py
    tests/checkpoint_io/test_round_trip.py
    tests/checkpoint_io/test_local_engine.py
    tests/checkpoint_io/test_verify.py
    tests/checkpoint_io/test_sharded_save.py
    tests/faults/test_disk.py
    tests/faults/test_two_jobs.py
    tests/checkpoint_io/test_second_read.py
    tests/checkpoint_io/test_hostile.py
    tests/checkpoint_io/test_faults.py
fallback
    checkpoint_io/folder/discovery.py
    checkpoint_io/folder/folder.py
    checkpoint_io/loader/verify.py
    accel_callbacks/checkpoint/open.py
    tests/checkpoint_io/test_folder.py
    tests/checkpoint_io/test_lazy_manifest.py
    tests/checkpoint_io/test_verify.py
    tests/accel_callbacks/checkpoint/test_restore.py
    tests/accel_callbacks/checkpoint/test_project.py
    tests/checkpoint_io/test_second_read.py
    tests/accel_callbacks/loop/test_run.py
    tests/accel_callbacks/checkpoint/test_folder_ranks.py
trackers
    accel_callbacks/tracking/trackers.py
    loggers/hub.py
    loggers/queue.py
    loggers/worker.py
    loggers/trackers/csv.py
    loggers/trackers/jsonl.py
    tests/accel_callbacks/tracking/test_trackers.py
    tests/loggers/test_hub.py
    tests/loggers/test_isolation.py
    tests/loggers/test_threads.py
    tests/loggers/test_csv.py
    tests/loggers/test_jsonl.py
    tests/loggers/test_contract.py
    tests/loggers/test_media.py
    tests/loggers/test_registry.py
averaging
    accel_callbacks/callbacks/weight_averaging.py
    accel_callbacks/callbacks/averaged_weights.py
    tests/accel_callbacks/callbacks/test_weight_averaging.py
    tests/accel_callbacks/callbacks/test_weight_callbacks.py
    tests/accel_callbacks/loop/test_evaluate_checkpoint.py
stopping
    accel_callbacks/callbacks/early_stopping.py
    accel_callbacks/callbacks/monitor.py
    accel_callbacks/callbacks/non_finite.py
    accel_callbacks/callbacks/timer.py
    tests/accel_callbacks/callbacks/test_early_stopping.py
    tests/accel_callbacks/callbacks/test_non_finite.py
    tests/accel_callbacks/callbacks/test_timer.py
    tests/accel_callbacks/loop/test_end_epoch.py
    tests/accel_callbacks/callbacks/test_builtin.py
    tests/accel_callbacks/callbacks/test_weight_callbacks.py
launch
    accel_callbacks/launch/plan.py
    accel_callbacks/launch/agent.py
    accel_callbacks/launch/environment.py
    accel_callbacks/launch/machine.py
    accel_callbacks/launch/rendezvous.py
    accel_callbacks/launch/report.py
    accel_callbacks/launch/slurm.py
    accel_callbacks/launch/watchdog.py
    accel_callbacks/launch/worker.py
    tests/cli/test_launch_plan.py
    tests/cli/test_launch_report.py
    tests/cli/test_slurm.py
    tests/cli/test_launch.py
    tests/cli/test_launch_errors.py
    tests/cli/test_launch_gpus.py
    tests/cli/test_config_settings.py
    tests/cli/test_config.py
config
    accel_callbacks/options.py
    accel_callbacks/data/config.py
    accel_callbacks/launch/config_file.py
    accel_callbacks/plugins/option.py
    accel_callbacks/launch/resolve.py
    accel_callbacks/plugins/base.py
    tests/accel_callbacks/test_state_and_config.py
    tests/accel_callbacks/data/test_config.py
    tests/accel_callbacks/plugins/test_plugins.py
    tests/cli/test_config_settings.py
    tests/cli/test_config_files.py
    tests/cli/test_config.py
    tests/cli/test_config_launch.py
    tests/cli/test_launch_plan.py
offload
    accel_callbacks/models/offload/align.py
    accel_callbacks/models/offload/assignment.py
    accel_callbacks/models/offload/budgets.py
    accel_callbacks/compat/casting.py
    accel_callbacks/models/offload/checkpoint_weights.py
    accel_callbacks/models/offload/contents.py
    accel_callbacks/models/offload/device_copies.py
    accel_callbacks/models/offload/device_map.py
    accel_callbacks/models/offload/dispatch.py
    accel_callbacks/compat/folder.py
    accel_callbacks/compat/hooks.py
    accel_callbacks/models/offload/origins.py
    accel_callbacks/models/offload/placeholder.py
    accel_callbacks/models/offload/planner.py
    accel_callbacks/models/offload/residence.py
    accel_callbacks/models/offload/sizes.py
    accel_callbacks/models/offload/slots.py
    accel_callbacks/models/offload/source.py
    accel_callbacks/models/offload/spill.py
    accel_callbacks/compat/tensors.py
    accel_callbacks/models/offload/traffic_report.py
    accel_callbacks/models/offload/units.py
    accel_callbacks/compat/big_modeling.py
    accel_callbacks/compat/views.py
    accel_callbacks/models/offload/weights.py
    accel_callbacks/models/offload/window.py
    tests/accel_callbacks/models/offload/test_budgets.py
    tests/compat/test_casting.py
    tests/accel_callbacks/models/offload/test_device_copies.py
    tests/accel_callbacks/models/offload/test_device_map.py
    tests/accel_callbacks/models/offload/test_dispatch.py
    tests/accel_callbacks/models/offload/test_dispatch_devices.py
    tests/compat/test_dispatch_views.py
    tests/accel_callbacks/models/offload/test_fetching.py
    tests/compat/test_folder.py
    tests/compat/test_hooks.py
    tests/accel_callbacks/models/offload/test_memory_limit.py
    tests/accel_callbacks/models/offload/test_placeholder.py
    tests/accel_callbacks/models/offload/test_plan.py
    tests/accel_callbacks/models/offload/test_reads.py
    tests/accel_callbacks/models/offload/test_residence.py
    tests/accel_callbacks/models/offload/test_sizes.py
    tests/accel_callbacks/models/offload/test_source.py
    tests/compat/test_tensors.py
    tests/accel_callbacks/models/offload/test_traffic_report.py
    tests/accel_callbacks/models/offload/test_training.py
    tests/accel_callbacks/models/offload/test_units.py
    tests/accel_callbacks/models/offload/test_uses.py
    tests/accel_callbacks/models/offload/test_weights.py
    tests/compat/test_whole_model.py
    tests/accel_callbacks/models/offload/test_window.py
plugins
    accel_callbacks/plugins/base.py
    accel_callbacks/plugins/compile.py
    accel_callbacks/plugins/ddp.py
    accel_callbacks/plugins/deepspeed.py
    accel_callbacks/plugins/deepspeed_config.py
    accel_callbacks/plugins/deepspeed_dummies.py
    accel_callbacks/plugins/fsdp.py
    accel_callbacks/plugins/gradient_accumulation.py
    accel_callbacks/compat/megatron.py
    accel_callbacks/plugins/parallelism.py
    accel_callbacks/plugins/parallelism_handlers.py
    accel_callbacks/plugins/precision.py
    accel_callbacks/plugins/process_group.py
    tests/accel_callbacks/plugins/test_deepspeed.py
    tests/accel_callbacks/plugins/test_fsdp.py
    tests/accel_callbacks/plugins/test_megatron.py
    tests/accel_callbacks/plugins/test_parallelism.py
    tests/accel_callbacks/plugins/test_plugins.py
"""


def _rooms() -> dict[str, tuple[list[str], list[str]]]:
    """Return the files and the tests of each room."""
    rooms: dict[str, tuple[list[str], list[str]]] = {}
    for line in _ROOMS.strip().splitlines():
        if line[0] != " ":
            files, tests = rooms[line] = ([], [])
        else:
            (tests if line.startswith("    tests/") else files).append(line.strip())
    return rooms


ROOMS = _rooms()


# --- mutants -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    room: str
    file: str
    line: int
    function: int | None  # first line of the function around it
    operator: str
    start: int  # bytes of the file that are replaced
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.room}|{self.file}|{self.start}|{self.end}|{self.after}"


_COMPARISONS: dict[type[ast.cmpop], list[tuple[str, type[ast.cmpop]]]] = {
    ast.Lt: [("boundary", ast.LtE), ("negated comparison", ast.GtE)],
    ast.LtE: [("boundary", ast.Lt), ("negated comparison", ast.Gt)],
    ast.Gt: [("boundary", ast.GtE), ("negated comparison", ast.LtE)],
    ast.GtE: [("boundary", ast.Gt), ("negated comparison", ast.Lt)],
    ast.Eq: [("negated comparison", ast.NotEq)],
    ast.NotEq: [("negated comparison", ast.Eq)],
    ast.Is: [("negated comparison", ast.IsNot)],
    ast.IsNot: [("negated comparison", ast.Is)],
    ast.In: [("negated comparison", ast.NotIn)],
    ast.NotIn: [("negated comparison", ast.In)],
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
_TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_TEXT = ("warn", "notice", "debug", "info", "warning", "error", "exception", "print")
_UNSEEN = ("__repr__", "__str__")


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


class _Finder(ast.NodeVisitor):
    """Collects the mutants of a file."""

    def __init__(self, room: str, file: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._room, self._file, self._source = room, file, source
        self._offsets = [0]
        for line in source.splitlines(keepends=True):
            self._offsets.append(self._offsets[-1] + len(line))
        self._function: int | None = None

    def _add(self, node: Any, operator: str, after: str) -> None:
        start = self._offsets[node.lineno - 1] + node.col_offset
        end = self._offsets[node.end_lineno - 1] + node.end_col_offset
        before = self._source[start:end].decode()
        place = (self._room, self._file, node.lineno, self._function)
        self.found.append(Mutant(*place, operator, start, end, before, after))

    def _change(self, node: Any, operator: str, **fields: Any) -> None:
        """Replace an expression by a copy of it with other fields."""
        values = {name: getattr(node, name) for name in node._fields}
        self._add(node, operator, f"({ast.unparse(type(node)(**{**values, **fields}))})")

    def _visit_all(self, nodes: Sequence[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in _UNSEEN or any("overload" in ast.unparse(d) for d in node.decorator_list):
            return
        outer = self._function
        self._function = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        self._visit_all([*node.args.defaults, *node.args.kw_defaults, *node.body])
        self._function = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.value])

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "statement left out", "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        return

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            for operator, other in _COMPARISONS[type(node.ops[0])]:
                self._change(node, operator, ops=[other()])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._change(node, "and/or", op=other)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(node, "not/minus dropped", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _ARITHMETIC.get(type(node.op))
        if other is not None and not _is_text(node.left) and not _is_text(node.right):
            self._change(node, "arithmetic", op=other())
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant", str(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, "constant", f"({node.value + 1})")
            self._add(node, "constant", f"({node.value - 1})")

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        if name in _TEXT:
            return
        if isinstance(node.func, ast.Name) and name in _TWINS:
            self._add(node.func, "min/max, any/all", _TWINS[name])
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        found = len(self.found)
        self.visit(node.value)
        call = node.value.func if isinstance(node.value, ast.Call) else None
        if call is not None and ast.unparse(call).rpartition(".")[2] not in _TEXT:
            self._add(node, "statement left out", "pass")
        elif call is not None:
            del self.found[found:]

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add(node, "statement left out", "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "statement left out", "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        if not all(isinstance(target, ast.Name) for target in node.targets):
            self._add(node, "statement left out", "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._add(node, "statement left out", "pass")
        elif not _is_text(node.value):
            if not isinstance(node.value, ast.Constant):
                self._add(node, "return None", "return None")
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._branch(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._branch(node)

    def _branch(self, node: ast.If | ast.IfExp) -> None:
        self._add(node.test, "if always", "True")
        self._add(node.test, "if never", "False")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._add(node.test, "loop never", "False")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "break/continue", "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "break/continue", "break")


def find(root: Path, room: str) -> list[Mutant]:
    """Return all mutants of a room."""
    found: list[Mutant] = []
    for file in ROOMS[room][0]:
        source = (root / file).read_bytes()
        finder = _Finder(room, file, source)
        finder.visit(ast.parse(source, file))
        found += finder.found
    return found


def sample(root: Path, room: str, count: int, seed: int) -> list[Mutant]:
    """Return some mutants of a room, at most one from a line; the same for the same seed."""
    candidates = find(root, room)
    random.Random(f"{seed} {room}").shuffle(candidates)
    lines: dict[tuple[str, int], Mutant] = {}
    for mutant in candidates:
        lines.setdefault((mutant.file, mutant.line), mutant)
    return list(lines.values())[:count]


# --- tests ---------------------------------------------------------------------------------


class _Plugin:
    """Runs chosen tests, the quickest files first, and notes what happens."""

    def __init__(self, baseline: Baseline | None, mutant: Mutant | None, report: Path) -> None:
        self.entered: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.starters: set[str] = set()
        self.failed: list[str] = []
        self._baseline, self._mutant, self._report = baseline, mutant, report
        self._test = ""  # a test, or the file whose fixtures are being set up

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._baseline is not None and self._mutant is not None:
            chosen = self._baseline.tests_of(self._mutant)
            items[:] = sorted(
                (item for item in items if item.nodeid in chosen),
                key=lambda item: chosen.index(item.nodeid),
            )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._report.with_suffix(".last").write_text(nodeid)

    def pytest_runtest_setup(self, item: Any) -> None:
        self._test = item.nodeid.partition("::")[0]

    def pytest_runtest_call(self, item: Any) -> None:
        self._test = item.nodeid

    def pytest_runtest_teardown(self, item: Any) -> None:
        self._test = item.nodeid.partition("::")[0]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} (collection)")

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        entered = {test: sorted(places) for test, places in self.entered.items()}
        facts = (entered, dict(self.seconds), sorted(self.starters), self.failed)
        self._report.write_text(json.dumps(facts))

    def observe(self, root: Path) -> None:
        """Note the functions that each test enters, and the tests that start processes."""
        prefix = f"{root}/"

        def enter(frame: FrameType, event: str, argument: Any) -> None:
            code = frame.f_code
            if code.co_filename.startswith(prefix):
                place = (code.co_filename.removeprefix(prefix), code.co_firstlineno)
                self.entered[self._test].add(place)

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            starts = event in ("subprocess.Popen", "os.fork", "os.posix_spawn")
            # Most ask the server of tests/support/warm.py to fork, at an address of Linux's own.
            asks = event == "socket.connect" and isinstance(arguments[1], bytes)
            if starts or asks:
                self.starters.add(self._test)

        sys.addaudithook(audit)
        threading.settrace(enter)
        sys.settrace(enter)


@dataclass
class Baseline:
    """What the tests of a room do without a mutant."""

    entered: dict[str, set[tuple[str, int]]]
    seconds: dict[str, float]
    starters: set[str]

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that a mutant may concern; those that start processes come last."""
        place = (mutant.file, mutant.function)

        def concerns(test: str) -> bool:
            of_its_own = any(place in self.entered.get(part, ()) for part in _parts(test))
            return mutant.function is None or of_its_own or self._starts(test)

        chosen = [test for test in self.seconds if concerns(test)]
        sums: Counter[str] = Counter()
        for test in chosen:
            sums[test.partition("::")[0]] += int(1000 * self.seconds[test])
        files = {test: test.partition("::")[0] for test in chosen}
        return sorted(chosen, key=lambda t: (self._starts(t), sums[files[t]], files[t]))

    def _starts(self, test: str) -> bool:
        return any(part in self.starters for part in _parts(test))


def _parts(test: str) -> tuple[str, str]:
    return test, test.partition("::")[0]


# --- the process that forks for each mutant --------------------------------------------------


def _import_libraries(root: Path) -> None:
    """Import what the tests need, but nothing that may be changed."""
    sys.path.insert(0, str(root / "tests/support"))
    libraries = importlib.import_module("warm_server").LIBRARIES
    del sys.path[0]
    for name in (*libraries, "hypothesis", "pytest_timeout", "_pytest.assertion.rewrite"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()


class Runner:
    """Runs tests in forks of this process, which is the first of its namespace."""

    def __init__(self, root: Path, tests: Sequence[str] | None, *, quick: bool) -> None:
        self._root, self._work = root, root.parent
        self._tests, self._quick = tests, quick
        self._report = self._work / "report.json"

    def baseline(self, room: str) -> Baseline:
        """Run the tests of a room as they are."""
        plugin = _Plugin(None, None, self._report)
        code = self._fork(plugin, list(self._tests or ROOMS[room][1]), 1200, observed=True)
        if code not in (0, 1):
            tail = (self._work / "log").read_text(errors="replace")[-3000:]
            raise SystemExit(f"the tests of {room} do not run without a mutant:\n{tail}")
        entered, seconds, starters, failed = json.loads(self._report.read_text())
        for test in failed:
            print(f"{room}: fails without a mutant, left out: {test}", file=sys.stderr, flush=True)
            seconds.pop(test, None)
        if self._quick:
            for test in [one for one in seconds if set(_parts(one)) & set(starters)]:
                del seconds[test]
        places = {test: {(file, line) for file, line in at} for test, at in entered.items()}
        return Baseline(places, seconds, set(starters))

    def judge(self, mutant: Mutant, baseline: Baseline) -> dict[str, Any]:
        """Return the verdict about a mutant, by which test, and after how many seconds."""
        tests = baseline.tests_of(mutant)
        if not tests:
            return {"verdict": "survived", "by": "no test enters it", "seconds": 0.0}
        limit = SPARE_SECONDS + 2 * sum(baseline.seconds[test] for test in tests)
        began = time.monotonic()
        with self._applied(mutant):
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
            code = self._fork(_Plugin(baseline, mutant, self._report), files, limit)
        return {**self._verdict(code), "seconds": round(time.monotonic() - began, 1)}

    def _verdict(self, code: int | None) -> dict[str, Any]:
        if code is None:
            last = self._report.with_suffix(".last")
            return {"verdict": "timeout", "by": last.read_text() if last.exists() else "start"}
        if code == 0:
            return {"verdict": "survived", "by": ""}
        failed = json.loads(self._report.read_text())[3] if self._report.exists() else []
        return {"verdict": "killed", "by": failed[0] if failed else f"exit code {code}"}

    @contextlib.contextmanager
    def _applied(self, mutant: Mutant) -> Iterator[None]:
        path = self._root / mutant.file
        source, times = path.read_bytes(), path.stat()
        mutated = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
        compile(mutated, mutant.file, "exec")
        path.write_bytes(mutated)
        os.utime(path, (times.st_mtime + 100, times.st_mtime + 100))  # not the compiled file's
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _fork(
        self, plugin: _Plugin, tests: list[str], limit: float, *, observed: bool = False
    ) -> int | None:
        """Run tests in a fork and return its exit code, None after the time limit."""
        for path in (self._report, self._report.with_suffix(".last")):
            path.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._run_tests(plugin, tests, observed)
        deadline = time.monotonic() + limit
        code = None
        while code is None and time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)  # orphans of the tests are ours too
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
            elif pid == 0:
                time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all of this namespace but the first
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        shutil.rmtree(self._work / "tmp", ignore_errors=True)
        (self._work / "tmp").mkdir()
        return code

    def _run_tests(self, plugin: _Plugin, tests: list[str], observed: bool) -> NoReturn:
        code = 70
        try:
            os.setsid()
            log = os.open(self._work / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for number, target in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(number, target)
            os.chdir(self._root)
            sys.path[:0] = [str(self._root)]
            sys.dont_write_bytecode = not observed
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if not observed:
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            import pytest

            chosen = "not slow and not distributed" if self._quick else "not slow"
            options = ["-q", "-m", chosen, "-p", "no:cacheprovider", "-p", "no:xdist"]
            if observed:
                plugin.observe(self._root)
            else:
                options.append("-x")
            code = int(pytest.main([*options, *tests], plugins=[plugin]))
        finally:
            sys.stdout.flush()
            os._exit(code)


def inside(args: argparse.Namespace) -> None:
    """Run mutants in the namespaces that :func:`main` has made; print results, one a line."""
    if os.getpid() != 1:  # it ends all other processes that it sees
        raise SystemExit("--inside is for the process that the script starts in its namespaces")
    results = os.fdopen(os.dup(1), "w")
    work = Path(args.inside)
    tree = _copy_tree(work)
    importlib.invalidate_caches()  # the tree was not there when this process started
    os.chdir(work)
    _import_libraries(tree)
    runner = Runner(tree, args.tests, quick=args.quick)
    wanted = json.loads(sys.stdin.read())
    for room, mutants in wanted.items():
        began = time.monotonic()
        baseline = runner.baseline(room)
        print(
            f"{room}: its tests took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
        )
        for mutant in (Mutant(**fields) for fields in mutants):
            verdict = runner.judge(mutant, baseline)
            print(json.dumps({**asdict(mutant), **verdict}), file=results, flush=True)


def _copy_tree(work: Path) -> Path:
    """Copy the working tree, and make everything else read-only."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["mount", "--bind", str(work), str(work)], check=True)
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file():
            (work / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, work / "tree" / name)
    for folder in ("tmp", "home"):
        (work / folder).mkdir()
    subprocess.run(["mount", "-o", "remount,bind,ro", "/"], check=True)
    return work / "tree"


# --- the process that people start -----------------------------------------------------------


def _read(out: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each mutant."""
    lines = out.read_text().splitlines() if out.exists() else []
    results = [json.loads(line) for line in lines]
    names = Mutant.__dataclass_fields__
    return {Mutant(**{n: r[n] for n in names}).key: r for r in results}


def choose(args: argparse.Namespace, done: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the mutants to run, by room."""
    wanted: dict[str, list[Any]] = {}
    for room in args.rooms or ROOMS:
        drawn = sample(ROOT, room, args.count, args.seed)
        if args.again:
            survived = {key for key, result in done.items() if result["verdict"] == "survived"}
            drawn = [mutant for mutant in find(ROOT, room) if mutant.key in survived]
        elif not args.list:
            drawn = [mutant for mutant in drawn if mutant.key not in done]
        if drawn:
            wanted[room] = [asdict(mutant) for mutant in drawn]
    return wanted


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Return a table of the verdicts by room, and the survivors."""
    verdicts = ("killed", "timeout", "explained", "survived")
    by_room: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        by_room[result["room"]][result["verdict"]] += 1
        by_room["all"][result["verdict"]] += 1
    rows = ["".join(f"{word:<12}" for word in ("room", "mutants", *verdicts, "score"))]
    for room in [*(room for room in ROOMS if room in by_room), "all"]:
        found = by_room[room]
        score = 100 * (found["killed"] + found["timeout"]) / max(found.total(), 1)
        cells = (room, found.total(), *(found[verdict] for verdict in verdicts), f"{score:.0f} %")
        rows.append("".join(f"{cell!s:<12}" for cell in cells))
    return "\n".join([*rows, *(_line(one) for one in results if one["verdict"] == "survived")])


def _line(result: dict[str, Any]) -> str:
    def shorten(text: str) -> str:
        return " ".join(text.split())[:90]

    change = f"{shorten(result['before'])} -> {shorten(result['after'])}"
    verdict = " ".join(str(result.get(name, "")) for name in ("verdict", "by", "seconds")).strip()
    return f"{result['file']}:{result['line']} [{result['operator']}] {change} | {verdict}"


def _run(args: argparse.Namespace, wanted: dict[str, list[Any]], work: str) -> int:
    """Start the process that forks, append its results to the file, and return its exit code."""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += [sys.executable, __file__, "--inside", work, *["--quick"] * args.quick]
    command += ["--tests", *args.tests] if args.tests else []
    environment = {
        **os.environ,
        "PYTHONPATH": f"{work}/tree",
        "TMPDIR": f"{work}/tmp",
        "HOME": f"{work}/home",
        "OMP_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(wanted))
        process.stdin.close()
        with args.out.open("a") as out:
            for line in process.stdout:
                out.write(line)
                out.flush()
                print(_line(json.loads(line)), flush=True)
        return process.wait()
    finally:
        process.kill()  # and with it all in its namespaces
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=COUNT, help="mutants of a room")
    parser.add_argument("--seed", type=int, default=SEED, help="of the sample")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="file of results")
    parser.add_argument("--again", action="store_true", help="run those that survived so far")
    parser.add_argument("--quick", action="store_true", help="no tests that start processes")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="in place of those of the room")
    parser.add_argument("--list", action="store_true", help="print the mutants, run none")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    done = _read(args.out)
    wanted = choose(args, done)
    if args.list:
        print(*(_line(mutant) for mutants in wanted.values() for mutant in mutants), sep="\n")
        return
    os.nice(10)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as with Ctrl-C
    with tempfile.TemporaryDirectory(prefix="mutants-") as work:
        code = _run(args, wanted, work)
    print(summary([r for r in _read(args.out).values() if r["room"] in (args.rooms or ROOMS)]))
    sys.exit(code)


if __name__ == "__main__":
    main()
