"""The real engine over simulated workers, without Ray: `python -m simulation.engine --seeds 0 100`."""
