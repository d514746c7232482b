"""Which experts computed a request's tokens, returned with its outputs."""
