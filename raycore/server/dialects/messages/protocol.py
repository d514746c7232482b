"""Models of the bodies of Anthropic's Messages API. vLLM's own fields come last.

Unknown fields are ignored: clients send those of beta versions that change nothing here, such as `cache_control`. Kinds
of blocks and tools that would change the answer are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from raycore.server.protocol import List, Number, Text

LEAST_BUDGET = 1024
"""The least `budget_tokens` that Anthropic documents."""


class _Read(BaseModel):
    """Has the fields that this server reads, and checks their types."""

    model_config = ConfigDict(extra="ignore", strict=True)


def _as_blocks(given: Any) -> Any:
    """A text stands for a block with this text."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


def _type_of(given: object) -> object:
    return cast("dict[str, Any]", given).get("type") if isinstance(given, dict) else None


class TextBlock(_Read):
    type: Literal["text"]
    text: str


class Base64Source(_Read):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(_Read):
    type: Literal["url"]
    url: str


class ImageBlock(_Read):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


_Texts = Annotated[List[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])]


class PlainTextSource(_Read):
    type: Literal["text"]
    data: str


class ContentSource(_Read):
    type: Literal["content"]
    content: _Texts


class DocumentBlock(_Read):
    """A document, whose text becomes a part of the message."""

    type: Literal["document"]
    source: Annotated[PlainTextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(_Read):
    """A result of a search, whose text becomes a part of the message."""

    type: Literal["search_result"]
    source: str
    title: str
    content: List[TextBlock]


class ToolReferenceBlock(_Read):
    type: Literal["tool_reference"]
    tool_name: str


ResultBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
_AnyResultBlock = Annotated[ResultBlock, Field(discriminator="type")]


class ThinkingBlock(_Read):
    """Reasoning of an earlier answer. Its signature isn't checked: anybody may write an assistant's messages."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(_Read):
    """Reasoning that only Anthropic can read. It is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Read):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Read):
    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            List[_AnyResultBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_AnyResultBlock])
        ]
        | None
    ) = None
    is_error: bool | None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)
_AnyBlock = Annotated[Block, Field(discriminator="type")]


class Turn(_Read):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[List[_AnyBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_AnyBlock])]


class ToolDefinition(_Read):
    """A tool that the client runs."""

    name: Text
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, given: Any) -> Any:
        kind = _type_of(given)
        if isinstance(kind, str) and kind != "custom":
            raise PydanticCustomError(
                "unsupported_tool",
                "tools of type {kind} aren't supported: only tools that the client runs, with an input_schema",
                {"kind": repr(kind.encode(errors="replace").decode())},
            )
        return given


class ToolChoice(_Read):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool that must be called, for type `tool`."""
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if self.type == "tool" and not self.name:
            raise PydanticCustomError("missing_name", "type 'tool' needs the name of a tool")
        return self


class Thinking(_Read):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """The most tokens of reasoning, for type `enabled`."""

    @model_validator(mode="after")
    def _check_budget(self) -> Thinking:
        if self.type == "enabled" and (self.budget_tokens is None or self.budget_tokens < LEAST_BUDGET):
            raise PydanticCustomError(
                "small_budget",
                "budget_tokens={given} isn't at least {least}",
                {"given": str(self.budget_tokens), "least": LEAST_BUDGET},
            )
        return self


class OutputFormat(_Read):
    """The format of the text: JSON that matches the schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Read):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(_Read):
    user_id: str | None = None


class CountTokensRequest(_Read):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: Annotated[List[Turn], Field(min_length=1)]
    system: _Texts | None = None
    tools: List[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older form of `output_config.format`."""
    mcp_servers: List[dict[str, Any]] | None = None
    """Must be empty."""
    container: Any = None
    """Must be null."""

    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _refuse(self) -> CountTokensRequest:
        for name in ("mcp_servers", "container"):
            if getattr(self, name):
                raise PydanticCustomError(
                    "unsupported_field", "{name} isn't supported: only Anthropic's servers have it", {"name": name}
                )
        return self


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    """The most tokens of the answer. If the model's context is full earlier, the answer ends there."""
    stop_sequences: List[Text] | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    cache_salt: Text | None = None
    priority: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    watermarking: bool | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> MessagesRequest:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if self.thinking is not None and self.thinking.type == "enabled" and (budget or 0) >= self.max_tokens:
            raise PydanticCustomError(
                "large_budget",
                "thinking.budget_tokens={budget} isn't less than max_tokens={most}",
                {"budget": budget, "most": self.max_tokens},
            )
        return self
