"""Guesses of requests' next tokens from tokens that there are. Schedulers and workers make them."""
