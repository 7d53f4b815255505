"""Measurements and surveys of safe_rope: one folder for each subcommand of `tools/lab`."""
