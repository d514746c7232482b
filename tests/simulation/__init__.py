"""The real control plane in a simulated world, in which a seed decides what happens and in which order."""
