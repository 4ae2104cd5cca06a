"""What earlier versions had: since when it is gone, and what serves instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["REMOVED", "Removal", "removal_of"]


class Removal(NamedTuple):
    """A name, option or extra that is gone.

    Args:
        since: the first version without it.
        instead: what serves instead, as a sentence.
    """

    since: str
    instead: str


_SURVIVORS = Removal(
    "0.2.0",
    "`accel launch --max_restarts N` begins all processes again, and "
    "Checkpoint(memory_every_n_steps=N) resumes them from host memory.",
)
_WARM = Removal("0.2.0", "A restart begins new processes, as under torchrun.")
_REPLICAS = Removal(
    "0.2.0",
    "`accel launch --nnodes MIN:MAX --max_restarts N` resumes on the machines that are left.",
)
_BITSANDBYTES = Removal(
    "0.2.0",
    "transformers loads such a model itself: "
    "from_pretrained(name, quantization_config=BitsAndBytesConfig(...)).",
)
_SCHEDULE = Removal("0.2.0", 'Use "Interleaved1F1B", or "1F1B" with one stage on each process.')

#: By what a user writes: a public name, a flag, a key, a value, an extra.
REMOVED: Mapping[str, Removal] = {
    "survive": _SURVIVORS,
    **dict.fromkeys(("--warm_workers", "--no_warm_workers", "warm_workers"), _WARM),
    **dict.fromkeys(("TorchFTKwargs", "TorchFT", "ReplicaBehindError"), _REPLICAS),
    "accel-callbacks[torchft]": _REPLICAS,
    "accel-callbacks[obstore]": Removal("0.2.0", "accel-callbacks[s3] moves the bytes by s3fs."),
    **dict.fromkeys(
        ("BnbQuantizationConfig", "has_4bit_bnb_layers", "load_and_quantize_model"), _BITSANDBYTES
    ),
    "accel-callbacks[bitsandbytes]": _BITSANDBYTES,
    **dict.fromkeys(("DualPipeV", "InterleavedZeroBubble", "ZBVZeroBubble"), _SCHEDULE),
    "accel migrate NOTEBOOK": Removal(
        "0.2.0", "`jupytext --to py NOTEBOOK` makes a script of it, which accel migrate takes."
    ),
}


def removal_of(name: str) -> str:
    """Return what to say of a name that is gone, after a space; an empty string of any other.

    Example:
        >>> from accel_callbacks.removed import removal_of
        >>> removal_of("warm_workers")
        ' It was removed in 0.2.0. A restart begins new processes, as under torchrun.'
        >>> removal_of("num_processes")
        ''
    """
    if name not in REMOVED:
        return ""
    since, instead = REMOVED[name]
    return f" It was removed in {since}. {instead}"
