"""The options of the scheduler."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.class_paths import as_class_path
from raycore.options.declared import option
from raycore.options.numbers import Count, whole_number

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048


def _scheduler_path(scheduler_cls: str | type[Any] | None) -> str | None:
    return as_class_path("scheduler_cls", scheduler_cls)


class SchedulerConfig(msgspec.Struct, frozen=True):
    """The limits of a step, and the order in which requests are scheduled."""

    max_num_seqs: Annotated[
        int,
        Meta(ge=1),
        option(
            "Maximum number of sequences that a rank runs concurrently. At most max_num_batched_tokens.",
            default=f"{DEFAULT_MAX_NUM_SEQS}, or max_num_batched_tokens if that is less; of models whose layers keep a "
            "state, as many as have states of 1 GiB together",
            is_common=True,
        ),
    ]
    max_num_batched_tokens: Annotated[
        int,
        Meta(ge=1),
        option(
            "Maximum number of tokens that a rank computes in one step. 4k is 4000, and 4K is 4096.",
            default=f"{DEFAULT_MAX_NUM_BATCHED_TOKENS}, or max_num_seqs if that is more",
            expected="a positive integer, also as 4k or 4K",
            convert=whole_number,
        ),
    ]
    max_model_len: int
    policy: Annotated[
        Literal["fcfs", "priority"],
        option(
            "Order in which waiting requests start. fcfs: first come, first served. priority: lowest `priority` of "
            "the request first.",
            name="scheduling_policy",
        ),
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        int,
        Meta(ge=0),
        option("Maximum number of one prompt's tokens in a step. 0: limited only by max_num_batched_tokens."),
    ] = 0
    async_scheduling: Annotated[
        bool | None,
        option(
            "Plan and start the next step while the device still computes the last one. On CPUs this costs more than "
            "it saves. With several stages, one more step than there are stages is in flight.",
            default="True with device=cuda or several stages, unless tokens are guessed; else False",
        ),
    ] = None
    max_concurrent_batches: Annotated[
        Count | None,
        option(
            "Number of steps that a rank may start before it takes the first one's result. More than 1 is async "
            "scheduling.",
            default="the number of stages; one more with async scheduling",
        ),
    ] = None
    disable_hybrid_kv_cache_manager: Annotated[
        bool,
        option(
            "Keep the keys and values of all tokens in all layers, also in those with a sliding window, which see only "
            "the last ones. Otherwise such layers free blocks that they see no more, and use fewer blocks."
        ),
    ] = False
    scheduler_cls: Annotated[
        str | None,
        option(
            "A class to use instead of raycore's Scheduler, as package.module.Class, or the name of a plugin. It has "
            "the methods of raycore.scheduler.protocol.SchedulerProtocol. All nodes must be able to import it.",
            metavar="CLASS",
            default="raycore's Scheduler",
            expected="a class, or its package.module.Class",
            convert=_scheduler_path,
        ),
    ] = None
    stream_interval: Annotated[
        Count,
        option(
            "Number of new tokens with which a stream gets its next output, after the first one. Requests in Python "
            "may ask for more."
        ),
    ] = 1
    fits_max_model_len: bool = False
    """Whether ranks lower `max_model_len` to what their KV caches hold."""
    computes_whole_prompts: bool = False
    """Whether a prompt's tokens are all computed in one step, as encoders need it."""
