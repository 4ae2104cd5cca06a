"""Folders of checkpoints: discovery, fallback, retention.

`folder.CheckpointFolder` is the entry: it saves `step-00000042` and so on, finds the latest that
can be loaded, and removes old ones by a `retention.KeepPolicy`. `discovery` lists a folder,
`removal` takes checkpoints away, `sealed` guards folders that other programs write.

A checkpoint exists by its manifest: that goes first where one is removed, so that a kill leaves an
unfinished one and not a damaged one. A file that no save of ours has written is never removed, nor
what a killed save of another run has left.
"""

from checkpoint_io.folder.removal import extra_files as extra_files
from checkpoint_io.folder.removal import remove_all as remove_all
from checkpoint_io.folder.removal import remove_checkpoint as remove_checkpoint
