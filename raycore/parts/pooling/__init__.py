"""Embeddings, classes and scores instead of text."""
