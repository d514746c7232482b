"""The interface of KV connectors: what moves keys and values of blocks between the KV cache and other places.

A connector has two sides. The scheduler's side decides, in the engine's process: what is elsewhere, what is saved, and
when blocks may be freed. The worker's side, in each worker's process, has the tensors and moves bytes. The hooks have
vLLM's names, and mean the same, so that connectors move from one to the other without another design. What the two
sides tell each other is bytes, encoded as they please: the scheduler's side with the plan of a step, the worker's side
with the step's result.

A connector never sees requests with LoRA adapters, or ones that return log probabilities or hidden states of their
prompts. This module doesn't import torch.

Layers of a model may be divided into groups (`raycore.cache_layout`), each of which has blocks of its own. A connector
that sets `KVConnector.knows_groups` overrides the hooks whose names end with `_all_groups` or `_of_group`. For all
others, there is one group, in which windows only mask, and the hooks without these endings are called.

Where layers keep a state for each sequence instead, the states of prefixes are blocks, too, of one or more groups after
those of the cache (`KVCacheConfig.num_state_parts`). Their ids come after those of the cache's blocks, and `KVCaches`
reads and writes them alike. A prefix needs the last block of each of these groups, which has the state after all its
tokens; few prefixes have one. Loads are asynchronous there. Only a connector that sets `KVConnector.knows_states` is
used with such models.
"""

# ruff: noqa: B027  # hooks that do nothing are for connectors that don't need them

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from raycore.cache_layout import KVCacheConfig
from raycore.class_paths import import_class
from raycore.config import EngineConfig
from raycore.errors import InvalidConfig
from raycore.messages import StepPlan, TransferResult
from raycore.plugins import KV_CONNECTORS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from raycore.kvcache.cache_log import CacheLog
    from raycore.parts.transfers.connectors.events import KVCacheEvent
    from raycore.parts.transfers.connectors.worker_side.caches import KVCaches


UNSPECIFIED = "external_unspecified"
BlockIds = Sequence[Sequence[int]]
"""By group: a request's blocks, from its first token on. `raycore.kvcache.block_table.NO_BLOCK` where it has none: a
group with a window only has those that later tokens see."""


class ConnectorSetup(NamedTuple):
    """What a connector is made for: one side of it, in one process."""

    config: EngineConfig
    cache: KVCacheConfig
    dp_rank: int
    num_workers: int
    """Number of workers of the rank."""
    worker: int | None = None
    """On a worker's side, which of them: `WorkerRank.worker`. None: on the scheduler's side."""

    @property
    def extra(self) -> dict[str, Any]:
        """`kv_connector_extra_config`."""
        transfer = self.config.kv_transfer_config
        assert transfer is not None, "there is a connector"
        return transfer.kv_connector_extra_config


class TransferRequest(Protocol):
    """What a connector may read of a request. It must change nothing."""

    @property
    def seq_id(self) -> int:
        """What reports are about. Unique in the rank until the request has ended and its blocks are freed."""
        ...

    @property
    def request_id(self) -> str:
        """The client's name of the request."""
        ...

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32: the tokens of prompt and output. Not up to date while the request runs."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """When the request has left its blocks: how many of its first tokens they have keys and values of."""
        ...

    @property
    def digests(self) -> list[bytes]:
        """Of its first full blocks, as many as are known: at least those without its last token, while it waits.

        A digest covers a block's tokens and all before them. In all engines with the same `block_size`, equal digests
        mean equal tokens, images, cache salts and weights. `KVCaches.layout` says what the bytes mean.
        """
        ...

    @property
    def is_aborted(self) -> bool:
        """Whether nobody wants the request any more."""
        ...

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What the caller tells the connector: `extra_args["kv_transfer_params"]` of its `SamplingParams`."""
        ...

    @property
    def hints(self) -> dict[str, Any] | None:
        """What the router of raycore's own client tells `PeersConnector` of blocks on other ranks."""
        ...

    @property
    def hands_over(self) -> bool:
        """Whether that client sends the request to another rank when its first token is there."""
        ...


