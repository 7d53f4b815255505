"""How `safe-rope scan` does on whole releases of transformers."""
