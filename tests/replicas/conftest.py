"""Tests with torchft, skipped without it: scripts/test_torchft makes an environment that has it."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torchft") else ["test_training.py"]
