"""Options of a server. Flags have vLLM's names.

Each option is declared once, by an `option(...)` at its field: see `raycore.options.declared`. This module imports
little, because even `raycore --help` imports it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from raycore import plugins
from raycore.errors import InvalidConfig
from raycore.json_fields import shortened
from raycore.options.declared import check_options, json_object, json_option, option, options_of, settings_of
from raycore.options.vllm_options import VllmOption, without_effect
from raycore.plain_errors import unsupported_value
from raycore.server.http_options import HTTP_OPTIONS, HttpOptions
from raycore.server.log_options import LOG_OPTIONS, LogOptions
from raycore.text.template_file import read_chat_template

TOOL_CALL_PARSERS = (
    "hermes",
    "qwen3_coder",
    "qwen3_xml",
    "llama3_json",
    "mistral",
    "glm45",
    "glm47",
    "minimax_m2",
    "openai",
    "pythonic",
)
"""The keys of `raycore.server.parsers.tool_calls.PARSERS`. Importing that module would make `raycore --help` slow."""

REASONING_PARSERS = ("deepseek_r1", "qwen3", "glm45", "minimax_m2", "openai_gptoss")
"""The keys of `raycore.server.parsers.reasoning.PARSERS`."""

RESERVED_TEMPLATE_VARIABLES = frozenset(
    {
        *("self", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("image_placeholder", "interleaves_images"),
    }
)
"""Variables of chat templates that the server sets: neither requests nor options may."""

_Count = Annotated[int, Meta(ge=1)]

_WITHOUT_EXPERTS = (VllmOption("is_3d_lora_weight", (False, None), "adapters of experts aren't supported"),)
"""vLLM's settings of an adapter that raycore doesn't have."""


class LimitsLogprobs(Protocol):
    """An engine, as far as it limits requests to a server."""

    @property
    def max_http_logprobs(self) -> int:
        """Maximum number of log probabilities per token that an HTTP request may ask for. -1: no maximum."""
        ...


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter that is loaded when the server starts. The fields are vLLM's."""

    name: Annotated[str, Meta(min_length=1)]
    """What requests give as `model`."""
    path: Annotated[str, Meta(min_length=1)]
    """The adapter's directory, or a GGUF file."""
    base_model_name: str | None = None
    """The served model name that /v1/models shows as the adapter's parent. None: the first one."""


