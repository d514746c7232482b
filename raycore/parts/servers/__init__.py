"""Several servers whose ranks share the experts of a model: each has an engine of its own for some of the ranks."""
