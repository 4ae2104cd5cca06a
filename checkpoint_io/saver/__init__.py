"""Saving: plan what each rank writes, write it, commit it."""
