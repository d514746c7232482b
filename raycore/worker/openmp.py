"""How OpenMP's threads wait for each other. Import this before torch, whose OpenMP library reads it once, when loaded.

By default a waiting thread spins for as long as it takes. Where another process wants a core, the spinning uses up the
time slice that the computing needs, and every barrier waits a whole slice. Sleeping at once is no better: on a quiet
machine waking up costs a bandwidth-bound decode step a third of its speed. So threads spin for about a millisecond,
which bridges the gaps within a step, and then sleep.
"""

from __future__ import annotations

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")
