"""Adapters as the models of a server: at its start, and by requests."""
