"""Saving while training goes on."""
