"""Mixtures of experts, and ranks that share the experts of a model, and therefore step together."""
