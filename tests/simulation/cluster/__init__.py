"""A whole engine in the simulated world: driver, ranks, workers, callers, operators, and what breaks."""
