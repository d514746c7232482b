"""A worker whose model is a pure function of numbers: each token depends on all that has to be right."""
