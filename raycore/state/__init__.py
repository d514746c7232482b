"""Layers whose memory of a sequence is a state of a fixed size, instead of keys and values of each token."""
