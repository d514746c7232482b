"""The server's endpoints: all paths, and what holds for the requests to each of them."""

from __future__ import annotations

from enum import Enum, Flag, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope


class Rule(Flag):
    """What holds for some endpoints only. The middleware applies it to the path, whatever the method."""

    NONE = 0
    NO_KEY = auto()
    """It needs no API key."""
    NOT_COUNTED = auto()
    """The metrics of HTTP leave it out."""
    ADMISSION = auto()
    """It is refused while the engine accepts no requests, or while too many of these requests are in progress."""
    TRACED = auto()
    """Its requests have spans."""
    IN_BATCHES = auto()
    """`raycore run-batch` serves it."""
    GENERATES = auto()
    """It needs a model that generates."""
    POOLS = auto()
    """It needs a model that pools."""
    EMBEDS = auto()
    """It needs a model that pools embeddings."""
    CLASSIFIES = auto()
    """It needs a model that classifies."""
    SCORES = auto()
    """It needs a model that scores pairs of texts, or whose embeddings can be compared."""
    CONTROLS = auto()
    """It needs the option `enable_admin_endpoints`."""
    CHANGES_ADAPTERS = auto()
    """It needs an application that can load adapters."""
    SHOWS_TOKENIZER = auto()
    """It needs the option `enable_tokenizer_info_endpoint`."""


_PROBE = Rule.NO_KEY | Rule.NOT_COUNTED
"""Probes and scrapers have no API key, and would outnumber the other requests."""
_RUNS = Rule.ADMISSION | Rule.TRACED
"""Requests to the model."""
_GENERATES = _RUNS | Rule.GENERATES
_PREPARES = Rule.ADMISSION | Rule.GENERATES
"""Requests that need only what is around the model: its tokenizer, templates and parsers."""
_POOLS = _RUNS | Rule.POOLS | Rule.IN_BATCHES
_CHANGES_ADAPTERS = Rule.CONTROLS | Rule.CHANGES_ADAPTERS

_OPENAI = "raycore.server.dialects.openai.handlers"
_MESSAGES = "raycore.server.dialects.messages.handlers"
_TOKEN_API = "raycore.server.dialects.tokens.handlers"
_RESPONSES = "raycore.server.dialects.responses.handlers"
_POOLING = "raycore.parts.pooling.server.requests"
_SCORES = "raycore.parts.pooling.server.scores"
_TOKENS = "raycore.server.dialects.tokens.tokenize"
_INFORMATION = "raycore.server.operations.information"
_ADMIN = "raycore.server.operations.admin"
_WEIGHTS = "raycore.parts.weights.server"


