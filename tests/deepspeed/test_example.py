"""The example of DeepSpeed, on one process and on two."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: scripts/test_deepspeed")

from tests.examples.test_by_feature import number, played

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize(("stage", "whole"), [(2, 85_002), (3, 0)])
def test_it_trains_and_saves_a_model(alone, pool, tmp_path: Path, stage: int, whole: int) -> None:
    for group in (alone, pool):
        folder = tmp_path / str(group.size)
        folder.mkdir()
        options = ("--cpu", "--stage", str(stage))
        printed = "".join(group.run(played, "deepspeed_zero.py", str(folder), options))
        assert number(f"ZeRO stage {stage}:", printed) == whole
        assert number("accuracy", printed) > 90
        assert "the saved model has the same in plain torch: True" in printed
