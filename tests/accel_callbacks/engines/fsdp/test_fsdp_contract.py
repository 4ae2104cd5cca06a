"""The generated contract of the callbacks, with a model that two ranks share."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from accel_callbacks import FullyShardedDataParallelPlugin
from accel_callbacks.distributed.topology import destroy_topology
from accel_callbacks.testing import checks
from tests.accel_callbacks.callbacks import factories
from tests.support.bound import BOUND
from tests.support.contract import callback_checks
from tests.support.energy import modules

pytestmark = pytest.mark.distributed

# Those of one process: where it waits for its device, and what is left after an error, which ends
# the process group of several.
SKIPPED = ("host_sync", "error_before", "error_after", "error_in_loop")


def failures(name: str, folder: str) -> dict[str, str]:
    """Run the checks of a callback on this rank, and return the errors by check."""
    numbers = itertools.count()

    @contextmanager
    def shared_folder() -> Iterator[str]:
        # The checks save to the memory of one process.
        yield f"{folder}/{next(numbers)}"

    checks.memory_folder = shared_folder
    factories.MEMORY = f"{folder}/memory"
    case = factories.CASES[name]
    found = {}
    for check in callback_checks(
        case.make,
        skip=SKIPPED,
        allow_sync=case.allow_sync,
        project_dir=f"{folder}/project",
        fsdp_plugin=FullyShardedDataParallelPlugin(),
        timeout=BOUND,
    ):
        destroy_topology()
        try:
            with mock.patch.dict(sys.modules, modules()[0]):  # needs no codecarbon
                check()
        except Exception as error:
            found[check.name] = f"{type(error).__name__}: {error}"
    destroy_topology()
    return found


# It reads and writes parameters and files of the ranks; the others are slow.
QUICK = ("EMA",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, case in factories.CASES.items()
        if not case.slow
    ],
)
def test_contract_of_sharded_models(pool, tmp_path, name):
    for found in pool.run(failures, name, str(tmp_path)):
        assert found == {}
