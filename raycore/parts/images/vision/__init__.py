"""Encoders of images, and what a step does with their embeddings."""
