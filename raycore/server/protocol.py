"""Models of request bodies. OpenAI's fields come first, then vLLM's.

Fields that OpenAI or vLLM document but this server doesn't support are listed, too. Values of such a field that have no
effect are accepted. `raycore.server.generation.sampling` says which other values are refused, with an error that names
the field, and which are ignored (`raycore.server.http.ignored_fields`).
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from raycore.sampling_params import RepetitionDetectionParams
from raycore.server.copied_parameters import copied_types
from raycore.server.http.ignored_fields import ignore

INT64_MAX = 2**63 - 1


def _check_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, not a character") from None
    return text


def _one_by_one(given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    if not isinstance(given, dict):
        return validate(given)
    checked: dict[Any, Any] = {}
    for name, value in cast("dict[Any, Any]", given).items():
        checked |= validate({name: value})
    return checked


@cache
def _names_of(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


@cache
def nullable_names(model: type[BaseModel]) -> frozenset[str]:
    """The names of the fields whose default is not null. In a request, null stands for the default of such a field."""
    return frozenset(
        field.alias or name
        for name, field in model.model_fields.items()
        if not field.is_required() and field.default is not None
    )


def _without_nulls(model: type[BaseModel], given: Any) -> Any:
    """`given` without those fields that are null although their default is not null."""
    if not isinstance(given, dict):
        return given
    fields, nullable = cast("dict[str, Any]", given), nullable_names(model)
    return {name: value for name, value in fields.items() if value is not None or name not in nullable}


def text_or_list(given: Any) -> str | None:
    """What a text or a list is, as the tag of a union."""
    if isinstance(given, str):
        return "text"
    return "list" if isinstance(given, list) else None


def _prompt_kind(given: Any) -> str | None:
    kind = text_or_list(given)
    first = given[0] if kind == "list" and given else None
    if isinstance(first, str):
        return "texts"
    if isinstance(first, list):
        return "lists_of_token_ids"
    return "token_ids" if kind == "list" else kind


T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

# Only the first error in a body is reported, so validation stops at the first error: errors for all values of a body
# could take seconds and hundreds of megabytes. For the same reason, the type of a value decides which member of a union
# validates it. Otherwise pydantic would try every member.
List = Annotated[list[T], Field(fail_fast=True)]
Dict = Annotated[dict[K, V], WrapValidator(_one_by_one)]
Text = Annotated[str, AfterValidator(_check_characters)]
"""Text without halves of surrogate pairs, which JSON can express by escapes but UTF-8 can't encode."""
TokenIds = List[int]
Number = Annotated[float, Field(allow_inf_nan=False)]
Int64 = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
TextOrTexts = Annotated[
    Annotated[Text, Tag("text")] | Annotated[List[Text], Tag("list")],
    Discriminator(text_or_list, "text_or_list", "Input should be a string or a list of strings"),
]
TextOrParts = Annotated[
    Annotated[str, Tag("text")] | Annotated[List[dict[str, Any]], Tag("list")],
    Discriminator(text_or_list, "text_or_list", "Input should be a string or a list of objects"),
]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[List[Text], Tag("texts")]
    | Annotated[List[TokenIds], Tag("lists_of_token_ids")],
    Discriminator(_prompt_kind, "prompt", "Input should be a string, token ids, or a list of either"),
]


