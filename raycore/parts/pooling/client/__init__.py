"""Requests for pooling: their parameters, the pairs that are scored, the calls of `LLM`."""
