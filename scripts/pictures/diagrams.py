"""Diagrams of what the pages of docs/concepts explain."""

from __future__ import annotations

from collections.abc import Iterable

from svg import Picture
from terminal import read

from accel_callbacks.data.shard import SamplePlan

WIDTH = 640
#: Lines of a loop, each with the hooks that fire there, in order; one epoch of one batch fires all.
HOOKS = (
    ('with accel.run("digits") as run:', ("setup", "on_fit_start")),
    ("  for epoch in run.epochs(10):", ("on_train_start", "on_train_epoch_start")),
    ("    for batch in train:", ("on_train_batch_start",)),
    ("      with accel.accumulate(model):", ()),
    ("        loss = model(batch).mean()", ()),
    ("        accel.backward(loss)", ("on_before_backward", "on_after_backward")),
    ("        optimizer.step()", ("on_before_optimizer_step", "on_after_optimizer_step")),
    ("        optimizer.zero_grad()", ("on_before_zero_grad",)),
    ('      accel.log({"loss": loss})', ("on_log",)),
    ("      # asks for the next batch", ("on_train_batch_end",)),
    ("    with accel.evaluate(model):", ("on_validation_start", "on_validation_epoch_start")),
    ("      for batch in val:", ("on_validation_batch_start",)),
    ("        model(batch)", ()),
    ("        # asks for the next batch", ("on_validation_batch_end",)),
    ("    # the block ends", ("on_validation_epoch_end", "on_validation_end")),
    ("  # the next epoch", ("on_train_epoch_end",)),
    ("  # Checkpoint saves", ("on_save_checkpoint", "on_checkpoint_saved")),
    ("# the run ends", ("on_train_end", "on_fit_end", "teardown")),
)


def window() -> Picture:
    """Draw six micro-batches in windows of four."""
    picture = Picture(
        WIDTH,
        250,
        "Six micro-batches with a window of four: the first four are averaged by four, the last "
        "two by two, and each window takes one optimizer step",
    )
    picture.text(20, 32, "Six micro-batches, gradient_accumulation_steps=4", "text title")
    size, gap, left, top = 76, 16, 52, 58
    for number in range(6):
        x = left + number * (size + gap)
        picture.rect(x, top, size, 46, "box" if number < 4 else "warm", radius=6)
        picture.text(x + size / 2, top + 20, f"batch {number + 1}", "text small", "middle")
        picture.text(x + size / 2, top + 38, f"gradient {number + 1}", "muted small", "middle")
    for first, last, color, title, mean in (
        (0, 3, "box", "a window of 4, one step", "(1 + 2 + 3 + 4) / 4 = 2.5"),
        (4, 5, "warm", "a window of 2, one step", "(5 + 6) / 2 = 5.5"),
    ):
        start = left + first * (size + gap)
        end = left + last * (size + gap) + size
        middle = (start + end) / 2
        picture.line([(start, 112), (start, 124), (end, 124), (end, 112)])
        picture.line([(middle, 124), (middle, 144)], "arrow")
        half = 92
        picture.rect(middle - half, 148, 2 * half, 54, color, radius=6)
        picture.text(middle, 170, title, "text small bold", "middle")
        picture.text(middle, 191, mean, "text small", "middle")
    picture.text(
        WIDTH / 2,
        230,
        "Divided by 4 throughout, the second would be 2.75: half of what it is.",
        "muted small",
        "middle",
    )
    return picture


def hooks() -> Picture:
    """Draw the lines of a loop beside the hooks that fire there."""
    row, gap = 20, 7
    height = 62 + sum(max(1, len(names)) * row + gap for _, names in HOOKS) + 8
    picture = Picture(
        WIDTH, height, "A training loop line by line, and the hooks that each line fires, in order"
    )
    picture.text(20, 32, "Your loop", "text title")
    picture.text(372, 32, "Hooks that fire there", "text title")
    y = 62.0
    for code, names in HOOKS:
        color = "muted" if code.lstrip().startswith("#") else "text"
        picture.spans(20, y, [(code, f"{color} small")], advance=7.6)
        for number, name in enumerate(names):
            picture.spans(386, y + number * row, [(name, "ours-text small")], advance=7.6)
        if names:
            bottom = y + (len(names) - 1) * row
            picture.line([(376, y - 11), (376, bottom + 4)])
            end = 20 + 7.6 * len(code) + 8
            if end < 360:
                picture.line([(end, y - 4), (368, y - 4)])
        y += max(1, len(names)) * row + gap
    return picture


def pieces(processes: int, batch_size: int, start: int, order: Iterable[int]) -> list[list[int]]:
    """Return what each process reads of an order from a position on, flat."""
    samples = list(order)
    return [
        [
            index
            for share in SamplePlan(
                batch_size=batch_size, drop_last=False, rank=rank, world_size=processes
            ).shares(samples, start)
            for index in share.indices
        ]
        for rank in range(processes)
    ]


