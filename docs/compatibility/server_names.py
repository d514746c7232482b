"""Judges vLLM's flags, endpoints, fields of requests, and metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import raycore
from compatibility.entries import Entry, is_equal, shown
from compatibility.python_names import engine_options
from raycore.cli.main import build_parser
from raycore.config import ENGINE_OPTIONS
from raycore.config.vllm_table import VLLM_OPTIONS, VLLM_SERVER_FLAGS
from raycore.server.endpoints import Endpoint
from raycore.server.generation.sampling import ABSENT, HINTS, ONLY
from raycore.server.listen_options import LISTEN_OPTIONS
from raycore.server.options import SERVER_OPTIONS

BODIES = {
    "ChatCompletionRequest": "raycore.server.protocol:ChatCompletionRequest",
    "BatchChatCompletionRequest": "raycore.server.protocol:BatchChatCompletionRequest",
    "CompletionRequest": "raycore.server.protocol:CompletionRequest",
    "TokenizeChatRequest": "raycore.server.protocol:TokenizeRequest",
    "TokenizeCompletionRequest": "raycore.server.protocol:TokenizeRequest",
    "DetokenizeRequest": "raycore.server.protocol:DetokenizeRequest",
    "EmbeddingChatRequest": "raycore.server.pooling.protocol:EmbeddingRequest",
    "EmbeddingCompletionRequest": "raycore.server.pooling.protocol:EmbeddingRequest",
    "ClassificationChatRequest": "raycore.server.pooling.protocol:ClassificationRequest",
    "ClassificationCompletionRequest": "raycore.server.pooling.protocol:ClassificationRequest",
    "PoolingChatRequest": "raycore.server.pooling.protocol:PoolingRequest",
    "PoolingCompletionRequest": "raycore.server.pooling.protocol:PoolingRequest",
    "AnthropicMessagesRequest": "raycore.server.dialects.messages.protocol:MessagesRequest",
    "AnthropicCountTokensRequest": "raycore.server.dialects.messages.protocol:CountTokensRequest",
    "ResponsesRequest": "raycore.server.dialects.responses.protocol:ResponsesRequest",
    "DerenderChatRequest": "raycore.server.dialects.tokens.protocol:DerenderChatRequest",
    "DerenderChatStreamRequest": "raycore.server.dialects.tokens.protocol:DerenderChatRequest",
    "DerenderCompletionRequest": "raycore.server.dialects.tokens.protocol:DerenderCompletionRequest",
    "DerenderCompletionStreamRequest": "raycore.server.dialects.tokens.protocol:DerenderCompletionRequest",
    "GenerateRequest": "raycore.server.dialects.tokens.protocol:GenerateRequest",
    "CohereEmbedRequest": "raycore.server.pooling.protocol:CohereEmbedRequest",
    "RerankRequest": "raycore.server.pooling.protocol:RerankRequest",
    "ScoreDataRequest": "raycore.server.pooling.protocol:ScoreRequest",
    "ScoreQueriesDocumentsRequest": "raycore.server.pooling.protocol:ScoreRequest",
    "ScoreQueriesItemsRequest": "raycore.server.pooling.protocol:ScoreRequest",
    "ScoreTextRequest": "raycore.server.pooling.protocol:ScoreRequest",
}
"""vLLM's models of bodies, and raycore's."""
OF_FASTAPI = ("GET /docs", "GET /openapi.json", "GET /redoc", "GET /docs/oauth2-redirect")
_IGNORED = "ignored"
_METRIC = re.compile(r"\"(vllm:\w+)\"")


def flags(inventory: dict[str, Any]) -> Iterator[Entry]:
    """The commands' flags."""
    commands = build_parser().actions[-1].choices
    for command, given in inventory["flags"].items():
        words = command.split()
        parser: Any = dict(commands or {}).get(words[0])
        for word in words[1:]:
            found = parser.actions if parser else ()
            inner: Any = next((each.choices for each in found if isinstance(each.choices, dict)), {})
            parser = inner.get(word)
        if parser is None:
            yield Entry(f"flag/{command}", "refused")
            continue
        for name, flag in given.items():
            yield _flag(command, name, flag, parser)


