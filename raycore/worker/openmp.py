"""How OpenMP's threads wait for each other. Import this before torch, whose OpenMP library reads it once, when loaded.

By default a waiting thread spins. Where any other process wants a core, the spinning uses up the time slice that
the computing needs, and the next barrier waits a whole slice for it: with two threads on two busy cores a decode step
was seen to take 10 to 40 times as long. Sleeping threads cost a few µs a barrier and are woken at once.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