def order() -> Picture:
    """Draw the order of an epoch, read by two processes, killed, and read on by one."""
    samples = [5, 11, 2, 8, 0, 7, 10, 3, 1, 9, 6, 4]
    position = 8
    picture = Picture(
        WIDTH,
        356,
        "The order of twelve samples; two processes read eight of them; after a kill one process "
        "reads the remaining four, in the same order",
    )
    cell, left = 44, 56

    def row(y: float, indices: dict[int, int], color: str, title: str) -> None:
        picture.text(left, y - 10, title, "text small bold")
        for place, index in indices.items():
            picture.rect(left + place * cell, y, cell - 5, 32, color, radius=5)
            middle = left + place * cell + (cell - 5) / 2
            picture.text(middle, y + 21, str(index), "text", "middle")

    picture.text(20, 32, "The order is drawn once; the position counts samples", "text title")
    row(74, dict(enumerate(samples)), "faint", "the order of the epoch, recorded in the checkpoint")
    line = left + position * cell - 2.5
    picture.line([(line, 72), (line, 312)], "cut")
    first = pieces(2, 2, 0, samples)
    for rank, y in enumerate((148, 206)):
        read = [index for index in first[rank] if samples.index(index) < position]
        places = {samples.index(index): index for index in read}
        row(y, places, ("box", "good")[rank], f"process {rank} of 2, batch size 2")
    picture.text(line + 8, 166, "kill -9", "bad-text bold")
    picture.text(line + 8, 186, f"position {position}", "muted small")
    rest = pieces(1, 4, position, samples)[0]
    row(274, {position + n: index for n, index in enumerate(rest)}, "warm", "")
    picture.text(line - 14, 295, "started again on 1 process, batch size 4", "text small", "end")
    picture.text(
        20,
        338,
        "No sample twice, none left out; nothing is read only to be thrown away.",
        "muted small",
    )
    return picture


def files() -> Picture:
    """Draw what a checkpoint of two processes holds, with the sizes of a recorded one."""
    sizes = {words[1]: int(words[0]) for words in map(str.split, _listing())}
    say = {
        "tensors": ("tensors, in safetensors", "model and optimizer, in the shards they have"),
        "manifest": ("written last: the commit", "names every file, its size and checksums"),
        "shared": ("what all processes share", "step, epoch, order, schedulers, callbacks"),
        "r00000": ("of process 0 alone", "its random generators, its place in streams"),
        "r00001": ("of process 1 alone", "its random generators, its place in streams"),
    }
    picture = Picture(
        WIDTH, 92 + 62 * len(sizes), "A checkpoint folder: the manifest, which names the files"
    )
    picture.text(20, 32, "step-00000020, saved by two processes", "text title")
    picture.line([(34, 58), (34, 58 + 62 * (len(sizes) - 1) + 24)])
    for number, (name, size) in enumerate(sizes.items()):
        y = 52 + 62 * number
        part = next(part for part in say if part in name)
        is_commit = part == "manifest"
        picture.rect(48, y, WIDTH - 68, 52, "good" if is_commit else "box", radius=6)
        if not is_commit:
            picture.line([(34, y + 26), (44, y + 26)], "arrow")
        picture.spans(60, y + 21, [(name, "text small bold")], advance=7.4)
        picture.text(WIDTH - 32, y + 21, f"{size / 1e3:.1f} kB", "muted small", "end")
        picture.text(60, y + 41, ": ".join(say[part]), "muted small")
    bottom = 72 + 62 * len(sizes)
    picture.text(20, bottom, "Without a valid manifest.json it is not a checkpoint.", "muted small")
    return picture


def _listing() -> list[str]:
    """Return the lines of the recorded folder: a size and a name each."""
    lines = ["".join(words for words, _ in line) for line in read("files")["lines"]]
    return [line for line in lines if line.endswith((".json", ".safetensors"))]


def layouts() -> Picture:
    """Draw the bytes that a process keeps for each weight, by layout."""
    parts = (("weights", 4, "ours"), ("gradients", 4, "peer"), ("AdamW", 8, "second"))
    rows = (
        ("DDP, any number", 1),
        ("FSDP2 on 2", 2),
        ("FSDP2 on 4, HSDP of 4", 4),
        ("FSDP2 on 8, HSDP of 8", 8),
    )
    picture = Picture(
        WIDTH,
        268,
        "Bytes a process keeps for each weight: 16 with DDP, 8 with FSDP2 on two processes, 4 on "
        "four, 2 on eight",
    )
    picture.text(20, 32, "What a process keeps, in bytes for each weight", "text title")
    left, scale = 205, 22
    for number, (name, shards) in enumerate(rows):
        y = 84 + number * 36
        picture.text(left - 12, y + 15, name, "text", "end")
        x = float(left)
        for _, size, color in parts:
            picture.rect(x, y, size * scale / shards, 20, color, radius=2)
            x += size * scale / shards
        picture.text(x + 10, y + 15, f"{16 / shards:g}", "text bold")
    x = left
    for name, _, color in parts:
        picture.rect(x, 52, 12, 12, color)
        picture.text(x + 18, 63, name, "text small")
        x += 110
    picture.text(
        20,
        248,
        "Weights in fp32; activations and units that are gathered come on top.",
        "muted small",
    )
    return picture
