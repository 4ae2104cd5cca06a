"""Commands to a run that goes on."""