class Fields(BaseModel):
    """A model whose unknown fields are ignored, or refused with `strict_fields`. Numbers may be given as text."""

    within: ClassVar[str] = ""
    """The field of the body that has these fields, with a dot; empty for the body itself. It names unknown fields."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = _names_of(cls)
        for unknown in [name for name in cast("dict[str, Any]", given) if name not in known]:
            # pydantic's errors have to be valid UTF-8, but a name from JSON may not be
            name = unknown.encode(errors="replace").decode()
            if not ignore(cls.within + name):
                raise PydanticCustomError("extra_forbidden", "Extra inputs are not permitted", {"name": name})
        return _without_nulls(cls, given)


class Routed(Fields):
    """The fields of every request to the model."""

    model: str | None = None
    user: str | None = None
    priority: Int64 = 0
    request_id: Annotated[Text, Field(max_length=256)] | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None
    """The request shares cached prefixes only with requests that have the same salt."""


class ResponseStreamOptions(Fields):
    within = "stream_options."

    include_obfuscation: bool | None = None


class StreamOptions(ResponseStreamOptions):
    include_usage: bool | None = None
    """Whether the stream ends with an event that has the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: whether every event has the usage so far."""


class StructuredOutputs(Fields):
    """A constraint on the output: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object` and
    `structural_tag`."""

    within = "structured_outputs."

    json_schema: dict[str, Any] | Text | None = Field(None, alias="json")
    """The output is JSON that matches this JSON schema, given as an object or as text."""
    regex: Text | None = None
    """The whole output matches this pattern, in the syntax of Rust's regex: no look-around, no back-references."""
    choice: List[Text] | None = None
    """The output is one of these texts."""
    grammar: Text | None = None
    """The output matches this context-free grammar, in GBNF or llguidance's variant of Lark."""
    json_object: bool | None = None
    """true: the output is any JSON object."""
    structural_tag: dict[str, Any] | Text | None = None
    """The output is text in which the parts that begin with certain tags follow formats: an object or JSON text with
    `structures` and `triggers`, or with `format`."""
    disable_any_whitespace: bool | None = None
    """true: JSON has no white space between its parts."""


class JsonSchemaFormat(Fields):
    within = "response_format.json_schema."

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Has no effect: the output always matches the schema."""


class ResponseFormat(BaseModel):
    """The format of the answer: any text, any JSON object, JSON that matches `json_schema`, or text in which parts that
    begin with certain tags follow formats (`structural_tag`, with `structures` and `triggers`, or with `format`)."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: List[dict[str, Any]] | None = None
    triggers: List[Text] | None = None
    format: dict[str, Any] | None = None


class RepetitionDetection(Fields):
    """The output ends when the same tokens follow each other `min_count` times."""

    within = "repetition_detection."

    max_pattern_size: Annotated[Int64, Field(ge=0)] | None = None
    """Maximum number of these tokens. 0: nothing is detected."""
    min_pattern_size: Annotated[Int64, Field(ge=0)] | None = None
    """Minimum number of these tokens."""
    min_count: Annotated[Int64, Field(ge=0)] | None = None


_FIELD_TYPES: dict[Any, Any] = {
    int: Int64,
    float: Number,
    str | list[str]: TextOrTexts,
    list[int]: List[int],
    list[str]: List[Text],
    dict[int, float]: Dict[str, Number],
    RepetitionDetectionParams: RepetitionDetection,
}
"""By type of a sampling parameter: that of a request's field. Other types are the same."""

_OF_CHOICES = ("n", "prompt_logprobs")
"""Parameters that have no meaning for a response, which is one output and doesn't return its prompt."""

_copied: dict[str, Any] = {
    name: (_FIELD_TYPES.get(kind, kind) | None, None)
    for name, kind in copied_types().items()
    if name not in _OF_CHOICES
}
_CopiedParameters = create_model("_CopiedParameters", __base__=Routed, **_copied)


class Generating(_CopiedParameters):
    """The fields that completions, chats and responses share. Most are the sampling parameters, under their names.

    null stands for a parameter's default. `raycore.server.generation.sampling` checks their ranges.
    """

    stream: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    session_id: Text | None = None
    """Accepted and ignored."""
    mm_processor_kwargs: dict[str, Any] | None = None
    return_mm_kwargs: bool | None = None
    mm_payload: Literal["tensors", "none"] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    watermarking: bool | None = None

    # these are copied parameters, too, which type checkers know, because the server itself reads them
    stop: TextOrTexts | None = None
    ignore_eos: bool | None = None
    bad_words: List[Text] | None = None
    thinking_token_budget: int | None = None


class SamplingRequest(Generating):
    """The fields that completion requests and chat completion requests share."""

    max_tokens: int | None = None
    n: int | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to the prompt. Default: true for completions, false for chat."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    """Whether log probabilities name tokens as `token_id:123` instead of by their text. null: as the server's option
    says."""
    best_of: int | None = None

    use_beam_search: bool | None = None
    length_penalty: Number | None = None
    early_stopping: bool | str | None = None
    truncate_prompt_tokens: int | None = None
    """Prompts are cut to so many tokens. -1: to as many as leave room for one token of output. null: prompts that are
    too long are refused."""
    truncation_side: Literal["left", "right"] | None = None
    """Where prompts are cut. `left`, the default, leaves out what is at the beginning."""
    logprob_token_ids: List[int] | None = None
    logits_processors: List[Any] | None = None
    guided_json: Any = None
    guided_regex: Text | None = None
    guided_choice: List[Text] | None = None
    guided_grammar: Text | None = None
    guided_decoding_backend: Text | None = None
    guided_whitespace_pattern: Text | None = None
    stream_interval: int | None = None
    return_token_offsets: bool | None = None
    routed_experts_prompt_start: int | None = None


class CompletionRequest(SamplingRequest):
    """Body of `POST /v1/completions`."""

    prompt: Prompt | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: TextOrTexts | None = None
    """The base64 of a file of torch.save() with the embeddings of a prompt, or several. Their choices come first."""


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    within = "tools."

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(Fields):
    within = "tool_choice.function."

    name: str


class NamedTool(Fields):
    within = "tool_choice."

    type: Literal["function"] = "function"
    function: NamedFunction


class Message(BaseModel):
    """A message of a conversation. Additional fields are passed on to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: TextOrParts | None = None
    tool_calls: List[dict[str, Any]] | None = None
    refusal: str | None = None
    """An assistant's refusal, which is used as the content if the message has no content."""
    reasoning: str | None = None
    """An assistant's reasoning before this message."""
    reasoning_content: str | None = None
    """The older name of `reasoning`."""


class ChatCompletionRequest(SamplingRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[List[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: List[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    metadata: dict[str, Any] | None = None
    modalities: List[str] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    verbosity: str | None = None
    audio: dict[str, Any] | None = None
    function_call: str | dict[str, Any] | None = None
    functions: List[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None

    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True
    """Whether the response includes the reasoning. Has no effect on a server without a reasoning parser."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: List[dict[str, Any]] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None
    """Whether the response, or the first event of a stream, has the rendered prompt in `prompt_text`."""


class BatchChatCompletionRequest(ChatCompletionRequest):
    """Body of `POST /v1/chat/completions/batch`: the fields of a chat, with several conversations."""

    messages: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]  # a conversation's copy has its messages
        List[Annotated[List[Message], Field(min_length=1)]], Field(min_length=1)
    ]


class TokenizeRequest(Fields):
    """Body of `POST /tokenize`: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: Text | None = None
    messages: List[Message] | None = None
    tools: List[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Fields):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
