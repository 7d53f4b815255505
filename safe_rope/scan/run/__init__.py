"""A run over files: which ones, what counts in them, what is remembered, and the rules over each."""
