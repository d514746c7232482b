"""Everything that crosses a process, as msgspec Structs.

Three conversations, none of which carries a tensor:

* client → engine: `EngineRequest`, a batch at a time; engine → client: `OutputBatch`, one for each flush.
* engine → workers: `StepPlan`, a delta; workers → engine: `StepResult`.

A `seq_id` is the integer that identifies one sequence of a request. The client assigns it: its `client_index` in the
upper 24 bits, a running number in the lower 40. A *slot* is the row that a running request
has in the engine's and the workers' arrays, from its admission until it finishes or is preempted. Arrays travel as the
raw bytes of C-contiguous little-endian numpy arrays, whose element type each field states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from raycore.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CLIENT_SHIFT = 40

_SeqIdsT = TypeVar("_SeqIdsT", int, "NDArray[np.int64]")


def client_of(seq_id: _SeqIdsT) -> _SeqIdsT:
    """The index of the client that assigned this id, or of each of an array of them."""
    return seq_id >> _CLIENT_SHIFT


def first_seq_id(client_index: int) -> int:
    """The first id that a client assigns; its others follow."""
    return client_index << _CLIENT_SHIFT


class EngineRequest(msgspec.Struct, array_like=True):
    """A request as a client hands it to an engine: one sequence (`n` is expanded by the client)."""

    seq_id: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Never None: what the keyed random numbers are drawn from, non-negative, below 2**63."""
    eos_token_ids: list[int] = []
    """Tokens that end the sequence, unless `params.ignore_eos`."""
    bad_words_token_ids: list[list[int]] = []
    output_token_ids: list[int] = []
    """Tokens already generated, when a request goes on where another engine left it."""
    priority: int = 0
    """Lower runs first, under the `priority` policy."""
    flush_interval_s: float = 0.0
    """New tokens may wait this long for company before they are sent. A finished request is sent at once."""
    cache_salt: str | None = None
    """The request shares cached prefixes only with requests of the same salt."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one position, natural logarithms.

    The first entry is the token that is there (sampled, or of the prompt) with its 1-based `rank` in the
    vocabulary; the others are the most likely tokens, best first.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class NewRequest(msgspec.Struct, array_like=True):
    """What a worker needs to know of a request when it gets its slot, all at once."""

    slot: int
    token_ids: bytes
    """int32[num_known]: the prompt and, when the request goes on after a preemption, its output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values already stand in the blocks, thanks to the prefix cache."""
    block_ids: bytes
    """int32[num_blocks]: enough for the tokens of this step."""
    params: SamplingParams
    seed: int
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []


class StepPlan(msgspec.Struct, array_like=True):
    """One step, as a delta to what the workers already know.

    A worker applies it in this order: forget `freed_slots`, take in `new_requests`, append `new_block_ids`, then
    compute `num_tokens[i]` tokens for `slots[i]`, from where that slot's computed tokens end. A slot whose computed
    tokens thereby reach its known ones gets one new token sampled, which the worker appends to its known tokens itself.
    """

    step: int
    slots: bytes = b""
    """int32[n], decodes (one token) first, in the order of the batch."""
    num_tokens: bytes = b""
    """int32[n]; empty means one token each."""
    freed_slots: list[int] = []
    new_requests: list[NewRequest] = []
    new_block_slots: bytes = b""
    """int32[m]: the slot that gets `new_block_ids[j]` as its next block; a slot may occur more than once."""
    new_block_ids: bytes = b""
    """int32[m]."""


class StepResult(msgspec.Struct, array_like=True):
    """What a step gave, in the order of the plan's `slots`."""

    step: int
    token_ids: bytes = b""
    """int32[n]: the sampled token of each slot, -1 where none was sampled (a prompt's earlier chunks)."""
    logprobs: list[tuple[int, TokenLogprobs]] = []
    """(index into `slots`, logprobs of the sampled token), only for requests that asked."""
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = []
    """(index into `slots`, first position, one entry for each position from there on), only for requests that asked."""
    failed: list[tuple[int, str]] = []
    """(index into `slots`, why) of requests that can't go on, whatever token was sampled for them."""
    is_anyone_busy: bool = True
    """Of ranks that share experts: whether any of them had tokens to compute in this step."""


