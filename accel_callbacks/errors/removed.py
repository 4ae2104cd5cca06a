"""Names that this library had in earlier versions, each with what serves now."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["REMOVED", "advice"]

_RESTART = (
    "It was removed in 0.2.0. `accel launch --max_restarts N` begins all processes again, and "
    "Checkpoint(memory_every_n_steps=N) resumes them from host memory."
)
_WARM = "It was removed in 0.2.0. A restart begins new processes, as under torchrun."
_REPLICAS = (
    "It was removed in 0.2.0. `accel launch --nnodes MIN:MAX --max_restarts N` resumes on the "
    "machines that are left."
)
_BITSANDBYTES = (
    "It was removed in 0.2.0. transformers loads such a model itself: give from_pretrained a "
    "BitsAndBytesConfig as quantization_config."
)
_SCHEDULE = (
    'It was removed in 0.2.0. Use "Interleaved1F1B", or "1F1B" with one stage on each process.'
)
_SYNCS = (
    "It was removed in 0.2.0. On a GPU, torch.cuda.set_sync_debug_mode('error') finds what waits "
    "for the device, in a tiny_training(..., cpu=False)."
)

#: What this library had itself: public names, flags, keys, values, extras and commands.
REMOVED: Mapping[str, str] = {
    "survive": _RESTART,
    **dict.fromkeys(("--warm_workers", "--no_warm_workers", "warm_workers"), _WARM),
    **dict.fromkeys(("TorchFTKwargs", "TorchFT", "ReplicaBehindError"), _REPLICAS),
    "accel-callbacks[torchft]": _REPLICAS,
    "accel-callbacks[obstore]": "It was removed in 0.2.0. accel-callbacks[s3] moves the bytes.",
    **dict.fromkeys(
        ("BnbQuantizationConfig", "has_4bit_bnb_layers", "load_and_quantize_model"), _BITSANDBYTES
    ),
    "accel-callbacks[bitsandbytes]": _BITSANDBYTES,
    **dict.fromkeys(("DualPipeV", "InterleavedZeroBubble", "ZBVZeroBubble"), _SCHEDULE),
    **dict.fromkeys(("HostSync", "host_syncs"), _SYNCS),
    "simulate": (
        "It was removed in 0.2.0. The trace of tiny_training() has the hooks of a run in order, "
        "and accel.describe_callbacks() whose they are."
    ),
    **dict.fromkeys(
        ("accel completions", "accel-callbacks[completions]"),
        "It was removed in 0.2.0. `accel COMMAND --help` lists the options.",
    ),
    "--all_questions": "It was removed in 0.2.0. Leave it out: all questions are asked.",
    "--price": "It was removed in 0.2.0. Multiply: Goodput.cost(price) of the journal does.",
    "--run_path": "It was removed in 0.2.0. Leave it out: the script runs as `python` runs it.",
    "accel ckpt cp": (
        "It was removed in 0.2.0. Copy the folder as any other (`cp -r`, `aws s3 cp --recursive`), "
        "then `accel ckpt verify` the copy."
    ),
    "Budget": (
        "It was removed in 0.2.0. offload.plan takes a dict of bytes, such as {0: '8GB', 'cpu': "
        "'16GB'}."
    ),
    "accel migrate NOTEBOOK": (
        "It was removed in 0.2.0. `jupytext --to py NOTEBOOK` makes a script of it, which accel "
        "migrate takes."
    ),
}


def advice(names: Mapping[str, str], name: str) -> str:
    """Return what a table says of a name, after a space; an empty string of an unknown one.

    Example:
        >>> from accel_callbacks.errors.removed import REMOVED, advice
        >>> advice(REMOVED, "accel-callbacks[obstore]")
        ' It was removed in 0.2.0. accel-callbacks[s3] moves the bytes.'
    """
    return f" {names[name]}" if name in names else ""