def _names(names: str | Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else names


def _usable_names(names: str | Sequence[str]) -> Sequence[str]:
    if "" in _names(names):
        raise InvalidConfig("served_model_name='' is no name that requests could give: omit it, or give a name")
    return _names(names)


def _usable_keys(keys: str | Sequence[str]) -> Sequence[str]:
    for number, key in enumerate(_names(keys), 1):
        if key != str.strip(key, " \t\r\n") or not key:  # a secret: not in the message
            raise InvalidConfig(
                f"API key {number} (of --api-key or RAYCORE_API_KEY) is empty or has white space around it, so no "
                "client could send it: give another one"
            )
    return _names(keys)


def _lora_modules(modules: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> Sequence[LoraModule]:
    each: Any = modules if isinstance(modules, (list, tuple)) else [modules]
    return [_lora_module(module) for given in each for module in _listed_modules(given)]


def _listed_modules(given: Any) -> list[Any]:
    """A value of `lora_modules`, or those in a list in JSON, which vLLM's flag may have."""
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            found: Any = json.loads(given)
        except ValueError as error:
            raise InvalidConfig(f"lora_modules={shortened(given)} isn't a list in JSON: {error}") from None
        return found
    return [given]


def _lora_module(given: Any) -> LoraModule:
    """The adapter that one value of `lora_modules` stands for: `name=path`, or an object in JSON."""
    if isinstance(given, LoraModule):
        return given
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        name, equals, path = given.partition("=")
        if not (name and equals and path):
            raise InvalidConfig(f"lora_modules={shortened(given)}: expected name=path, or an object in JSON")
        return LoraModule(name, path)
    settings = without_effect("lora_modules", json_object("lora_modules", given), _WITHOUT_EXPERTS)
    return settings_of("lora_modules", settings, LoraModule)


def _template_kwargs(default_chat_template_kwargs: str | dict[str, Any]) -> dict[str, Any]:
    given = json_object("default_chat_template_kwargs", default_chat_template_kwargs)
    for name in given:
        if name in RESERVED_TEMPLATE_VARIABLES:
            raise InvalidConfig(f"default_chat_template_kwargs has {name!r}, which is set by the server")
    return given


def _directories(directories: str | Sequence[str]) -> Sequence[str]:
    for each in _names(directories):
        if not os.path.isabs(each) or "\0" in each:
            raise InvalidConfig(f"allowed_lora_directories={shortened(each)} isn't an absolute path")
    return _names(directories)


def _tool_call_parser(tool_call_parser: str | None) -> str | None:
    return _known("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS, plugins.TOOL_PARSERS)


def _reasoning_parser(reasoning_parser: str | None) -> str | None:
    return _known("reasoning_parser", reasoning_parser, REASONING_PARSERS, plugins.REASONING_PARSERS)


def _known(option: str, name: Any, own: Sequence[str], group: str, is_early: bool = True) -> str | None:
    """Check that a parser has this name. The text `none` stands for None, as it does for options with choices.

    `is_early`: a file of plugins may still bring the name.
    """
    if name in own or (isinstance(name, str) and name in plugins.plugin_names(group)):
        return name
    if isinstance(name, str) and name.lower() == "none":
        return None
    if isinstance(name, str) and is_early:
        return name
    raise InvalidConfig(unsupported_value(option, name, [*own, *plugins.plugin_names(group), None]))


def _either(names: Sequence[str]) -> str:
    return ", ".join([*map(repr, names), "the name of a plugin"])


class ServerOptions(msgspec.Struct, frozen=True):
    """Options of the OpenAI API, without those of the engine.

    Raises:
        InvalidConfig: from the constructor, if a value is invalid.
    """

    served_model_names: Annotated[
        tuple[str, ...],
        option(
            "Names that requests may give as `model`. The first is used if a request gives none.",
            name="served_model_name",
            default="the model's path",
            convert=_usable_names,
            is_common=True,
        ),
    ]
    api_keys: Annotated[
        tuple[str, ...],
        option(
            "Accepted API keys. Clients send one as `Authorization: Bearer KEY`, or in the header `x-api-key`.",
            name="api_key",
            metavar="KEY",
            default="the variable RAYCORE_API_KEY if it is set, else no key is required",
            convert=_usable_keys,
            is_secret=True,
            is_http=True,
            is_common=True,
        ),
    ] = ()
    chat_template: Annotated[
        str | None,
        option(
            "The template that renders conversations as prompts: Jinja text, or the path of a file.",
            metavar="FILE_OR_TEXT",
            default="the checkpoint's template",
        ),
    ] = None
    """Jinja text, or the name of one of the checkpoint's templates."""
    default_chat_template_kwargs: Annotated[
        dict[str, Any],
        json_option(
            'Variables of the chat template for requests that don\'t set them, such as {"enable_thinking": false}.',
            default="none",
            convert=_template_kwargs,
        ),
    ] = {}
    trust_request_chat_template: Annotated[
        bool, option("Allow requests to set `chat_template`. Otherwise they are rejected.")
    ] = False
    tool_call_parser: Annotated[
        str | None,
        option(
            "The format of the model's tool calls. If it isn't given and the chat template renders calls in an unknown "
            "format, requests with tools are rejected.",
            default="detected from the chat template",
            expected=_either(TOOL_CALL_PARSERS),
            convert=_tool_call_parser,
            is_common=True,
        ),
    ] = None
    tool_parser_plugin: Annotated[
        str | None,
        option(
            "A Python file, or a module, that registers parsers for tool_call_parser (docs/plugins.md).", metavar="FILE"
        ),
    ] = None
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        option(
            "Leave tools out of the prompt if the request's tool_choice is none, so that the model can't try to call "
            "them."
        ),
    ] = True
    response_role: Annotated[str, Meta(min_length=1), option("The role of the messages in chat responses.")] = (
        "assistant"
    )
    reasoning_parser: Annotated[
        str | None,
        option(
            "The format of the model's reasoning. Chat responses then have it in `reasoning`, separate from `content`.",
            default="reasoning is left in `content`",
            expected=_either(REASONING_PARSERS),
            convert=_reasoning_parser,
            is_common=True,
        ),
    ] = None
    reasoning_parser_plugin: Annotated[
        str | None,
        option(
            "A Python file, or a module, that registers parsers for reasoning_parser (docs/plugins.md).", metavar="FILE"
        ),
    ] = None
    strict_fields: Annotated[
        bool,
        option(
            "Reject requests with fields that the server doesn't know or can't follow. Otherwise such fields are "
            "ignored, and the header X-Raycore-Ignored-Fields of the response names them.",
        ),
    ] = False
    strict_max_tokens: Annotated[
        bool,
        option(
            "Reject requests whose `max_tokens` is more than the prompt leaves of the model's length, as OpenAI does. "
            "Otherwise their output ends at that length.",
        ),
    ] = False
    lora_modules: Annotated[
        tuple[LoraModule, ...],
        option(
            "LoRA adapters that are loaded when the server starts: directories of PEFT, or GGUF files. Requests give "
            "an adapter's name as `model`. Each is name=path, or JSON: "
            '{"name": ..., "path": ..., "base_model_name": ...}. Needs enable_lora.',
            metavar="NAME=PATH",
            expected="a list of adapters",
            convert=_lora_modules,
        ),
    ] = ()
    max_body_bytes: Annotated[
        _Count,
        option(
            "Maximum size of a request body in bytes. While the server parses a body, other requests wait: a large "
            "part of a second for 4 MiB of small values. Bodies above 256 kB are tokenized two at a time, and others "
            "don't wait for them.",
            is_http=True,
        ),
    ] = 4 << 20
    body_timeout_s: Annotated[
        float, Meta(gt=0), option("Seconds within which a request's body must arrive.", is_http=True)
    ] = 60.0
    max_n: Annotated[_Count, option("Maximum `n` of a request.")] = 128
    max_logprobs: int = 20
    """The engine's `max_http_logprobs`: see `limited_by`."""
    return_tokens_as_token_ids: Annotated[
        bool,
        option("Log probabilities name tokens as `token_id:123` instead of by their text. Requests may override this."),
    ] = False
    enable_force_include_usage: Annotated[
        bool, option("All events of a stream have the usage so far, whether or not the request asks for it.")
    ] = False
    sse_keep_alive_interval: Annotated[
        float,
        Meta(ge=0),
        option(
            "Seconds after which a stream without an event sends a comment, so that proxies keep the connection. 0: "
            "never.",
            is_http=True,
        ),
    ] = 0.0
    max_stop_strings: Annotated[int, Meta(ge=0), option("Maximum number of stop strings in a request.")] = 16
    max_bad_words: Annotated[
        int,
        Meta(ge=0),
        option("Maximum number of bad words in a request. Each of them costs time at every token."),
    ] = 128
    max_word_characters: Annotated[_Count, option("Maximum number of characters of a stop string or bad word.")] = 1024
    max_sequences: Annotated[
        _Count,
        option(
            "Maximum number of sequences in a request to /v1/completions: number of prompts times `n`. Also the "
            "maximum number of inputs, pairs or documents in a request to a model that pools."
        ),
    ] = 2048
    max_streams: Annotated[
        _Count,
        option(
            "Maximum number of requests in progress, of all API servers of a machine together. Each API server accepts "
            "an equal part. Further requests get status 429.",
            name="max_concurrent_requests",
            is_http=True,
        ),
    ] = 4096
    """In the process of one of several API servers: its part."""
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        option("Serve /tokenizer_info, which shows the tokenizer's configuration and the chat template.", is_http=True),
    ] = False
    max_stored_responses: Annotated[
        int,
        Meta(ge=0),
        option(
            "Maximum number of responses of /v1/responses that are stored, in memory. Those used longest ago make room "
            "for others. 0: none are stored."
        ),
    ] = 10_000
    max_stored_response_bytes: Annotated[
        int, Meta(ge=0), option("Maximum size of all stored responses together, in bytes.")
    ] = 256 << 20
    enable_admin_endpoints: Annotated[
        bool,
        option(
            "Serve the paths that control the engine: pause, resume, sleep, wake_up, reset_prefix_cache, "
            "reset_mm_cache, reset_encoder_cache, start_profile, stop_profile, server_info, abort_requests, "
            "collective_rpc, scale_elastic_ep, those that change weights, v1/load_lora_adapter, "
            "v1/unload_lora_adapter. Needs an API key.",
            is_http=True,
        ),
    ] = False
    allowed_lora_directories: Annotated[
        tuple[str, ...],
        option(
            "Directories below which requests to v1/load_lora_adapter may name adapters. They are absolute paths. "
            "Needs enable_lora and enable_admin_endpoints.",
            metavar="DIR",
            default="none, so such requests are refused",
            convert=_directories,
            is_http=True,
        ),
    ] = ()

    http: HttpOptions = HttpOptions()
    log: LogOptions = LogOptions()

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidConfig if a value is invalid."""
        for each in _OWN_OPTIONS:
            each.check(getattr(self, each.field))
        if self.tool_parser_plugin:
            plugins.import_plugin_file("tool_parser_plugin", self.tool_parser_plugin)
        if self.reasoning_parser_plugin:
            plugins.import_plugin_file("reasoning_parser_plugin", self.reasoning_parser_plugin)
        for name, parser, own, group in (
            ("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS, plugins.TOOL_PARSERS),
            ("reasoning_parser", self.reasoning_parser, REASONING_PARSERS, plugins.REASONING_PARSERS),
        ):
            if parser is not None:
                _known(name, parser, own, group, is_early=False)
        for part, options in ((self.http, HTTP_OPTIONS), (self.log, LOG_OPTIONS)):
            for each in options:
                each.check(getattr(part, each.field))
        if self.enable_admin_endpoints and not self.api_keys:
            raise InvalidConfig(
                "enable_admin_endpoints (--enable-admin-endpoints) needs an API key, because everyone who reaches the "
                "server could control the engine: give --api-key KEY, or set RAYCORE_API_KEY"
            )
        if self.allowed_lora_directories and not self.enable_admin_endpoints:
            raise InvalidConfig(
                "allowed_lora_directories (--allowed-lora-directories) needs enable_admin_endpoints "
                "(--enable-admin-endpoints), without which no request can load an adapter"
            )
        self._check_lora_modules()

    def _check_lora_modules(self) -> None:
        taken = dict.fromkeys(self.served_model_names, "a served model name")
        for module in self.lora_modules:
            if module.name in taken:
                raise InvalidConfig(f"lora_modules: the name {shortened(module.name)} is already {taken[module.name]}")
            taken[module.name] = "another adapter's"
            if module.base_model_name is not None and module.base_model_name not in self.served_model_names:
                raise InvalidConfig(
                    f"lora_modules: base_model_name={shortened(module.base_model_name)} of {shortened(module.name)} "
                    f"isn't a served model name: {', '.join(self.served_model_names)}"
                )


_OWN_OPTIONS = options_of(ServerOptions, "Server")

SERVER_OPTIONS = {each.name: each for each in [*_OWN_OPTIONS, *HTTP_OPTIONS, *LOG_OPTIONS]}
"""All options of a server, by keyword argument."""


def server_options(model: str, given: Mapping[str, Any]) -> ServerOptions:
    """The server options from keyword arguments as in `SERVER_OPTIONS`. The default of `served_model_name` is `model`.

    Raises:
        InvalidConfig: an option is unknown or invalid, or the chat template is neither a file nor Jinja text.
    """
    checked = check_options(SERVER_OPTIONS, given)
    http, log = (
        {each.field: checked.pop(each.name) for each in options if each.name in checked}
        for options in (HTTP_OPTIONS, LOG_OPTIONS)
    )
    chosen = {SERVER_OPTIONS[name].field: value for name, value in checked.items()}
    chosen["http"], chosen["log"] = HttpOptions(**http), LogOptions(**log)
    chosen["served_model_names"] = chosen.get("served_model_names") or (model,)
    chosen["chat_template"] = read_chat_template(chosen.get("chat_template"))
    return ServerOptions(**chosen)


def limited_by(options: ServerOptions, engine: LimitsLogprobs) -> ServerOptions:
    """The same options with the limits that are options of the engine."""
    return msgspec.structs.replace(options, max_logprobs=engine.max_http_logprobs)


def check_enable_lora(
    enable_lora: bool, lora_modules: Sequence[object] = (), allowed_lora_directories: Sequence[object] = ()
) -> None:
    """Check the options of adapters before an engine starts, which can take minutes.

    Raises:
        InvalidConfig: one of the options is given for an engine without adapters.
    """
    given = {"lora_modules": lora_modules, "allowed_lora_directories": allowed_lora_directories}
    for name in (name for name, value in given.items() if value and not enable_lora):
        flag = f"--{name.replace('_', '-')}"
        raise InvalidConfig(f"{name} ({flag}) needs an engine with enable_lora=True: give --enable-lora")


def api_keys_of_environment() -> tuple[str, ...]:
    """The API key in the environment variable RAYCORE_API_KEY; empty if the variable isn't set."""
    return tuple(key for key in [os.environ.get("RAYCORE_API_KEY")] if key)