class FinishedRequest(NamedTuple):
    """The end of a request. No output follows it."""

    seq_id: int
    finish_reason: str
    """`stop`, `length`, `abort`, `error` if it was refused, or `failed` if it can't go on."""
    stop_reason: int | str | None = None
    """The token of `stop_token_ids` that ended it; with `error` and `failed`, the error's text."""


class LoadView(msgspec.Struct, frozen=True, array_like=True):
    """A rank's load, and what it has counted."""

    num_waiting: int
    num_running: int
    kv_usage: float
    """Share of the KV cache's blocks that running requests hold, 0 to 1."""
    num_preemptions: int = 0
    """How often a running request had to start over. This and what follows count from the rank's start."""
    prefix_cache_queries: int = 0
    """Tokens of requests that were looked for in the prefix cache, when the requests ran for the first time."""
    prefix_cache_hits: int = 0
    """Those of them that it held."""
    num_deferred: int = 0
    """Those of `num_waiting` that are held back while their grammars are compiled."""


NO_LOAD = LoadView(0, 0, 0.0)


class SequenceNews(msgspec.Struct, array_like=True):
    """What there is to say of single sequences, besides their new tokens.

    Every field is a list of tuples that begin with a seq_id. A new field needs nothing but who fills and who reads it:
    `append`, `clients` and `entries_of` treat all fields alike.
    """

    started: list[tuple[int, int]] = []
    """(seq_id, num_cached_tokens) of requests that were scheduled for the first time."""
    queued: list[tuple[int, float]] = []
    """(seq_id, seconds) of the same requests: from their arrival in the engine to their first step."""
    finished: list[FinishedRequest] = []
    """Their last tokens come with it."""
    logprobs: list[tuple[int, TokenLogprobs]] = []
    """(seq_id, logprobs of its next token), in the order of its tokens."""
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = []
    """(seq_id, first position, one entry for each position from there on); no position comes twice."""

    def append(self, later: SequenceNews) -> None:
        """Take in what another record of the same kind has; of a subclass only the fields of this class."""
        for field in SequenceNews.__struct_fields__:
            entries = getattr(later, field)
            if entries:
                getattr(self, field).extend(entries)

    def clients(self) -> set[int]:
        """The clients of the sequences that are named here."""
        fields = SequenceNews.__struct_fields__
        return {client_of(entry[0]) for field in fields for entry in getattr(self, field)}

    def entries_of(self, client: int) -> dict[str, Any]:
        """By field: the entries of this client's sequences."""
        return {
            field: [entry for entry in getattr(self, field) if client_of(entry[0]) == client]
            for field in SequenceNews.__struct_fields__
        }


class OutputBatch(SequenceNews, array_like=True):
    """What one flush sends to one client: tokens in the order in which they were made, then what finished.

    One with nothing but a load tells a client of other clients' requests.
    """

    seq_ids: bytes = b""
    """int64[k]: whose `token_ids[i]` is; a seq_id may occur more than once."""
    token_ids: bytes = b""
    """int32[k]."""
    steps: list[tuple[int, float, float]] = []
    """(tokens, seconds, seconds) of each step that is in here, in order: how many of the tokens it made, each for
    another seq_id; how long before the batch was sent; and how long it took, from its plan to its result."""
    load: LoadView = NO_LOAD
    """The rank's, when the batch was sent."""


class EngineInfo(msgspec.Struct):
    """What an engine says of itself once it is up."""

    dp_rank: int
    pid: int
    node_id: str
    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: str
    timings_s: dict[str, float]
    """Seconds that each part of the startup took."""
    worker_pids: list[int]
    gpu_ids: list[str] = []
    """The GPU of each worker, as its node numbers them; empty for a rank on CPUs."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size
