"""Folders of checkpoints: discovery, fallback, retention."""

from checkpoint_io.folder.removal import extra_files as extra_files
from checkpoint_io.folder.removal import remove_all as remove_all
from checkpoint_io.folder.removal import remove_checkpoint as remove_checkpoint
