"""The patches that come with safe_rope: one file for each family of architectures.

Each file holds a `safe_rope.registry.RopePatch` that the entry-point group ``safe_rope.patches`` names.
"""
