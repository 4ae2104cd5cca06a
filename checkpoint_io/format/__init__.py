"""The format: manifest, state trees and tensor files, with strict parsing of each."""

from checkpoint_io.format.manifest import same_manifest as same_manifest
from checkpoint_io.format.names import MANIFEST as MANIFEST
from checkpoint_io.format.names import new_save_id as new_save_id
from checkpoint_io.format.names import save_id_of as save_id_of
from checkpoint_io.format.names import temporary_name as temporary_name
from checkpoint_io.format.parse import parse_manifest as parse_manifest
