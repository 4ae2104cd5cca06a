"""Loading: open a checkpoint, match its names, verify and read.

`load.load` reads all of it, into tensors of the caller or new ones, and `lazy.open_checkpoint` what
is asked for. `source` plans the reads, `transfer` carries them out and compares each part with its
checksum, `share` divides what must be verified between ranks, `selection` matches names, `files`
compares the folder with the manifest, and `verify` reads a whole checkpoint and keeps nothing.

All names, shapes and dtypes are checked before the first tensor of the caller
changes. From then on an error is a `TornLoadError`, since the state may be a mixture.
"""

from checkpoint_io.loader.files import check_sizes as check_sizes
from checkpoint_io.loader.files import manifest_of as manifest_of
from checkpoint_io.loader.lazy import views_in as views_in
from checkpoint_io.loader.selection import renamer as renamer
from checkpoint_io.loader.selection import selector as selector
from checkpoint_io.loader.source import Source as Source
from checkpoint_io.loader.transfer import Bytes as Bytes
from checkpoint_io.loader.transfer import Want as Want
