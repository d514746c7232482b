"""Models of the bodies of requests to `/v1/responses`. OpenAI's fields come first, then vLLM's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from raycore.server.protocol import Dict, Fields, Generating, List, ResponseStreamOptions, Text, text_or_list


def _fields(given: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", given) if isinstance(given, dict) else {}


def _check_type(given: Any, what: str, known: Collection[str]) -> Any:
    """Refuse an object of another type than these by its name. An object without a type is left as it is."""
    kind = _fields(given).get("type")
    if isinstance(kind, str) and kind not in known:
        shown = kind[:100].encode(errors="replace").decode()  # pydantic's errors have to be valid UTF-8
        named = {"what": what, "kind": shown, "known": ", ".join(known)}
        template = "{what} of type {kind} aren't supported: use one of type {known}"
        raise PydanticCustomError("unsupported_type", template, named)
    return given


def _type_of(given: Any) -> str | None:
    kind: Any = _fields(given).get("type", getattr(given, "type", None))
    return kind if isinstance(kind, str) else None


class Lenient(BaseModel):
    """An object that clients may have got from a server: fields that aren't used here are kept."""

    model_config = ConfigDict(extra="allow")


class InputText(Lenient):
    type: Literal["input_text"]
    text: str


class GivenText(Lenient):
    type: Literal["output_text"]
    text: str


class Refusal(Lenient):
    type: Literal["refusal"]
    refusal: str


class InputImage(Lenient):
    type: Literal["input_image"]
    image_url: str
    """An HTTP or data URL."""
    detail: Literal["auto", "low", "high", "original"] | None = None
    """Has no effect."""
    file_id: None = None
    """There are no uploaded files."""


_PARTS = ("input_text", "input_image", "output_text", "refusal")
_INPUT_PARTS = ("input_text", "input_image")

