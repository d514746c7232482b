"""The interface of a scheduler: the methods that the class in the option `scheduler_cls` must have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from raycore.cache_layout import CacheLayout
from raycore.class_paths import import_class
from raycore.config import CacheConfig, SchedulerConfig
from raycore.config.states import StateRows
from raycore.messages import EngineRequest, LoadView, StepPlan, StepResult
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.parts.images.config import EncoderLimits
from raycore.plugins import SCHEDULERS
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from raycore.parts.transfers.config.kv_transfer import KVTransferConfig
    from raycore.parts.transfers.connectors.connector import SchedulerConnector
    from raycore.parts.transfers.connectors.events import KVCacheEvent


class SchedulerProtocol(Protocol):
    """Decides what each step of one rank computes. All its methods are called from one thread.

    Most custom schedulers subclass `raycore.scheduler.scheduler.Scheduler` and override a few methods. An error that a
    method raises, except where the method lists it, ends the rank.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        num_blocks: int,
        vocab_size: int,
        *,
        tells_tokens: bool = False,
        num_turns: int = 1,
        speculation: Speculation | None = None,
        max_adapters: int = 0,
        layout: CacheLayout | None = None,
        state_rows: StateRows | None = None,
        connector: tuple[SchedulerConnector, KVTransferConfig] | None = None,
        kv_events: list[KVCacheEvent] | None = None,
        encoder: EncoderLimits | None = None,
        waits_for_output: bool = False,
    ) -> None:
        """Create a scheduler without requests.

        Subclasses of `Scheduler` get its arguments instead: `parts` has what is made of `speculation`, `max_adapters`,
        `state_rows`, `connector`, `kv_events` and `encoder`.

        Args:
            num_blocks: number of KV cache blocks on every worker.
            vocab_size: size of the model's vocabulary. Token ids are smaller.
            tells_tokens: plans say which tokens they compute (`StepPlan.tokens`), because not every worker samples.
            num_turns: number of steps that decodes take turns in, so that all stages of a pipeline have work.
            speculation: guesses the next tokens of decodes. None: nothing does. A scheduler may ignore it.
            max_adapters: maximum number of different LoRA adapters that running requests use.
            layout: the groups of layers that share the blocks. None: there is one, which keeps all tokens.
            state_rows: the rows of states on the workers. Only given for models whose layers keep states: there,
                requests can reuse cached blocks only up to where a state was kept (`StepPlan.states`).
            connector: the scheduler's side of the KV connector, and its settings. Only given if there is one: the
                scheduler calls its hooks, and completes plans with `StepPlan.transfer`.
            kv_events: gets the KV events, in order. Only given if somebody wants them.
            encoder: the limits of what a step encodes. Only given for models that take images: there, plans say what is
                encoded (`StepPlan.encoder`).
            waits_for_output: a request's next token may only be planned when the last one has arrived. Only given if
                workers have logits processors that users wrote.
        """
        ...

    def submit(self, request: EngineRequest, *, is_held: bool = False) -> None:
        """Add a request. With `is_held`, it must not be scheduled before it is released.

        Raises:
            InvalidRequest: the request is invalid or could never run. Other requests are not affected.
        """
        ...

    def release(self, seq_ids: Iterable[int]) -> None:
        """Let requests that were held be scheduled. Called before each step, often without requests."""
        ...

    def give_adapter(self, seq_id: int, adapter_slot: int, load_id: int) -> None:
        """Note where the workers hold the LoRA adapter of a request that is held.

        Args:
            adapter_slot: goes into `NewRequest.adapter`.
            load_id: cached prefixes are only shared by requests that use the same load of an adapter.
        """
        ...

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End requests without further output. Unknown seq_ids are ignored."""
        ...

    def seq_ids_of(self, client: int) -> list[int]:
        """Return the seq_ids of all requests of the client with the index `client`."""
        ...

    def seq_ids_in_flight(self, step: int) -> list[int]:
        """Return the seq_ids of the requests in the plan of `step`, for error messages. Empty if it isn't in flight."""
        ...

    def take_turns(self, num_turns: int) -> None:
        """Let decodes take turns in another number of steps. No step is in flight."""
        ...

    def has_work(self) -> bool:
        """Whether any request is waiting or running. Requests that are held don't count."""
        ...

    def load(self) -> LoadView:
        """Return the current load, and counters since the start. Called after each step."""
        ...

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Clear the prefix cache, and return whether that was done.

        While requests run, do nothing, unless `reset_running_requests` says to preempt them.
        """
        ...

    def reset_encoder_cache(self) -> None:
        """Have the workers drop the embeddings of all features. Only called for models that take images."""
        ...

    def take_identity(self, identity: bytes) -> None:
        """Note what the workers' results are known by from now on: see `raycore.parts.transfers.connectors.identity`.

        Requests that begin find only blocks and embeddings of the same identity. None runs now.
        """
        ...

    def start_over(self) -> None:
        """Preempt all running requests. Called when the workers have lost the whole KV cache and all slots."""
        ...

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Return None if there is nothing to compute until a result or a request arrives.

        Several steps may be in flight (`EngineConfig.max_steps_in_flight`). `StepPlan` says what the workers do with a
        plan. Each step's number must be one more than the last one's.
        """
        ...

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Apply the result of the oldest plan in flight to the requests, and return what their clients get."""
        ...


def load_scheduler_class(config: SchedulerConfig) -> type[SchedulerProtocol] | type[Scheduler]:
    """Return the class that `scheduler_cls` names, by default raycore's own.

    Raises:
        InvalidConfig: the class can't be imported.
    """
    if config.scheduler_cls is not None:
        return import_class("scheduler_cls", config.scheduler_cls, SCHEDULERS)
    return Scheduler