class SchedulerConnector(ABC):
    """The scheduler's side of a connector. All methods are called on the engine's thread, and none may block."""

    addresses: Sequence[str] = ()
    """How workers of other ranks reach those of this one, for clients, which tell the other ranks. Set by the end of
    `set_xfer_handshake_metadata`. Empty: they don't."""
    cache_log: CacheLog | None = None
    """What clients are told of the prefix cache, to route requests by it. None: they guess."""

    # ---- requests

    def on_new_request(self, request: TransferRequest) -> None:
        """Note that a request has been submitted. `request_finished` says when it has ended."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `num_computed_tokens` are elsewhere, and how they come.

        May be called repeatedly for a request, and must change nothing that matters.

        Args:
            num_computed_tokens: number of tokens that the prefix cache has: a multiple of the block size.

        Returns: the number of tokens, and whether they come asynchronously. None: it isn't known yet, so the request is
            asked about again before the next step. Synchronous: the metadata of the next plan loads them before the
            step's tokens are computed, and their number is a multiple of the block size. Asynchronous: the request
            waits with its blocks until all workers have reported it in `get_finished`.
        """

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Note the blocks of a request whose offer was taken.

        Args:
            block_ids: the request's blocks, from its first token on.
            num_external_tokens: how many of the offered tokens are loaded. May be fewer than were offered, and is a
                multiple of the block size then.
        """

    def get_external_cache_hit_sources(self, request: TransferRequest, num_external_tokens: int) -> Mapping[str, int]:
        """Say where the tokens were that were loaded for a request, for metrics: `host`, `disk`, `p2p` (on another rank
        or engine) or `external_unspecified`. Called when the request begins."""
        return {UNSPECIFIED: num_external_tokens}

    def request_finished(
        self, request: TransferRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request has ended, or was aborted, before its blocks are freed.

        Args:
            block_ids: its blocks. There are none if it doesn't run.

        Returns: whether the blocks must stay until all workers have reported the request as sent, and what the caller
            gets as `kv_transfer_params` of the sequence's output: a dict that msgpack can encode.
        """
        return False, None

    def give_up_send(self) -> int | None:
        """Return the seq_id of a request whose blocks were kept, and needn't be kept any longer. None: there is none.

        Called, again and again, while a request lacks blocks. Workers may still report the end of that send, if no
        blocks of the request are kept again.
        """
        return None

    def request_preempted(self, request: TransferRequest, block_ids: Sequence[int]) -> bool:
        """Note that a running request loses its blocks, and will be computed again.

        Returns: whether the blocks must stay until all workers have reported the request as sent.
        """
        return False

    # ---- the same, with the blocks of all groups of layers

    def update_state_after_alloc_all_groups(
        self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """See `update_state_after_alloc`. Of a model with windows or states, an offer is taken as a whole."""
        self.update_state_after_alloc(request, block_ids[0], num_external_tokens)

    def request_finished_all_groups(
        self, request: TransferRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished`. Without blocks, each group has an empty list."""
        return self.request_finished(request, block_ids[0])

    def request_preempted_all_groups(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        """See `request_preempted`."""
        return self.request_preempted(request, block_ids[0])

    def blocks_stored_of_group(
        self, request: TransferRequest, digests: Sequence[bytes], block_ids: Sequence[int], first: int, group: int
    ) -> None:
        """See `blocks_stored`. The blocks of a prefix are stored in each group."""
        self.blocks_stored(request, digests, block_ids, first)

    def block_removed_of_group(self, digest: bytes, group: int) -> None:
        """See `block_removed`."""
        self.block_removed(digest)

    def load_abandoned(self, request: TransferRequest) -> None:
        """Note that a request no longer waits for what is loaded: it was aborted, or it has waited for too long.

        Its blocks stay until all workers have reported it in `get_finished`.
        """

    # ---- blocks of the prefix cache

    def blocks_stored(
        self, request: TransferRequest, digests: Sequence[bytes], block_ids: Sequence[int], first: int
    ) -> None:
        """Note that blocks were added to the prefix cache: from the request's block `first` on.

        Their content is complete before the plan that is built next is computed, and stays the same until then at
        least.
        """

    def block_removed(self, digest: bytes) -> None:
        """Note that the prefix cache has removed a block. The plan that is built may overwrite it."""

    def cache_cleared(self) -> None:
        """Note that the prefix cache has been cleared."""

    def cache_lost(self) -> None:
        """Note that the workers have given up the cache: blocks have no content, and nothing reads or writes them.

        All loads are over, and no blocks are kept for the connector any more.
        """

    # ---- steps

    @abstractmethod
    def build_connector_meta(self, plan: StepPlan) -> bytes | None:
        """Return what the workers are told with this plan, which is otherwise complete. None: nothing."""

    def update_connector_output(self, result: TransferResult) -> None:
        """Take in what workers have reported, after it was applied to the requests."""

    def observe_step(self, num_tokens: int, duration_s: float) -> None:
        """Note how long a step has taken, from its plan to its result."""

    def has_pending_push_work(self) -> bool:
        """Whether workers have to be told something soon, although no request has work."""
        return False

    # ---- all else

    def get_finished_count(self) -> int | None:
        """How many workers must report a request before it counts. None: all."""
        return None

    def take_events(self) -> list[KVCacheEvent]:
        """Return the KV events of the connector's own places since the last call."""
        return []

    def set_xfer_handshake_metadata(self, metadata: dict[int, bytes]) -> None:
        """Take in what the workers' sides have told at the start, by worker."""

    def take_identity(self, identity: bytes) -> None:
        """Note that digests of requests that begin have another value in them: at the start, and when weights change.

        Digests with the value before are never asked for again, unless the same weights come back.
        """

    def reset_cache(self) -> bool:
        """Forget everything that is elsewhere. Returns whether that was done."""
        return False

    def shutdown(self) -> None:
        """Free what the scheduler's side holds. Idempotent."""


class WorkerConnector(ABC):
    """The worker's side of a connector. All methods are called on the worker's thread.

    In each step, in this order: `bind_connector_metadata` if the plan has metadata, `start_load_kv`, for each layer
    `wait_for_layer_load` and `save_kv_layer` around its attention, `wait_for_save`, `get_finished`,
    `get_block_ids_with_load_errors`, `build_connector_worker_meta` and `clear_connector_metadata`.
    """

    has_layer_hooks: bool = False
    """Whether `wait_for_layer_load` and `save_kv_layer` do anything. They cost time in each layer, and CUDA graphs."""
    metadata: bytes | None = None
    """The metadata of the current step."""

    @abstractmethod
    def register_kv_caches(self, caches: KVCaches) -> None:
        """Take in the KV cache's tensors. Called again when the cache was given up and allocated again."""

    def release_kv_caches(self) -> None:
        """Give up the KV cache's tensors. When this returns, nothing reads or writes them, and no load is under way."""

    def bind_connector_metadata(self, metadata: bytes) -> None:
        """Take in what the scheduler's side tells with the step."""
        self.metadata = metadata

    def clear_connector_metadata(self) -> None:
        """Forget it at the end of the step."""
        self.metadata = None

    @abstractmethod
    def start_load_kv(self, plan: StepPlan) -> None:
        """Load what the step needs, and start what is asynchronous. Called before the step, in each step.

        What is asynchronous must be reported in `get_finished`, with a deadline of the connector's own.
        """

    def wait_for_layer_load(self, layer: int) -> None:
        """Wait until what the step needs of a layer has been loaded, with its page in `KVCaches.beside`, if it has one.

        `layer`: as in `KVCaches.groups`.
        """

    def save_kv_layer(self, layer: int) -> None:
        """Start to save a layer's blocks, which now have the step's keys and values, with its page in
        `KVCaches.beside`, if it has one."""

    def wait_for_save(self) -> None:
        """Wait until the blocks that later steps may overwrite have been saved. Called after each step."""

    def get_finished(self) -> tuple[list[int], list[int]]:
        """Return the seq_ids of requests that were sent, and of those that were loaded, since the last call.

        Only of those whose blocks are kept for it: see `SchedulerConnector.request_finished`, and asynchronous loads. A
        failed transfer counts, too. If blocks of one request are kept several times, each report is about the ones that
        are kept the longest.
        """
        return [], []

    def get_block_ids_with_load_errors(self) -> list[int]:
        """Return the blocks that weren't loaded.

        Of synchronous loads: in the same step. Of asynchronous ones: in the step that reports the request, at the
        latest.
        """
        return []

    def build_connector_worker_meta(self) -> bytes | None:
        """Return what the scheduler's side is told with the step's result. None: nothing."""
        return None

    def get_handshake_metadata(self) -> bytes | None:
        """Return what the scheduler's side is told at the start, after `register_kv_caches`. None: nothing."""
        return None

    def shutdown(self) -> None:
        """End all transfers, and free what this side holds. Idempotent."""


class KVConnector:
    """What `kv_connector` names: makes the two sides. A subclass overrides both functions."""

    knows_groups: ClassVar[bool] = False
    """Whether it knows that groups of layers have blocks of their own. vLLM says that by `SupportsHMA`."""
    knows_states: ClassVar[bool] = False
    """Whether it knows that the states of prefixes are blocks of more groups. It knows groups then."""

    @classmethod
    def check(cls, config: EngineConfig) -> None:
        """Check settings before anything is started.

        Raises:
            InvalidConfig: the connector can't be used like this. The message names the setting.
        """

    @classmethod
    def check_params(cls, params: dict[str, Any], config: EngineConfig) -> None:
        """Check what a caller gives the connector as `kv_transfer_params`, before the request is sent.

        Called in the process that has the engine's client.

        Raises:
            ValueError: the request can't run with them. The message says why.
        """

    @classmethod
    def scheduler_side(cls, setup: ConnectorSetup) -> SchedulerConnector:
        """Make the scheduler's side, in the engine's process."""
        raise NotImplementedError

    @classmethod
    def worker_side(cls, setup: ConnectorSetup) -> WorkerConnector:
        """Make the worker's side, in a worker's process."""
        raise NotImplementedError


class KVConnectorRole(enum.Enum):
    """The side that an object of a `KVConnectorBase` is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase(KVConnector, SchedulerConnector, WorkerConnector):
    """A connector whose two sides are objects of one class, as vLLM's are: `role` says which side an object is."""

    def __init__(self, setup: ConnectorSetup, role: KVConnectorRole) -> None:
        self.setup = setup
        self.role = role

    @classmethod
    def scheduler_side(cls, setup: ConnectorSetup) -> SchedulerConnector:
        return cls(setup, KVConnectorRole.SCHEDULER)

    @classmethod
    def worker_side(cls, setup: ConnectorSetup) -> WorkerConnector:
        return cls(setup, KVConnectorRole.WORKER)


def connector_class(config: EngineConfig) -> type[KVConnector]:
    """Import and return the class that `kv_transfer_config` names.

    Raises:
        InvalidConfig: it can't be imported, or isn't a `KVConnector`.
    """
    transfer = config.kv_transfer_config
    assert transfer is not None, "there is a connector"
    found = import_class("kv_connector", transfer.kv_connector, KV_CONNECTORS)
    if not (isinstance(found, type) and issubclass(found, KVConnector)):
        raise InvalidConfig(
            f"kv_connector={transfer.kv_connector!r} isn't a subclass of raycore.kv_transfer.connector.KVConnector"
        )
    return found
