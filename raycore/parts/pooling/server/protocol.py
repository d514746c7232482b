"""Models of the bodies of requests that pool. The names are those of vLLM, Jina and Cohere.

See `raycore.server.protocol` for how fields that this server doesn't support are treated.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from raycore.pooling_params import InputType
from raycore.server.protocol import Fields, List, Message, Routed, Text, TokenIds

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]


def _first(given: Any) -> Any:
    return cast("list[Any]", given)[0] if isinstance(given, list) and given else None


def _input_kind(given: Any) -> str | None:
    first = _first(given)
    if isinstance(first, list):
        return "conversations" if isinstance(_first(first), dict) else "lists_of_token_ids"
    if isinstance(first, dict):
        return "messages"
    if isinstance(given, str):
        return "text"
    if not isinstance(given, list):
        return None
    return "texts" if isinstance(first, str) else "token_ids"


def _conversations_kind(given: Any) -> str | None:
    if not isinstance(given, list):
        return None
    return "conversations" if isinstance(_first(cast("list[Any]", given)), list) else "messages"


def _document_kind(given: Any) -> str | None:
    if isinstance(given, str):
        return "text"
    return "object" if isinstance(given, dict) else None


def _documents_kind(given: Any) -> str | None:
    return "list" if isinstance(given, list) else _document_kind(given)


Messages = Annotated[List[Message], Field(min_length=1)]
Input = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[List[Text], Tag("texts")]
    | Annotated[List[TokenIds], Tag("lists_of_token_ids")]
    | Annotated[Messages, Tag("messages")]
    | Annotated[List[Messages], Tag("conversations")],
    Discriminator(_input_kind, "input", "Input should be a string, token ids, messages, or a list of one of these"),
]
Conversations = Annotated[
    Annotated[Messages, Tag("messages")] | Annotated[List[Messages], Tag("conversations")],
    Discriminator(_conversations_kind, "messages", "Input should be a list of messages, or a list of such lists"),
]
Document = Annotated[
    Annotated[Text, Tag("text")] | Annotated[dict[str, Any], Tag("object")],
    Discriminator(_document_kind, "document", "Input should be a string or an object with text or content"),
]
"""A text, `{"text": text}`, or `{"content": parts}` with parts as in a chat message."""
Documents = Annotated[
    Annotated[Text, Tag("text")] | Annotated[dict[str, Any], Tag("object")] | Annotated[List[Document], Tag("list")],
    Discriminator(_documents_kind, "documents", "Input should be a string, an object, or a list of these"),
]


class PoolingFields(Routed):
    """The fields that all requests of vLLM's which pool share."""

    truncate_prompt_tokens: int | None = None
    """Prompts are cut to so many tokens. -1: to as many as the model takes. null: prompts that are too long are
    refused."""
    truncation_side: Literal["left", "right"] | None = None
    """Where prompts are cut. `right` leaves out what is at the end. null: as the tokenizer's configuration says."""
    use_activation: bool | None = None
    """Whether embeddings are normalized, and classes' logits become probabilities or scores. null: as the model's
    pooler says, by default true."""
    padding: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class Encoded(Fields):
    """How numbers are sent."""

    encoding_format: EncodingFormat = "float"
    """base64: of the numbers' bytes. bytes: the response is all numbers' bytes, and its header `metadata` describes
    them. bytes_only: the same without that header."""
    embed_dtype: EmbedDType = "float32"
    """The type of the numbers in bytes."""
    endianness: Endianness = "native"


class InputRequest(PoolingFields):
    """A request with prompts: exactly one of `input` and `messages`."""

    input: Input | None = None
    messages: Conversations | None = None
    """A conversation, or several, which the chat template renders."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to prompts. Default: true for texts, false for conversations."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(InputRequest, Encoded):
    """Body of `POST /v1/embeddings`."""

    dimensions: int | None = None
    """How many elements of an embedding are kept, the first ones."""
    normalize: bool | None = None
    """The older name of `use_activation`."""


class ClassificationRequest(InputRequest):
    """Body of `POST /classify`."""


class PoolingRequest(EmbeddingRequest):
    """Body of `POST /pooling`."""

    task: str | None = None
    """null: the model's first task."""
    input_type: InputType | None = None
    """What the input is for a model of late interaction, such as ColBERT. null: a document."""
    data: Any = None


class ScoringRequest(PoolingFields):
    """The fields of requests that score pairs of texts."""

    max_tokens_per_query: int = 0
    """Queries are cut to so many tokens. 0: they aren't."""
    max_tokens_per_doc: int = 0
    """Documents are cut to so many tokens. 0: they aren't."""
    instruction: Text | None = None
    """A variable of the score template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """The score template's variables."""


class ScoreRequest(ScoringRequest):
    """Body of `POST /score`: exactly one of the pairs `text_1` and `text_2`, `data_1` and `data_2`, `queries` and
    `documents`, `queries` and `items`."""

    text_1: Documents | None = None
    text_2: Documents | None = None
    data_1: Documents | None = None
    data_2: Documents | None = None
    queries: Documents | None = None
    documents: Documents | None = None
    items: Documents | None = None


class RerankRequest(ScoringRequest):
    """Body of `POST /rerank`."""

    query: Document
    documents: Documents
    top_n: int = 0
    """How many documents are returned, the best ones. 0: all."""
    return_documents: bool = True
    """Whether the response has the documents' texts."""


class CohereInput(Fields):
    """An input of `POST /v2/embed`, in parts."""

    within = "inputs."

    content: List[dict[str, Any]]


class CohereEmbedRequest(Routed):
    """Body of `POST /v2/embed`: exactly one of `texts` and `inputs`."""

    texts: List[Text] | None = None
    inputs: List[CohereInput] | None = None
    images: List[Any] | None = None
    input_type: Text | None = None
    """The name of one of the checkpoint's prompts, which is put before each text."""
    embedding_types: List[Literal["float", "binary", "ubinary", "base64"]] | None = None
    """null: float."""
    output_dimension: int | None = None
    max_tokens: int | None = None
    """How many tokens an input may have."""
    truncate: Literal["NONE", "START", "END"] = "END"
    """Where inputs with too many tokens are cut. NONE: they are refused."""
