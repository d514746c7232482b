"""The real engine of one rank over a simulated worker, without Ray: `python -m simulation.engine --seeds 0 100`."""
