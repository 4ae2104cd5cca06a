"""``accel data``: show the samples of a step of a run."""

from __future__ import annotations

import importlib
import json
import runpy
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_callbacks.cli.parser import CommandError, CommandParser, natural_int, positive_int
from accel_callbacks.terminal_text import printable, table

if TYPE_CHECKING:
    from accel_callbacks.addons.journal import Journal
    from accel_callbacks.addons.journal.samples import StepSamples

_MOST_STEPS = 20  # whose samples --where shows
_LONGEST = 200  # characters of a sample
_FIELDS = ("step", "epoch", "position", "loss", "gradient_norm", "learning_rate", "attempt")


def configure(parser: CommandParser) -> None:
    """Add the options of ``accel data``."""
    parser.add_argument("run", metavar="RUN", help="the project folder of the run, path or URL")
    which = parser.add_mutually_exclusive_group(required=True)
    parser.option("--step", group=which, type=positive_int, metavar="N", help="an optimizer step")
    parser.option(
        "--where", group=which, metavar="CONDITION", help="steps, such as 'loss > 8 and epoch == 0'"
    )
    parser.option("--run_id", metavar="ID", help="a run of the folder; default: the newest")
    parser.option("--rank", type=natural_int, metavar="R", help="one rank; default: all")
    parser.option(
        "--script",
        metavar="FILE:NAME",
        help="show the samples: a DataLoader or dataset of a file or module, or a function that "
        "returns one",
    )
    parser.option("--tokenizer", metavar="NAME", help="of transformers, to decode tokens with")
    parser.option("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    """Print the indices of the samples, or the samples."""
    from accel_callbacks.addons.journal import Journal, JournalError

    try:
        journal = Journal.read(args.run, args.run_id)
        source = None if args.script is None else _load_object(args.script)
        return _show(args, journal, source)
    except (JournalError, OSError, ImportError) as error:
        raise CommandError(str(error), exit_code=1) from None


def _show(args: Namespace, journal: Journal, source: Any) -> int:
    from accel_callbacks.addons.journal.row_filter import chosen_rows
    from accel_callbacks.addons.journal.samples import samples_of

    steps = [args.step]
    if args.where is not None:
        rows = chosen_rows(journal.rows(args.rank or 0, repeated=False), args.where)
        steps = rows["step"].tolist()
        if not args.json:
            cells = [[f"{row[name]:.6g}" for name in _FIELDS] for row in rows]
            print(table([name.upper() for name in _FIELDS], cells))
        if source is None and not args.json:
            return 0
        steps = steps[:_MOST_STEPS]
    decode = _decoder(args.tokenizer)
    answers = []
    for step in steps:
        samples = samples_of(journal, step, source)
        answers.append(_as_json(samples, args.rank))
        if not args.json:
            _print(samples, args.rank, getattr(source, "dataset", source), decode)
    if args.json:
        print(json.dumps(answers, default=str))
    return 0


def _print(samples: StepSamples, rank: int | None, dataset: Any, decode: Any) -> None:
    places = f"samples {samples.begin} to {samples.end} of epoch {samples.epoch}"
    print(f"step {samples.step}: {places}, taken by attempt {samples.attempt}")
    for number, ranks in enumerate(samples.batches, start=1):
        for owner, indices in enumerate(ranks):
            if rank is not None and owner != rank:
                continue
            print(f"batch {number}, rank {owner}: {', '.join(map(str, indices))}")
            for index in indices if dataset is not None else ():
                text = printable(_text(dataset[index], decode))
                print(f"  {index}: {text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}")


def _as_json(samples: StepSamples, rank: int | None) -> dict[str, Any]:
    batches = [
        [list(indices) for owner, indices in enumerate(ranks) if rank in (None, owner)]
        for ranks in samples.batches
    ]
    return {**vars(samples), "batches": batches}


def _text(sample: Any, decode: Any) -> str:
    """Return a sample as text, its tokens decoded if a tokenizer was given."""
    if decode is None:
        return repr(sample)
    if isinstance(sample, Mapping):
        sample = sample.get("input_ids", next(iter(sample.values())))
    elif isinstance(sample, Sequence) and not isinstance(sample, str) and len(sample):
        first = sample[0]
        sample = sample if isinstance(first, int) else first
    return str(decode(sample))


def _decoder(name: str | None) -> Any:
    if name is None:
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CommandError(
            f"--tokenizer needs transformers ({error}): pip install transformers", exit_code=1
        ) from None
    decode: Any = AutoTokenizer.from_pretrained(name).decode
    return decode


def _load_object(place: str) -> Any:
    """Return the dataset or loader that ``FILE:NAME`` or ``module:NAME`` names."""
    file, found, name = place.rpartition(":")
    if not found or not name.isidentifier():
        raise CommandError(
            f"--script {place}: name what is in it too, as in train.py:make_loader, which returns "
            "the DataLoader or the dataset"
        )
    if file.endswith(".py"):
        # Not as __main__, so that the training does not start.
        names = runpy.run_path(file, run_name="accel_data")
    else:
        names = vars(importlib.import_module(file))
    if name not in names:
        raise CommandError(f"--script {place}: {file} has no {name!r}")
    value = names[name]
    return value if hasattr(value, "__getitem__") or hasattr(value, "dataset") else value()
