"""Read a journal without accel_callbacks, with NumPy alone: python examples/read_journal.py RUN

The format is in docs/reference/journal.md. Checksums are verified where xxhash is installed.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

try:
    from xxhash import xxh32_intdigest
except ImportError:
    xxh32_intdigest = None

HEADER = struct.Struct("<8sHHIIId16sI")
NAMES = ("magic", "version", "row_size", "rank", "world_size", "attempt", "time", "run_id", "sum")
ROW = np.dtype(
    [("step", "<u8"), ("epoch", "<u4"), ("batch", "<u4"), ("position", "<u8")]
    + [(name, "<f8") for name in ("loss", "gradient_norm", "learning_rate", "time")]
    + [(name, "<u4") for name in ("losses", "learning_rates", "generators", "host_generators")]
    + [(name, "<f4") for name in ("data_s", "save_s", "evaluation_s", "step_s", "forward_s")]
    + [("micro_batches", "<u2"), ("flags", "<u2"), ("checksum", "<u4")]
)


def is_whole(row):
    """Whether the last 4 bytes are the checksum of those before."""
    if xxh32_intdigest is None:
        return bool(row.strip(b"\0"))
    return xxh32_intdigest(row[:-4]) == int.from_bytes(row[-4:], "little")


def read_rows(path):
    """Return the header and the rows of a file; a torn end is left out."""
    data = Path(path).read_bytes()
    header = dict(zip(NAMES, HEADER.unpack_from(data), strict=True))
    if (header["magic"], header["version"], header["row_size"]) != (b"accelJNL", 1, ROW.itemsize):
        raise ValueError(f"{path} is no journal of version 1")
    body = data[HEADER.size :]
    rows = [body[at : at + ROW.itemsize] for at in range(0, len(body), ROW.itemsize)]
    while rows and (len(rows[-1]) < ROW.itemsize or not is_whole(rows[-1])):
        rows.pop()
    if not all(map(is_whole, rows)):
        raise ValueError(f"{path} is damaged")
    return header, np.frombuffer(b"".join(rows), ROW)


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("journal/*/attempt-*-rank-00000.rows")):
        header, rows = read_rows(path)
        marks = path.with_name(f"attempt-{header['attempt']:04}.jsonl").read_text().splitlines()
        print(path, [json.loads(mark)["kind"] for mark in marks])
        for row in rows:
            print(f"step {row['step']}  epoch {row['epoch']}  loss {row['loss']:.6g}")