class Endpoint(Enum):
    """Each endpoint's method, path, rules, and the module with its handler, whose name is the endpoint's in lower case.

    `raycore.server.contract.handlers` says what a handler is. The OpenAPI document has the order of this table.
    """

    METRICS = "GET", "/metrics", _PROBE, "raycore.server.operations.metrics"
    COMPLETIONS = "POST", "/v1/completions", _GENERATES | Rule.IN_BATCHES, _OPENAI
    CHAT_COMPLETIONS = "POST", "/v1/chat/completions", _GENERATES | Rule.IN_BATCHES, _OPENAI
    BATCHED_CHAT_COMPLETIONS = "POST", "/v1/chat/completions/batch", _GENERATES, _OPENAI
    MESSAGES = "POST", "/v1/messages", _GENERATES, _MESSAGES
    RENDER_MESSAGES = "POST", "/v1/messages/render", _PREPARES, _MESSAGES
    TOKENS_OF_MESSAGES = "POST", "/v1/messages/count_tokens", _PREPARES, _MESSAGES
    GENERATE = "POST", "/inference/v1/generate", _GENERATES, _TOKEN_API
    ABORT_GENERATIONS = "POST", "/inference/v1/abort_requests", Rule.GENERATES, _TOKEN_API
    RENDER_CHAT = "POST", "/v1/chat/completions/render", _PREPARES, _TOKEN_API
    RENDER_COMPLETION = "POST", "/v1/completions/render", _PREPARES, _TOKEN_API
    DERENDER_CHAT_TOKENS = "POST", "/v1/chat/completions/derender", _PREPARES, _TOKEN_API
    DERENDER_COMPLETION_TOKENS = "POST", "/v1/completions/derender", _PREPARES, _TOKEN_API
    CREATE_RESPONSE = "POST", "/v1/responses", _GENERATES | Rule.IN_BATCHES, _RESPONSES
    RENDER_RESPONSE = "POST", "/v1/responses/render", _PREPARES, _RESPONSES
    RETRIEVE_RESPONSE = "GET", "/v1/responses/{response_id}", Rule.GENERATES, _RESPONSES
    DELETE_RESPONSE = "DELETE", "/v1/responses/{response_id}", Rule.GENERATES, _RESPONSES
    CANCEL_RESPONSE = "POST", "/v1/responses/{response_id}/cancel", Rule.GENERATES, _RESPONSES
    LIST_INPUT_ITEMS = "GET", "/v1/responses/{response_id}/input_items", Rule.GENERATES, _RESPONSES
    EMBEDDINGS = "POST", "/v1/embeddings", _POOLS | Rule.EMBEDS, _POOLING
    COHERE_EMBED = "POST", "/v2/embed", _POOLS | Rule.EMBEDS, "raycore.parts.pooling.server.cohere"
    CLASSIFY = "POST", "/classify", _POOLS | Rule.CLASSIFIES, _POOLING
    POOLING = "POST", "/pooling", _POOLS, _POOLING
    SCORE = "POST", "/score", _POOLS | Rule.SCORES, _SCORES
    SCORE_V1 = "POST", "/v1/score", _POOLS | Rule.SCORES, _SCORES
    RERANK = "POST", "/rerank", _POOLS | Rule.SCORES, _SCORES
    RERANK_V1 = "POST", "/v1/rerank", _POOLS | Rule.SCORES, _SCORES
    RERANK_V2 = "POST", "/v2/rerank", _POOLS | Rule.SCORES, _SCORES
    INVOCATIONS = "POST", "/invocations", Rule.NONE, "raycore.server.dialects.invocations"
    TOKENIZE = "POST", "/tokenize", Rule.ADMISSION, _TOKENS
    TOKENIZER_INFO = "GET", "/tokenizer_info", Rule.SHOWS_TOKENIZER, _TOKENS
    DETOKENIZE = "POST", "/detokenize", Rule.ADMISSION, _TOKENS
    LIST_MODELS = "GET", "/v1/models", Rule.NONE, _INFORMATION
    MODEL = "GET", "/v1/models/{model:path}", Rule.NONE, _INFORMATION
    HEALTH = "GET", "/health", _PROBE, _INFORMATION
    PING = "GET", "/ping", _PROBE, _INFORMATION
    POSTED_PING = "POST", "/ping", _PROBE, _INFORMATION
    SHOW_VERSION = "GET", "/version", _PROBE, _INFORMATION
    LOAD = "GET", "/load", _PROBE, _INFORMATION
    FAULT_TOLERANCE_STATUS = "GET", "/fault_tolerance/status", Rule.NONE, "raycore.server.operations.fault_tolerance"

    PAUSE = "POST", "/pause", Rule.CONTROLS, _ADMIN
    RESUME = "POST", "/resume", Rule.CONTROLS, _ADMIN
    IS_PAUSED = "GET", "/is_paused", Rule.CONTROLS, _ADMIN
    SLEEP = "POST", "/sleep", Rule.CONTROLS, _ADMIN
    WAKE_UP = "POST", "/wake_up", Rule.CONTROLS, _ADMIN
    IS_SLEEPING = "GET", "/is_sleeping", Rule.CONTROLS, _ADMIN
    RESET_PREFIX_CACHE = "POST", "/reset_prefix_cache", Rule.CONTROLS, _ADMIN
    RESET_MM_CACHE = "POST", "/reset_mm_cache", Rule.CONTROLS, _ADMIN
    RESET_ENCODER_CACHE = "POST", "/reset_encoder_cache", Rule.CONTROLS, _ADMIN
    START_PROFILE = "POST", "/start_profile", Rule.CONTROLS, _ADMIN
    STOP_PROFILE = "POST", "/stop_profile", Rule.CONTROLS, _ADMIN
    SERVER_INFO = "GET", "/server_info", Rule.CONTROLS, _ADMIN
    ABORT_REQUESTS = "POST", "/abort_requests", Rule.CONTROLS, _ADMIN
    COLLECTIVE_RPC = "POST", "/collective_rpc", Rule.CONTROLS, _ADMIN
    SCALE_ELASTIC_EP = "POST", "/scale_elastic_ep", Rule.CONTROLS, _ADMIN
    IS_SCALING_ELASTIC_EP = "POST", "/is_scaling_elastic_ep", Rule.CONTROLS, _ADMIN
    INIT_WEIGHT_TRANSFER_ENGINE = "POST", "/init_weight_transfer_engine", Rule.CONTROLS, _WEIGHTS
    SHUTDOWN_WEIGHT_TRANSFER_ENGINE = "POST", "/shutdown_weight_transfer_engine", Rule.CONTROLS, _WEIGHTS
    START_WEIGHT_UPDATE = "POST", "/start_weight_update", Rule.CONTROLS, _WEIGHTS
    START_DRAFT_WEIGHT_UPDATE = "POST", "/start_draft_weight_update", Rule.CONTROLS, _WEIGHTS
    UPDATE_WEIGHTS = "POST", "/update_weights", Rule.CONTROLS, _WEIGHTS
    FINISH_WEIGHT_UPDATE = "POST", "/finish_weight_update", Rule.CONTROLS, _WEIGHTS
    CANCEL_WEIGHT_UPDATE = "POST", "/cancel_weight_update", Rule.CONTROLS, _WEIGHTS
    RELOAD_WEIGHTS = "POST", "/reload_weights", Rule.CONTROLS, _WEIGHTS
    UPDATE_WEIGHT_VERSION = "POST", "/update_weight_version", Rule.CONTROLS, _WEIGHTS
    WEIGHT_INFO = "GET", "/weight_info", Rule.CONTROLS, _WEIGHTS
    GET_WORLD_SIZE = "GET", "/get_world_size", Rule.CONTROLS, _WEIGHTS
    LOAD_LORA_ADAPTER = "POST", "/v1/load_lora_adapter", _CHANGES_ADAPTERS, _ADMIN
    UNLOAD_LORA_ADAPTER = "POST", "/v1/unload_lora_adapter", _CHANGES_ADAPTERS, _ADMIN

    def __init__(self, method: str, path: str, rules: Rule, module: str) -> None:
        self.method = method
        self.path = path
        self.rules = rules
        self.module = module


def path_of(scope: Scope) -> str:
    """A request's path, without the prefix at which the application is mounted, for example by Ray Serve."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API, so that its clients expect errors of that API's form.

    Those that were given an address with /v1 add it again.
    """
    path = path.removeprefix("/v1") if path.startswith("/v1/v1/") else path
    return path == Endpoint.MESSAGES.path or path.startswith(f"{Endpoint.MESSAGES.path}/")


def endpoints_with(rule: Rule) -> list[Endpoint]:
    """The endpoints for which a rule holds, in the order of the table."""
    return [endpoint for endpoint in Endpoint if rule in endpoint.rules]


def paths_with(rule: Rule) -> tuple[str, ...]:
    """The paths of the endpoints for which a rule holds, in the order of the table."""
    return tuple(endpoint.path for endpoint in endpoints_with(rule))
