"""The process group, process control, votes, and failures shared between ranks."""
