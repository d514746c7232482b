"""The messages between processes, as msgspec Structs. None carries a tensor.

* client → engine: lists of `EngineRequest`; engine → client: `OutputBatch`, one per flush.
* engine → workers: `StepPlan`, a delta; workers → engine: `StepResult`.

A `seq_id` is the integer that identifies one sequence of a request. The client assigns it: its `client_index` in the
upper 24 bits, a running number in the lower 40. A *slot* is a running request's row in the engine's and the workers'
arrays, from its admission until it finishes or is preempted. Arrays are sent as the raw bytes of C-contiguous
little-endian numpy arrays; each field states the element type.
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
    """The first id that a client assigns. Later ones count up from it."""
    return client_index << _CLIENT_SHIFT


class EngineRequest(msgspec.Struct, array_like=True):
    """One sequence of a request, as a client submits it to an engine. The client expands `n`."""

    seq_id: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Key of the random numbers, in [0, 2**63). Always set, unlike `params.seed`."""
    eos_token_ids: list[int] = []
    """Tokens that end the sequence, unless `params.ignore_eos`."""
    bad_words_token_ids: list[list[int]] = []
    output_token_ids: list[int] = []
    """Tokens that another engine has already generated, if the request is replayed."""
    priority: int = 0
    """Lower runs first, under the `priority` policy."""
    flush_interval_s: float = 0.0
    """New tokens are sent in batches, at most this late. The end of a request is sent at once."""
    cache_salt: str | None = None
    """The request shares cached prefixes only with requests of the same salt."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one position, natural logarithms.

    The first entry is the actual token (sampled, or of the prompt), with its 1-based `rank` in the vocabulary. The
    others are the most likely tokens, best first.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class NewRequest(msgspec.Struct, array_like=True):
    """Everything a worker needs to know of a request. Sent once, when the request gets its slot."""

    slot: int
    token_ids: bytes
    """int32[num_known]: the prompt and, after a preemption or a replay, the output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values are already in the blocks, from the prefix cache."""
    block_ids: bytes
    """int32[num_blocks]: blocks for the tokens up to the end of this step."""
    params: SamplingParams
    seed: int
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []


class StepPlan(msgspec.Struct, array_like=True):
    """One step, as a delta to what the workers already know.

    A worker applies it in this order: free `freed_slots`, add `new_requests`, append `new_block_ids`, then compute the
    next `num_tokens[i]` tokens of `slots[i]`. If all known tokens of a slot have then been computed, the worker samples
    one new token and appends it to the slot's known tokens.
    """

    step: int
    slots: bytes = b""
    """int32[n], in the order of the batch: decodes (one token) first."""
    num_tokens: bytes = b""
    """int32[n]; empty means one token each."""
    freed_slots: list[int] = []
    new_requests: list[NewRequest] = []
    new_block_slots: bytes = b""
    """int32[m]: the slot to which block `new_block_ids[j]` is appended. A slot may occur more than once."""
    new_block_ids: bytes = b""
    """int32[m]."""


class StepResult(msgspec.Struct, array_like=True):
    """The result of a step, in the order of the plan's `slots`."""

    step: int
    token_ids: bytes = b""
    """int32[n]: the sampled token of each slot, -1 where none was sampled (a prompt's earlier chunks)."""
    logprobs: list[tuple[int, TokenLogprobs]] = []
    """(index into `slots`, logprobs of the sampled token), for requests with `logprobs`."""
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = []
    """(index into `slots`, first position, one per position from there on), for requests with `prompt_logprobs`."""
    failed: list[tuple[int, str]] = []
    """(index into `slots`, reason) of requests that fail, whatever token was sampled for them."""
    is_anyone_busy: bool = True
    """For ranks that share experts: whether any of them had tokens to compute in this step."""


class FinishedRequest(NamedTuple):
    """The end of a sequence. No output follows it."""

    seq_id: int
    finish_reason: str
    """`stop`, `length`, `abort`, `error` (refused) or `failed` (can't continue)."""
    stop_reason: int | str | None = None
    """The token of `stop_token_ids` that ended it. For `error` and `failed`, the error's text."""


class LoadView(msgspec.Struct, frozen=True, array_like=True):
    """A rank's load and counters."""

    num_waiting: int
    num_running: int
    kv_usage: float
    """Share of the KV cache's blocks that running requests hold, 0 to 1."""
    num_preemptions: int = 0
    """Preemptions of running requests. This and the other counters count from the rank's start."""
    prefix_cache_queries: int = 0
    """Tokens looked up in the prefix cache when their requests were first scheduled."""
    prefix_cache_hits: int = 0
    """Tokens that the lookups found."""
    num_deferred: int = 0
    """Requests among `num_waiting` that wait for their grammars to be compiled."""


NO_LOAD = LoadView(0, 0, 0.0)


class SequenceNews(msgspec.Struct, array_like=True):
    """Events of single sequences, apart from new tokens.

    Every field is a list of tuples that begin with a seq_id. `append`, `clients` and `entries_of` handle all fields
    alike, so a new field needs no change to them.
    """

    started: list[tuple[int, int]] = []
    """(seq_id, num_cached_tokens) of requests that were scheduled for the first time."""
    queued: list[tuple[int, float]] = []
    """(seq_id, seconds from the arrival in the engine to the first step) of the same requests."""
    finished: list[FinishedRequest] = []
    """Finished sequences. Their last tokens are in the same message."""
    logprobs: list[tuple[int, TokenLogprobs]] = []
    """(seq_id, logprobs of its next token), in token order."""
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = []
    """(seq_id, first position, one entry per position from there on). Each position is sent once."""

    def append(self, later: SequenceNews) -> None:
        """Add the entries of `later`. Of a subclass, only the fields of this class are added."""
        for field in SequenceNews.__struct_fields__:
            entries = getattr(later, field)
            if entries:
                getattr(self, field).extend(entries)

    def clients(self) -> set[int]:
        """The clients whose sequences occur here."""
        fields = SequenceNews.__struct_fields__
        return {client_of(entry[0]) for field in fields for entry in getattr(self, field)}

    def entries_of(self, client: int) -> dict[str, Any]:
        """The entries of one client's sequences, by field."""
        return {
            field: [entry for entry in getattr(self, field) if client_of(entry[0]) == client]
            for field in SequenceNews.__struct_fields__
        }


class OutputBatch(SequenceNews, array_like=True):
    """What one flush sends to one client: tokens in the order of generation, and events.

    A batch with only a load tells a client how other clients' requests load the rank.
    """

    seq_ids: bytes = b""
    """int64[k]: the sequence of `token_ids[i]`. A seq_id may occur more than once."""
    token_ids: bytes = b""
    """int32[k]."""
    steps: list[tuple[int, float, float]] = []
    """(tokens, age, duration) of each step in this batch, in order: the number of tokens it generated, each for another
    seq_id; seconds from its end until the batch was sent; seconds from its plan to its result."""
    load: LoadView = NO_LOAD
    """The rank's load when the batch was sent."""


class EngineInfo(msgspec.Struct):
    """What an engine reports about itself once it has started."""

    dp_rank: int
    pid: int
    node_id: str
    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: str
    timings_s: dict[str, float]
    """Seconds that each phase of the start took."""
    worker_pids: list[int]
    gpu_ids: list[str] = []
    """The GPU of each worker, as numbered on its node; empty on CPUs."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit in the KV cache."""
        return self.num_blocks * self.block_size
