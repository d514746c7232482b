"""Constrained decoding: which tokens may come next if an output must be valid JSON, match a pattern, or follow a
grammar.

Clients use this package to refuse constraints that can't be compiled. Workers use it to apply constraints in sampling.
The package uses llguidance, which is imported when the first request needs it.
"""
