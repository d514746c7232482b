"""Blocks of the KV cache that one rank reads from another."""
