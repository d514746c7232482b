"""Heads that draft: networks of one layer, which read hidden states of their target."""
