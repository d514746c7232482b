"""Constrained decoding: which tokens may come next if an output must be valid JSON, match a pattern, or follow a
grammar.

Clients use it to refuse constraints that can't be compiled, workers to apply them in sampling. Both use llguidance,
which is imported when the first request needs it.
"""
