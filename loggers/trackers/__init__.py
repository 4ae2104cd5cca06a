"""The built-in trackers, one per file.

`loggers.registry` finds them by name, and a `TrackerHub` calls each on a thread of its own. Those
that resume a run extend `ContinuingTracker` of ``tool.py``: `LineTracker` for files of lines,
`ToolTracker` for a package with an object of its own, `ItemTracker` for one that takes an image or
text at a time.

None may import its package before ``start``, draw from ``random`` (`preserve_random_state`), or
drop a row in silence: what cannot be written is an error, which the hub counts and tries again.
"""
