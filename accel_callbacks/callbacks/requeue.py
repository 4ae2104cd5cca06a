"""Put a job that gives way back into the queue of its cluster."""

from __future__ import annotations

import os
import subprocess

__all__ = ["requeue_slurm"]

_LONGEST = 60.0  # seconds that scontrol may take; the job may be killed any moment


def requeue_slurm() -> str:
    """``scontrol requeue`` this job; returns its number, or an empty string outside of SLURM.

    Raises:
        RuntimeError: scontrol is missing, refuses, or does not answer.

    Example:
        >>> import os
        >>> from accel_callbacks.callbacks.requeue import requeue_slurm
        >>> "SLURM_JOB_ID" in os.environ or requeue_slurm() == ""
        True
    """
    job = _job_id()
    if not job:
        return ""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "no message"
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {said}")
    return job


def _job_id() -> str:
    """The number of the job; of an array, of its task."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
