"""The server's endpoints: all paths, and what holds for the requests to each of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Scope

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


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
    CONTROLS = auto()
    """It needs the option `enable_admin_endpoints`."""
    SHOWS_TOKENIZER = auto()
    """It needs the option `enable_tokenizer_info_endpoint`."""


_PROBE = Rule.NO_KEY | Rule.NOT_COUNTED
"""Probes and scrapers have no API key, and would outnumber the other requests."""
_RUNS = Rule.ADMISSION | Rule.TRACED
"""Requests to the model."""
_GENERATES = _RUNS | Rule.GENERATES | Rule.IN_BATCHES
_POOLS = _RUNS | Rule.POOLS | Rule.IN_BATCHES


class Endpoint(Enum):
    """Each endpoint's method, path and rules."""

    COMPLETIONS = "POST", "/v1/completions", _GENERATES
    CHAT = "POST", "/v1/chat/completions", _GENERATES
    BATCHED_CHATS = "POST", "/v1/chat/completions/batch", _RUNS | Rule.GENERATES
    MESSAGES = "POST", "/v1/messages", _RUNS | Rule.GENERATES
    COUNT_TOKENS = "POST", "/v1/messages/count_tokens", Rule.ADMISSION | Rule.GENERATES
    GENERATE = "POST", "/inference/v1/generate", _RUNS | Rule.GENERATES
    ABORT_GENERATIONS = "POST", "/inference/v1/abort_requests", Rule.GENERATES
    RENDER_CHAT = "POST", "/v1/chat/completions/render", Rule.ADMISSION | Rule.GENERATES
    RENDER_COMPLETIONS = "POST", "/v1/completions/render", Rule.ADMISSION | Rule.GENERATES
    RENDER_MESSAGES = "POST", "/v1/messages/render", Rule.ADMISSION | Rule.GENERATES
    DERENDER_CHAT = "POST", "/v1/chat/completions/derender", Rule.ADMISSION | Rule.GENERATES
    DERENDER_COMPLETIONS = "POST", "/v1/completions/derender", Rule.ADMISSION | Rule.GENERATES
    RESPONSES = "POST", "/v1/responses", _GENERATES
    RESPONSE = "GET", "/v1/responses/{response_id}", Rule.GENERATES
    DELETE_RESPONSE = "DELETE", "/v1/responses/{response_id}", Rule.GENERATES
    CANCEL_RESPONSE = "POST", "/v1/responses/{response_id}/cancel", Rule.GENERATES
    RESPONSE_INPUT_ITEMS = "GET", "/v1/responses/{response_id}/input_items", Rule.GENERATES
    EMBEDDINGS = "POST", "/v1/embeddings", _POOLS
    COHERE_EMBED = "POST", "/v2/embed", _POOLS
    CLASSIFY = "POST", "/classify", _POOLS
    POOLING = "POST", "/pooling", _POOLS
    SCORE = "POST", "/score", _POOLS
    SCORE_V1 = "POST", "/v1/score", _POOLS
    RERANK = "POST", "/rerank", _POOLS
    RERANK_V1 = "POST", "/v1/rerank", _POOLS
    RERANK_V2 = "POST", "/v2/rerank", _POOLS
    INVOCATIONS = "POST", "/invocations", Rule.NONE  # the rules of the endpoint that a request belongs to hold for it
    TOKENIZE = "POST", "/tokenize", Rule.ADMISSION
    DETOKENIZE = "POST", "/detokenize", Rule.ADMISSION
    MODELS = "GET", "/v1/models", Rule.NONE
    MODEL = "GET", "/v1/models/{model:path}", Rule.NONE
    HEALTH = "GET", "/health", _PROBE
    PING = "GET", "/ping", _PROBE
    POSTED_PING = "POST", "/ping", _PROBE
    VERSION = "GET", "/version", _PROBE
    LOAD = "GET", "/load", _PROBE
    METRICS = "GET", "/metrics", _PROBE

    TOKENIZER_INFO = "GET", "/tokenizer_info", Rule.SHOWS_TOKENIZER

    SERVER_INFO = "GET", "/server_info", Rule.CONTROLS
    ABORT_REQUESTS = "POST", "/abort_requests", Rule.CONTROLS
    COLLECTIVE_RPC = "POST", "/collective_rpc", Rule.CONTROLS
    SCALE_ELASTIC_EP = "POST", "/scale_elastic_ep", Rule.CONTROLS
    IS_SCALING_ELASTIC_EP = "POST", "/is_scaling_elastic_ep", Rule.CONTROLS
    PAUSE = "POST", "/pause", Rule.CONTROLS
    RESUME = "POST", "/resume", Rule.CONTROLS
    IS_PAUSED = "GET", "/is_paused", Rule.CONTROLS
    SLEEP = "POST", "/sleep", Rule.CONTROLS
    WAKE_UP = "POST", "/wake_up", Rule.CONTROLS
    IS_SLEEPING = "GET", "/is_sleeping", Rule.CONTROLS
    RESET_PREFIX_CACHE = "POST", "/reset_prefix_cache", Rule.CONTROLS
    RESET_MM_CACHE = "POST", "/reset_mm_cache", Rule.CONTROLS
    RESET_ENCODER_CACHE = "POST", "/reset_encoder_cache", Rule.CONTROLS
    INIT_WEIGHT_TRANSFER = "POST", "/init_weight_transfer_engine", Rule.CONTROLS
    SHUTDOWN_WEIGHT_TRANSFER = "POST", "/shutdown_weight_transfer_engine", Rule.CONTROLS
    START_WEIGHT_UPDATE = "POST", "/start_weight_update", Rule.CONTROLS
    START_DRAFT_WEIGHT_UPDATE = "POST", "/start_draft_weight_update", Rule.CONTROLS
    UPDATE_WEIGHTS = "POST", "/update_weights", Rule.CONTROLS
    FINISH_WEIGHT_UPDATE = "POST", "/finish_weight_update", Rule.CONTROLS
    CANCEL_WEIGHT_UPDATE = "POST", "/cancel_weight_update", Rule.CONTROLS
    RELOAD_WEIGHTS = "POST", "/reload_weights", Rule.CONTROLS
    UPDATE_WEIGHT_VERSION = "POST", "/update_weight_version", Rule.CONTROLS
    WEIGHT_INFO = "GET", "/weight_info", Rule.CONTROLS
    GET_WORLD_SIZE = "GET", "/get_world_size", Rule.CONTROLS
    START_PROFILE = "POST", "/start_profile", Rule.CONTROLS
    STOP_PROFILE = "POST", "/stop_profile", Rule.CONTROLS
    LOAD_LORA_ADAPTER = "POST", "/v1/load_lora_adapter", Rule.CONTROLS
    UNLOAD_LORA_ADAPTER = "POST", "/v1/unload_lora_adapter", Rule.CONTROLS

    def __init__(self, method: str, path: str, rules: Rule) -> None:
        self.method = method
        self.path = path
        self.rules = rules

    def route(self, app: FastAPI, **described: Any) -> Callable[[_Handler], _Handler]:
        """A decorator that makes a function the endpoint's handler in `app`. `described`: as for FastAPI's own.

        What has GET has HEAD: load balancers and `wget --spider` ask with it. The HTTP server leaves the body out.
        """
        add = app.api_route(self.path, methods=[self.method], **described)
        if self.method != "GET":
            return add
        described["include_in_schema"] = False
        add_head = app.api_route(self.path, methods=["HEAD"], **described)
        return lambda handler: add_head(add(handler))


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