def _flag(command: str, name: str, flag: dict[str, Any], parser: Any) -> Entry:
    options: list[str] = flag["flags"]
    long = next((each for each in options if each.startswith("--")), name)
    key, default = f"flag/{command} {long}", flag["default"]
    actions = {text: action for action in parser.actions for text in action.option_strings}
    action = next((actions[each] for each in options if each in actions), None)
    if not options:
        has_one = any(not each.option_strings and each.dest.endswith("model") for each in parser.actions)
        return Entry(key, "same" if has_one else "refused")
    if action is None:
        return Entry(key, "refused")
    missing = [each for each in options if each not in actions and not each.startswith("--no-")]
    for table, prefix in ((ENGINE_OPTIONS, "engine."), (SERVER_OPTIONS, "server."), (LISTEN_OPTIONS, "listen.")):
        own = action.dest.removeprefix(prefix)
        if action.dest.startswith(prefix) and own in table:
            found = (
                engine_options(own, default, key) if prefix == "engine." else _server_option(table[own], default, key)
            )
            return found if not missing else Entry(key, "different", f"without {', '.join(missing)}")
    if action.dest.startswith("vllm."):
        own = action.dest.removeprefix("vllm.")
        option = VLLM_OPTIONS.get(own) or VLLM_SERVER_FLAGS[own]
        if option.is_without_effect:
            return Entry(key, "different", f"taken, without effect: {option.reason}")
        values = [shown(each) for each in option.values if each is not None]
        return Entry(key, "refused", option.reason + (f" (taken: {', '.join(values)})" if values else ""))
    if missing:
        return Entry(key, "different", f"without {', '.join(missing)}")
    if is_equal(default, action.default):
        return Entry(key, "same")
    return Entry(key, "different", f"default: {shown(action.default)}, not {shown(default)}")


def _server_option(option: Any, default: Any, key: str) -> Entry:
    if is_equal(default, option.default) or (option.is_open and default is None):
        return Entry(key, "same")
    return Entry(key, "different", f"default: {option.default_text or shown(option.default)}, not {shown(default)}")


def endpoints(inventory: dict[str, Any]) -> Iterator[Entry]:
    """The server's endpoints. Names of parts of paths don't matter."""
    ours = {_plain(f"{each.method} {each.path}") for each in Endpoint} | set(OF_FASTAPI)
    for endpoint in inventory["endpoints"]:
        yield Entry(f"endpoint/{endpoint}", "same" if _plain(endpoint) in ours else "refused")


def _plain(endpoint: str) -> str:
    return re.sub(r"{[^}]*}", "{}", endpoint)


def fields(inventory: dict[str, Any]) -> Iterator[Entry]:
    """The fields of the bodies of requests."""
    seen: set[str] = set()
    for endpoint, bodies in inventory["endpoints"].items():
        for model, given in bodies.items():
            if model in seen:
                continue
            seen.add(model)
            if model not in BODIES:
                yield Entry(f"http/{model} ({endpoint})", "refused")
                continue
            module, _, name = BODIES[model].partition(":")
            ours = getattr(import_module(module), name)
            known = {field.alias or each: field for each, field in ours.model_fields.items()}
            for field, default in given.items():
                yield _field(f"http/{model}.{field}", field, default, known)


def _field(key: str, name: str, default: list[Any], known: dict[str, Any]) -> Entry:
    if name not in known:
        return Entry(key, "different", _IGNORED)
    if name in HINTS:
        values = f"other values than {', '.join(map(shown, ONLY[name]))} are " if name in ONLY else ""
        return Entry(key, "different", f"{values}{_IGNORED}")
    if name in ABSENT:
        return Entry(key, "refused", ABSENT[name])
    if name in ONLY:
        return Entry(key, "refused", f"taken: {', '.join(map(shown, ONLY[name]))}")
    ours = known[name]
    is_optional, theirs = default
    if is_optional and ours.is_required():
        return Entry(key, "different", "has to be given")
    value = ours.get_default(call_default_factory=True) if not ours.is_required() else None
    # null stands for a default that is decided later
    if is_optional and value is not None and not is_equal(theirs, value):
        return Entry(key, "different", f"default: {shown(value)}, not {shown(theirs)}")
    return Entry(key, "same")


def metrics(inventory: dict[str, Any]) -> Iterator[Entry]:
    """The metrics."""
    folder = Path(raycore.__file__).parent
    files = [path for part in ("metrics", "server") for path in (folder / part).rglob("*.py")]
    ours = {name for path in files for name in _METRIC.findall(path.read_text(encoding="utf-8"))}
    for name in inventory["metrics"]:
        yield Entry(f"metric/{name}", "same" if name in ours else "refused")
