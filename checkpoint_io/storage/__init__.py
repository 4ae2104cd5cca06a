"""Storage backends: local disks, S3, and everything else that fsspec reaches."""

from checkpoint_io.storage.base import protocol_of as protocol_of
from checkpoint_io.storage.open import Store as Store
from checkpoint_io.storage.open import open_store as open_store
