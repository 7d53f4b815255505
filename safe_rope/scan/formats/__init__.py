"""The output formats of `safe-rope scan`, one file each; every one returns text for stdout."""
