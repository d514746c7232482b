"""Which block of the KV cache holds what. Knows neither requests nor tensors."""
