"""Pauses an engine in all modes, again and again, while 64 streams run and ranks break, and reports what came of it.

The engine has two data-parallel ranks with two workers each. Streams are greedy and seeded; they run once undisturbed,
and then again and again. Pauses come in the modes `keep`, `wait` and `abort`. While the engine is being paused, is
paused or is being resumed, engines and workers are killed (SIGKILL), stopped (SIGSTOP) or made to raise.

    python -m tests.chaos.pauses

Every stream has to finish with the result of the undisturbed run. A stream that a pause aborts has to end with the
finish reason `abort` and the beginning of that result; it is then submitted again. No output may come from the return
of `pause_generation` to the call of `resume_generation`.

The exit status is 1 if a stream was lost, a result differs, an output came in a pause, a rank stays broken, or anything
is left behind.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from common import table

from chaos.clusters import Cluster
from chaos.faults import process_kinds
from chaos.interruptions import PAUSES
from chaos.report import disturbance_rows, print_lost
from chaos.run import DisturbedRun, add_options, pace_of, start_engine
from chaos.workload import make_requests

DP, TP = 2, 2


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(fault_interval_s=1.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--pauses", type=int, default=50, help="repeat the streams until there were this many pauses")
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = Cluster(DP, TP)
    llm = start_engine(args, DP, tensor_parallel_size=TP, batch_invariant=True)
    streams = [request._replace(is_stream=True) for request in make_requests(args.streams, args.seed)]
    run = DisturbedRun(llm, cluster, process_kinds(1), pace_of(args, PAUSES), streams, args.streams, args.seed)
    run.run(lambda run: run.interrupter.num_done >= args.pauses)
    rows = [["", f"DP {DP}, TP {TP}, {args.streams} streams"], *disturbance_rows(run)]
    print(table([*rows, ["left behind", ", ".join(run.left) or "nothing"]]), flush=True)
    print_lost(run)
    sys.exit(not run.is_good())


if __name__ == "__main__":
    main()
