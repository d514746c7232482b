"""A world of one real thread: simulated threads, processes and time, whose order a seed decides."""
