"""A small model with rotary positions, and the patch that protects it."""
