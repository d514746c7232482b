"""Which ranks compute which requests, where ranks read each other's blocks. Only made if `kv_transfer_config` asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycore.client.held_prefixes import HeldPrefixes
from raycore.client.routes import Route, Routes
from raycore.client.routing import Placed, Router
from raycore.config import EngineConfig
from raycore.messages import CacheChanges, EngineRequest
from raycore.parts.transfers.connectors.connector import connector_class
from raycore.parts.transfers.connectors.peers.connector import PeersConnector
from raycore.parts.transfers.connectors.peers.hints import RemoteBlocks, as_hints
from raycore.parts.transfers.connectors.peers.settings import DisaggregationSettings, read_settings


class PrefixTransfers(Routes):
    """One client's routes where ranks read each other's blocks. Not thread-safe."""

    def __init__(
        self,
        router: Router,
        block_size: int,
        roles: DisaggregationSettings | None = None,
        *,
        has_states: bool = False,
    ) -> None:
        """
        Args:
            router: gets to know which prefixes ranks hold.
            block_size: tokens in a block.
            roles: which ranks compute prompts. None: all ranks do all.
            has_states: whether layers keep states.
        """
        super().__init__(router)
        self.held = router.held = HeldPrefixes(block_size, has_states=has_states)
        num_prefill = 0 if roles is None else roles.num_prefill_ranks
        self._prefills, self._decodes = slice(0, num_prefill), slice(num_prefill, None)
        """The numbers of the ranks that compute prompts, and of those that go on."""
        self._min_prefill_tokens = 0 if roles is None else roles.min_prefill_tokens
        self._addresses: dict[int, list[str]] = {}

    def add_rank(self, dp_rank: int, addresses: Sequence[str]) -> None:
        self._addresses[dp_rank] = list(addresses)

    def take(self, dp_rank: int, changes: CacheChanges) -> None:
        self.held.take(dp_rank, changes)

    def route(self, request: EngineRequest, cache_salt: str | None, wanted_rank: int | None) -> Route:
        tokens = request.prompt_token_ids + request.output_token_ids
        prefills, decodes = self._prefills, self._decodes
        if not self._router.has(wanted_rank) and self._router.has_among(prefills) and self._router.has_among(decodes):
            if request.pooling is not None:
                return self._with_hint(self._router.place(tokens, cache_salt=cache_salt, among=prefills))
            if _can_move(request) and self._num_missing(tokens, cache_salt, decodes) >= self._min_prefill_tokens:
                placed = self._router.place(tokens, cache_salt=cache_salt, among=prefills)
                return self._with_hint(placed)._replace(hands_over=True)
            return self._with_hint(self._router.place(tokens, cache_salt=cache_salt, among=decodes))
        return self._with_hint(self._router.place(tokens, cache_salt=cache_salt, rank=wanted_rank))

    def route_on(self, request: EngineRequest, cache_salt: str | None, hints: dict[str, Any] | None) -> Route:
        tokens = request.prompt_token_ids + request.output_token_ids
        among = self._decodes if self._router.has_among(self._decodes) else slice(None)
        placed = self._router.place(tokens, cache_salt=cache_salt, among=among)
        return self._with_hint(placed) if hints is None else Route(placed.rank, hints)

    def _num_missing(self, tokens: Sequence[int], cache_salt: str | None, ranks: slice) -> int:
        """How many tokens of a prompt none of these ranks holds."""
        found = self.held.match(self.held.keys(tokens, cache_salt))
        return len(tokens) - int(self._router.tokens_by_rank(found)[ranks].max())

    def _with_hint(self, placed: Placed) -> Route:
        """The rank is told of the blocks that another one holds, if one holds more."""
        addresses = [] if placed.holder is None else self._addresses.get(placed.holder, [])
        return Route(placed.rank, as_hints(RemoteBlocks(addresses, placed.num_elsewhere)) if addresses else None)


def _can_move(request: EngineRequest) -> bool:
    """Whether the blocks of a request's prompt can be read by another rank, and nothing else of it has to be."""
    params = request.params
    is_plain = request.lora is None and params.prompt_logprobs is None and not params.return_prompt_hidden_states
    return is_plain and (params.max_tokens is None or params.max_tokens > len(request.output_token_ids) + 1)


def make_routes(config: EngineConfig, router: Router) -> Routes:
    """What routes requests for the engine's connector, which may read blocks of other ranks."""
    connector = connector_class(config)
    if not issubclass(connector, PeersConnector):
        return Routes(router)
    settings, transfer = read_settings(config, connector.settings_class), config.kv_transfer_config
    roles = None
    if isinstance(settings, DisaggregationSettings) and transfer is not None and transfer.kv_role == "kv_both":
        roles = settings
    return PrefixTransfers(router, config.tokens_per_block, roles, has_states=config.state_rows is not None)
