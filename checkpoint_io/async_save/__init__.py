"""Save in the background, while training continues."""
