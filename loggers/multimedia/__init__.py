"""Images, audio, tables and other media: converted, encoded, written to files.

The hub takes snapshots and converts them (``convert``), and trackers encode what they get
(``encode``) and write it (``files``). Only ``check_shape``, ``snapshot`` and ``size_of`` run on the
thread that trains: nothing else here may be called on it, as it would wait for the device or for
Pillow.
"""
