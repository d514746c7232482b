"""Weights that change while an engine runs: updates by a trainer, and exports."""
