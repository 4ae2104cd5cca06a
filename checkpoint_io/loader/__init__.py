"""Load checkpoints: open, match, verify, read."""

from checkpoint_io.loader.files import check_sizes as check_sizes
from checkpoint_io.loader.files import manifest_of as manifest_of
from checkpoint_io.loader.lazy import views_in as views_in
from checkpoint_io.loader.selection import renamer as renamer
from checkpoint_io.loader.selection import selector as selector
from checkpoint_io.loader.source import Source as Source
from checkpoint_io.loader.transfer import Bytes as Bytes
from checkpoint_io.loader.transfer import Want as Want
