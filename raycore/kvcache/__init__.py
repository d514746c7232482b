"""Bookkeeping of KV cache blocks: references, prefixes, eviction. Knows neither requests nor tensors."""
