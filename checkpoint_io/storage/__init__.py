"""Storage backends: local disks, S3, and everything else that fsspec reaches.

`open.open_store` returns the `base.Store` of a URL: one folder, whose files are created, read by
ranges, listed and removed. `local` has that of a disk, `s3` that of stores with its protocol, and
`fsspec_store` that of all others. `lease` says which process may write to a folder.

A file is whole and durable once the block of `create` has ended, and not there if it raised.
`replace` puts the manifest in place on the condition that the one before is still there, as far as
the store can. Never follow a link in a folder, and never send a request again that may have taken
effect, unless that changes nothing. An error names the URL and what to do.
"""

from checkpoint_io.storage.base import protocol_of as protocol_of
from checkpoint_io.storage.open import Store as Store
from checkpoint_io.storage.open import open_store as open_store
