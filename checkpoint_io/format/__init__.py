"""The format: manifest, state trees and tensor files, with strict parsing of each.

`manifest` has the document that names all files with their checksums, and `parse` reads it; `tree`
encodes a state as JSON and back; `safetensors` lays out and parses tensor files; `names` are those
of files. The format is written down in docs/reference/checkpoint-format.md.

Whatever is read may be damaged or hostile: a field is checked before it is used, and a size before
memory is reserved for it. A new version writes the same bytes, or has another version number, and
what earlier versions wrote is still read. Nothing here opens a file, and nothing is pickled.
"""

from checkpoint_io.format.names import MANIFEST as MANIFEST
from checkpoint_io.format.names import new_save_id as new_save_id
from checkpoint_io.format.names import save_id_of as save_id_of
from checkpoint_io.format.names import temporary_name as temporary_name
from checkpoint_io.format.parse import parse_manifest as parse_manifest
