"""Constrained outputs: valid JSON, matches of a pattern, sentences of a grammar, and limits of a model's reasoning."""
