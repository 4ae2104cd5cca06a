"""Migrate scripts and notebooks from Hugging Face Accelerate to this package.

The knowledge about both packages is data (`names`, `rules`). Only names are edited in the text, so
that its formatting stays.

Example:
    >>> from accel_callbacks.compat.migrate import migrate_script
    >>> print(migrate_script("from accelerate import Accelerator  # one\\n").after, end="")
    from accel_callbacks import Accelerator  # one
"""

from accel_callbacks.compat.migrate.notebook import migrate_notebook
from accel_callbacks.compat.migrate.script import migrate_script
from accel_callbacks.compat.migrate.source import Finding, Migration, UnreadableError

__all__ = ["Finding", "Migration", "UnreadableError", "migrate_notebook", "migrate_script"]
