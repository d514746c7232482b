"""The options of a rank's workers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from raycore.options.declared import option
from raycore.options.numbers import Count, Seconds, Timeout


class ExecutorConfig(msgspec.Struct, frozen=True):
    """Where a rank's workers run, how the rank's engine calls them, and the timeouts of these calls."""

    backend: Annotated[
        Literal["inline", "ray"],
        option(
            "Where workers run. inline: a rank's only worker runs in the rank's engine process. ray: each worker is a "
            "Ray actor.",
            name="executor_backend",
            default="inline if a rank has one worker, else ray",
        ),
    ]
    transport: Annotated[
        Literal["channel", "actor_call"],
        option(
            "How an engine calls its workers. channel: through Ray's shared-memory channels. actor_call: by Ray actor "
            "calls, which are slower.",
            name="executor_transport",
        ),
    ] = "channel"
    wait: Annotated[
        Literal["adaptive", "spin"],
        option(
            "How processes wait for a message on a channel. adaptive: spin for spin_window_s, then sleep. spin: never "
            "sleep, so that an idle worker keeps a core busy.",
            name="executor_wait",
        ),
    ] = "adaptive"
    spin_window_s: Annotated[Seconds, option("Seconds that a process spins on a channel before it sleeps.")] = 100e-6
    channel_capacity_bytes: Annotated[
        int, Meta(ge=4096), option("Capacity of a channel, in bytes. Larger messages are sent in parts.")
    ] = 1 << 20
    num_threads: Annotated[
        Count | None,
        option(
            "Maximum number of compute threads per worker, on CPUs. While other processes need cores, fewer are used.",
            default="the node's cores divided by the engine's workers on the node",
        ),
    ] = None
    init_timeout_s: Annotated[
        Timeout,
        option(
            "Seconds within which ranks must start, including loading weights. Otherwise the start of the engine, or "
            "the restart of the rank, has failed."
        ),
    ] = 600.0
    execute_timeout_s: Annotated[
        Timeout,
        option(
            "Seconds within which workers must reply to a call. A step that takes longer fails the rank, unless the "
            "shorter step_timeout_s has done so before. Other late calls raise RpcTimeout. Does not apply to inline "
            "workers."
        ),
    ] = 300.0
    shutdown_timeout_s: Annotated[
        Seconds,
        option(
            "Seconds that ranks and their workers have to stop when the engine is shut down. Then they are killed.",
            flags=("--worker-shutdown-timeout-s",),
        ),
    ] = 5.0
    gc_debug: Annotated[
        Annotated[int, Meta(ge=0, le=1000)] | None,
        option(
            "Log each garbage collection of Python in the processes of ranks and workers: its generation, its "
            "milliseconds, how many objects it collected, and as many of the most common types among the objects that "
            "it looked at as this number. Naming types makes collections several times slower; 0: none. None: no log.",
        ),
    ] = None
