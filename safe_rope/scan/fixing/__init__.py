"""Fixes: the edits that a rule proposes, and their application to a whole file."""
