"""Run the ``accel`` command as ``python -m accel_callbacks.cli``."""

from __future__ import annotations

import sys

from accel_callbacks.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
