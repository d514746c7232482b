"""Models of bodies of the endpoints that control the engine. The fields are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from raycore.config.parallel import MAX_RANKS
from raycore.options.numbers import MAX_SECONDS
from raycore.server.protocol import Fields, Int64, List, Number, Text


class LoadLoraAdapterRequest(Fields):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: Annotated[Text, Field(min_length=1, max_length=1024)]
    """What requests will give as `model`."""
    lora_path: Annotated[Text, Field(min_length=1, max_length=4096)]
    """The absolute path of the adapter's directory, or of a GGUF file, on the server's machine."""
    load_inplace: bool = False
    """Whether to replace the adapter that has this name."""
    is_3d_lora_weight: Literal[False] = False
    """Adapters of experts aren't supported."""


class UnloadLoraAdapterRequest(Fields):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[Text, Field(max_length=1024)]
    lora_int_id: Int64 | None = None


class AbortRequest(Fields):
    """Body of `POST /abort_requests`."""

    request_ids: List[Text] | None = None
    """The ids of responses. Empty or null: all requests."""


class CollectiveRpcRequest(Fields):
    """Body of `POST /collective_rpc`."""

    method: Text
    args: List[Any] = Field([])
    kwargs: dict[str, Any] = Field({})
    timeout: Annotated[Number, Field(gt=0, le=MAX_SECONDS)] | None = None


class ScaleRequest(Fields):
    """Body of `POST /scale_elastic_ep`."""

    new_data_parallel_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    drain_timeout: Annotated[Number, Field(ge=0, le=MAX_SECONDS)] = 120
    """Seconds that the requests of removed ranks have to finish there."""
