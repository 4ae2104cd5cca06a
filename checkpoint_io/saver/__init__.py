"""Saving: who writes what, the writing, the commit."""
