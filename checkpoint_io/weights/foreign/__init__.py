"""Readers of weights in files that torch and DeepSpeed have written."""
