"""Which tokens the next step computes: `Scheduler` is the only name that the engine needs."""
