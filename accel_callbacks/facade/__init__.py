"""The methods of Accelerator, by theme; each only delegates to the part that does the work."""
