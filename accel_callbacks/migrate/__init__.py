"""Moving scripts and notebooks from Hugging Face Accelerate to this package.

What is known of both is data (`names`, `missing`, `rules`); the text is changed only where a name
stands, so that its formatting stays.

Example:
    >>> from accel_callbacks.migrate import migrate_script
    >>> print(migrate_script("from accelerate import Accelerator  # one\\n").after, end="")
    from accel_callbacks import Accelerator  # one
"""

from accel_callbacks.migrate.notebook import migrate_notebook
from accel_callbacks.migrating.findings import Finding, Migration, UnreadableError
from accel_callbacks.migrating.scripts import migrate_script

__all__ = ["Finding", "Migration", "UnreadableError", "migrate_notebook", "migrate_script"]
