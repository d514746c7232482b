"""Sets how OpenMP's threads wait. Import this module before torch, whose OpenMP library reads the setting when it is
loaded.

By default, a waiting thread spins for a long time. If another process needs the core, the spinning thread uses up time
slices that computing threads need, and each barrier can take a whole time slice. If threads sleep at once instead, then
on an idle machine the wake-ups reduce the speed of a decode step, which is bound by memory bandwidth, by a third. So
threads spin for about a millisecond, which covers the gaps within a step, and then sleep.
"""

from __future__ import annotations

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")