Part = Annotated[
    Annotated[InputText, Tag("input_text")]
    | Annotated[InputImage, Tag("input_image")]
    | Annotated[GivenText, Tag("output_text")]
    | Annotated[Refusal, Tag("refusal")],
    Discriminator(_type_of, "part_type", f"Input should be an object whose type is one of {', '.join(_PARTS)}"),
    BeforeValidator(lambda given: _check_type(given, "parts", _PARTS)),
]
InputPart = Annotated[
    Annotated[InputText, Tag("input_text")] | Annotated[InputImage, Tag("input_image")],
    Discriminator(_type_of, "part_type", f"Input should be an object whose type is one of {', '.join(_INPUT_PARTS)}"),
    BeforeValidator(lambda given: _check_type(given, "parts of an output", _INPUT_PARTS)),
]


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[List[Part], Tag("list")],
    Discriminator(text_or_list, "text_or_list", "Input should be a string or a list of parts"),
]
CallOutput = Annotated[
    Annotated[str, Tag("text")] | Annotated[List[InputPart], Tag("list")],
    Discriminator(text_or_list, "text_or_list", "Input should be a string or a list of parts"),
]
ItemId = Annotated[Text, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class ItemFields(Lenient):
    """What the items of a conversation have in common."""

    id: ItemId | None = None
    status: Status | None = None
    """`incomplete` or `in_progress`: if the item is the last one and an assistant's message, the model continues it."""


class InputMessage(ItemFields):
    """A message of any role."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCall(ItemFields):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: ItemId
    name: Text
    arguments: Text


class FunctionCallOutput(ItemFields):
    """What a call has returned."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: CallOutput


class GivenReasoning(Lenient):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(ItemFields):
    """The model's reasoning before what follows."""

    type: Literal["reasoning"]
    content: List[GivenReasoning] | None = None
    summary: List[GivenReasoning] | None = None
    """Stands for the content if there is none."""
    encrypted_content: str | None = None
    """Can't be read here."""


class ItemReference(Lenient):
    """Stands for an item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: ItemId


_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _item_type(given: Any) -> str | None:
    kind = _type_of(given)
    if kind is not None:
        return kind
    if isinstance(given, dict):
        return "item_reference" if "id" in given and "role" not in given else "message"
    return "message" if isinstance(given, InputMessage) else "item_reference"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_item_type, "item_type", f"Input should be an object whose type is one of {', '.join(_ITEMS)}"),
    BeforeValidator(lambda given: _check_type(given, "items", _ITEMS)),
]
Input = Annotated[
    Annotated[Text, Tag("text")] | Annotated[List[Item], Tag("list")],
    Discriminator(text_or_list, "text_or_list", "Input should be a string or a list of items"),
]


class FunctionTool(Fields):
    """A function that the model may call."""

    within = "tools."

    type: Literal["function"]
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """true: the arguments always follow the schema. Otherwise they do in calls that `tool_choice` requires."""
    output_schema: dict[str, Any] | None = None
    """Has no effect."""
    defer_loading: Literal[False] | None = None
    allowed_callers: List[Literal["direct"]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, given: Any) -> Any:
        return _check_type(given, "tools", ("function",))


class ChosenFunction(Fields):
    """One of the tools."""

    within = "tool_choice."

    type: Literal["function"]
    name: Text

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, given: Any) -> Any:
        return _check_type(given, "tools", ("function",))


class AllowedTools(Fields):
    """The tools that this request may call. The others are left out."""

    within = "tool_choice."

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[List[ChosenFunction], Field(min_length=1)]


_CHOICES = ("function", "allowed_tools")
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[ChosenFunction, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(
        lambda given: "text" if isinstance(given, str) else _type_of(given),
        "tool_choice",
        "Input should be none, auto, required, or an object whose type is function or allowed_tools",
    ),
    BeforeValidator(lambda given: _check_type(given, "tool choices", _CHOICES)),
]


class TextFormat(Fields):
    """The format of the answer: any text, any JSON object, or JSON that matches `schema`."""

    within = "text.format."

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Has no effect: the output always matches the schema."""


class TextOptions(Fields):
    within = "text."

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Has no effect."""


class ReasoningOptions(Fields):
    within = "reasoning."

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Has no effect: the reasoning itself is in the response."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """Has no effect: the chat template decides which reasoning the model sees again."""
    mode: Literal["standard"] | None = None


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Only the log probabilities change anything: reasoning is never encrypted, and there are no such calls."""


_MOST_METADATA = 16


def _check_number(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > _MOST_METADATA:
        raise ValueError(f"it has {len(metadata)} keys; at most {_MOST_METADATA} are allowed")
    return metadata


Metadata = Annotated[
    Dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], AfterValidator(_check_number)
]


class ResponsesRequest(Generating):
    """Body of `POST /v1/responses`."""

    input: Input | None = None
    background: bool | None = None
    """Return at once. The response is to be had by its id."""
    include: List[Included] | None = None
    instructions: Text | None = None
    """A system message before the conversation. It isn't kept for later responses."""
    max_output_tokens: int | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Has no effect: this limits calls that a server makes itself."""
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: ItemId | None = None
    """The stored response whose conversation this one continues."""
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    """Whether the response can be had again by its id. Default: true."""
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: ToolChoice | None = None
    tools: List[FunctionTool] | None = None
    top_logprobs: int | None = None
    """Number of alternatives for each token, if `include` has `message.output_text.logprobs`."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: if the conversation is too long, leave out its oldest messages."""
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: str | None = None
    """Has no effect."""
    access_programs: dict[str, Any] | None = None
    background_options: dict[str, Any] | None = None
    context_management: List[dict[str, Any]] | None = None
    conversation: str | dict[str, Any] | None = None
    image: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None

    include_reasoning: bool = True
    """Whether the response includes the reasoning."""
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    enable_response_messages: Literal[False] | None = None
    previous_input_messages: List[Any] | None = None
