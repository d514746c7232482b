"""Drafts that a model computes: guesses of the tokens that requests get next."""
