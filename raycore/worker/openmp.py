"""Sets how OpenMP's threads wait. Import this before torch: its OpenMP library reads the environment once, at load.

By default a waiting thread spins without limit. If another process needs the core, the spinning thread uses up a time
slice that the computing thread needs, and every barrier can take a whole slice. Sleeping at once is no better: on an
idle machine the wake-ups cost a bandwidth-bound decode step a third of its speed. So threads spin for about a
millisecond, which covers the gaps within a step, and then sleep.
"""

from __future__ import annotations

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")
