"""Models that transformers' modelling code computes, for architectures that raycore has no family for."""
