"""Measure the position tables of a live model, and of a config on every load path."""
