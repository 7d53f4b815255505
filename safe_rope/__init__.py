"""Position embeddings that stay what their authors meant."""
