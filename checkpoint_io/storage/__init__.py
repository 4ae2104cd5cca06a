"""Storage backends: local disks, S3, and everything else that fsspec reaches."""

from checkpoint_io.storage.base import local_path as local_path
from checkpoint_io.storage.base import protocol_of as protocol_of
from checkpoint_io.storage.local import make_folders as make_folders
from checkpoint_io.storage.open import Store as Store
from checkpoint_io.storage.open import open_store as open_store
