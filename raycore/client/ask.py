"""What a caller asks of an engine: one request, on its way from a public method to the ranks.

The methods that users and servers call make an `Ask`, once. What is behind them takes it as a whole: `Streams`,
`StepQueue`, `EngineClient`, `RequestTable`, and whoever watches (`raycore.client.watchers`). So a new parameter of
requests is one field here, one argument of each method that offers it, and whatever reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from raycore.beam_search import BeamSearchParams
from raycore.client.inputs import ParsedPrompt, Prompt, adapters_for_each, params_for_each, priorities_for_each
from raycore.client.tokenization import PLAIN, Tokenization
from raycore.client.updates import COALESCE_S, STOP_STRING_COALESCE_S, Streaming
from raycore.lora.request import LoRARequest
from raycore.messages import ThinkingLimit
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.system import uuid


class Ask(msgspec.Struct, frozen=True):
    """One request: a prompt, and all that its caller wants of it. It has an output for each of its sequences."""

    prompt: Prompt | ParsedPrompt
    params: SamplingParams | BeamSearchParams | PoolingParams
    """Their type says whether the prompt is continued, its best continuations are searched for, or it is pooled."""
    request_id: str
    """Must not be the id of another unfinished request."""
    priority: int = 0
    """Lower values run first. Needs `scheduling_policy="priority"`."""
    stream: Streaming = False
    """Which outputs the caller gets."""
    data_parallel_rank: int | None = None
    """The rank that gets the request. Another one does if it is being replaced, is lost, or has no weights to serve
    with. None: the router chooses."""
    lora: LoRARequest | None = None
    """The adapter that the request uses."""
    tokenization: Tokenization = PLAIN
    """How a prompt that isn't parsed yet becomes tokens."""
    trace_headers: Mapping[str, str] = {}
    """HTTP headers, of which `traceparent` names the span that those of this request are parts of."""
    is_reserved: bool = False
    """Whether the caller has the id by `Streams.reserved()`."""

    @property
    def parsed(self) -> ParsedPrompt:
        """The prompt, once it is parsed."""
        assert isinstance(self.prompt, ParsedPrompt), "Streams parses prompts before anything else gets the request"
        return self.prompt


@dataclass(frozen=True, slots=True)
class CheckedAsk:
    """A request that can run, with what its parameters mean for ranks."""

    ask: Ask
    """Its prompt is parsed."""
    request_id: str
    priority: int
    wanted_rank: int | None
    """The rank that the caller asked for, if any."""
    params: SamplingParams
    """A copy of the caller's; of a request that pools, those of the one token that it gets."""
    bad_words_token_ids: list[list[int]]
    thinking: ThinkingLimit | None = None
    pooling: PoolingParams | None = None
    """What the request pools, with nothing left open. None: it generates."""

    @property
    def flush_interval_s(self) -> float:
        """How long, in seconds, a rank may hold tokens back to send more at once."""
        if self.ask.stream or self.pooling is not None:
            return 0.0
        return STOP_STRING_COALESCE_S if self.params.stop_strings else COALESCE_S


def asks_of(
    prompts: Sequence[ParsedPrompt],
    params: SamplingParams | Sequence[SamplingParams],
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    priority: int | Sequence[int] | None = None,
) -> list[Ask]:
    """Return a request for each of a call's prompts. The arguments are those of `LLM.generate`: one for all, or one for
    each.

    Raises:
        InvalidRequest: an argument is invalid, or is a list of another length; the message names it.
    """
    count = len(prompts)
    adapters = adapters_for_each(lora_request, count)
    each = params_for_each(params, count)
    ranked = priorities_for_each(priority, count)
    return [
        Ask(prompt, one, uuid.uuid4().hex, before, lora=adapter)
        for prompt, one, before, adapter in zip(prompts, each, ranked, adapters, strict=True)
    ]


def id_or_new(request_id: str | None) -> str:
    """The id that a caller gives, or a random one."""
    return uuid.uuid4().hex if request_id is None else request_id
