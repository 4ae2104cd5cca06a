"""Images, audio, tables and other media: converted, encoded, written to files."""
