"""A simulated Ray: nodes, a control store, actors, placement groups and messages, in a world that a seed decides."""
