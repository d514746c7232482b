"""The messages between processes, as msgspec Structs. None carries a tensor.

* client → engine: lists of `EngineRequest`; engine → client: `OutputBatch`.
* engine → workers: `StepPlan`; workers → engine: `StepResult`.

"Engine" means the engine of one data-parallel rank. A `seq_id` is the integer that identifies one sequence of a
request. The client assigns it: the upper 24 bits are the client's index, the lower 40 a running number. A *slot* is a
running sequence's row in the engine's and the workers' arrays, from its admission until it finishes or is preempted.
Arrays are sent as the raw bytes of C-contiguous little-endian numpy arrays; each field states the element type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from raycore.cache_layout import CacheLayout
from raycore.lora.request import LoRARequest
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NO_ADAPTER = -1
"""Instead of the slot of an adapter."""
NO_STATE = -1
"""Instead of the row of a state: the state of no tokens."""
_CLIENT_SHIFT = 40

_SeqIdsT = TypeVar("_SeqIdsT", int, "NDArray[np.int64]")


def client_of(seq_id: _SeqIdsT) -> _SeqIdsT:
    """The index of the client that assigned a seq_id. For an array of seq_ids, an array of indices."""
    return seq_id >> _CLIENT_SHIFT


def first_seq_id(client_index: int) -> int:
    """The first seq_id that a client assigns. Its later seq_ids count up from this one."""
    return client_index << _CLIENT_SHIFT


def _ints(array: bytes) -> memoryview[int]:
    """The elements of an int32 array."""
    return memoryview(array).cast("i")


class Feature(msgspec.Struct, array_like=True):
    """A part of a prompt that isn't text, such as an image. In its range of the prompt, each token stands for one
    embedding, which an encoder computes."""

    identifier: str
    """A hash of the content, and of everything that its embeddings depend on."""
    position: int
    """The index in the prompt of the first token of the range."""
    num_tokens: int
    grid: tuple[int, int, int] = (1, 1, 1)
    """Frames, rows and columns of the patches that the encoder sees. Three-axis rotations count with it."""
    modality: str = "image"


class FeatureData(msgspec.Struct, array_like=True):
    """What an encoder computes the embeddings of a `Feature` from, or the embeddings themselves."""

    data: bytes
    shape: list[int]
    dtype: str = "float32"
    """By numpy's name. `bfloat16`: the upper halves of float32."""
    is_embedding: bool = False


class ThinkingLimit(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens the reasoning of an output may have, and how it is ended. No list is empty."""

    max_tokens: int
    opening: list[int]
    """The tokens of the tag before the reasoning."""
    closing: list[int]
    """The tokens of the tag after it."""
    forced: list[int]
    """The tokens that end reasoning that has had `max_tokens` tokens. They end with `closing`, or stand for it."""
    is_open: bool | None = None
    """As in `ReasoningTags`."""


class EngineRequest(msgspec.Struct, array_like=True):
    """One sequence of a request, as a client submits it to an engine. A request with `n=3` becomes three of these."""

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
    """Tokens that another rank has already generated, if the request has moved to this rank."""
    priority: int = 0
    """Under the `priority` policy, requests with lower values run first."""
    flush_interval_s: float = 0.0
    """How long, in seconds, the engine may hold back new tokens to send more at once. The end of a request is sent at
    once."""
    cache_salt: str | None = None
    """The request shares cached prefixes only with requests of the same salt."""
    lora: LoRARequest | None = None
    """The adapter that the request uses."""
    lora_revision: int | None = None
    """The adapter's revision (see `AddedAdapter`) that another rank has used, if the request has moved to this rank
    with tokens."""
    pooling: PoolingParams | None = None
    """What the request gets instead of tokens. None: tokens."""
    features: list[Feature] = []
    """In the order of their ranges, which don't overlap."""
    feature_data: list[FeatureData | None] = []
    """For each feature: its data. None: the engine has it already, as the client believes."""
    hints: dict[str, Any] | None = None
    """What the client's router tells the rank's KV connector of blocks on other ranks. What the caller tells it is in
    `params.extra_args`."""
    second_text: int = 0
    """The index in the prompt at which the second text of a pair begins, for encoders that tell them apart. 0: there is
    one text."""
    thinking: ThinkingLimit | None = None
    """None: reasoning may be as long as the output."""
    hands_over: bool = False
    """Whether this rank computes only the prompt and a token, and another one goes on."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities (natural logarithms) at one position.

    The first entry is the actual token, sampled or from the prompt. `rank` is that token's 1-based rank by probability
    in the whole vocabulary. The other entries are the most likely tokens, best first, or those that the request chose.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class NewRequest(msgspec.Struct, array_like=True):
    """Everything a worker needs to know of a request. Sent when the request gets a slot, and again if it gets another
    one after a preemption."""

    slot: int
    token_ids: bytes
    """int32[num_known]: the prompt and, after a preemption or a replay, the output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values are already in the blocks, from the prefix cache."""
    block_ids: bytes
    """int32[num_blocks, num_groups]: blocks for the tokens up to the end of this step, one for each group of the KV
    cache. Any number may stand for a block that no token of this step or of a later one sees."""
    params: SamplingParams
    seed: int
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    adapter: int = NO_ADAPTER
    """The slot of the LoRA adapter that the request uses, among those that the worker holds."""
    pooling: PoolingParams | None = None
    """What the request gets instead of tokens. None: tokens."""
    features: list[Feature] = []
    second_text: int = 0
    """As in `EngineRequest`."""
    thinking: ThinkingLimit | None = None
    """As in `EngineRequest`."""


class StepTokens(msgspec.Struct, array_like=True):
    """A step's tokens, for workers that don't know them."""

    starts: bytes
    """int32[n]: the position in its sequence of each slot's first token in the step."""
    num_sampled: bytes
    """int32[n]: how many of each slot's tokens in the step, the last ones, a new token is sampled after. All but the
    first of these are drafts."""
    token_ids: bytes
    """int32[T]: the tokens, slot after slot."""


class StatePlan(msgspec.Struct, array_like=True):
    """What a step does with the states of prefixes, for models whose layers keep states. A *row* has a state of each of
    these layers. Slots have rows of their own, and the rows after those have the states of prefixes."""

    begins: bytes = b""
    """int32[n, 2]: new requests whose first tokens are computed already: the slot, and the row that it begins with."""
    saves: bytes = b""
    """int32[m, 3]: states that are kept: the slot, after how many of its tokens, and the row that gets the state. These
    are fewer tokens than after this step, and, where the step of the slot before had drafts, more than before that."""


class EncoderPlan(msgspec.Struct, array_like=True):
    """What a step does with the embeddings of features, which workers keep by the features' identifiers."""

    freed: list[str] = []
    """The identifiers of embeddings that are dropped, before others are computed."""
    inputs: list[tuple[Feature, FeatureData]] = []
    """What is encoded, before the step's tokens are computed. The position in a `Feature` has no meaning here."""
    identity: bytes = b""
    """What the encoder is known by where embeddings are kept besides: `parts/transfers/connectors/identity.py`."""


class GrammarOutput(msgspec.Struct, array_like=True):
    """Which tokens may come next, for some of a step's new tokens. The others are free."""

    slots: bytes
    """int32[m]: the slots that get the tokens, slot after slot in the order of the plan."""
    positions: bytes
    """int32[m]: the positions in their sequences that the tokens get."""
    bitmask: bytes
    """int32[m, ceil(vocab_size / 32)]: bit `i` of word `j` says whether token `32 * j + i` may come."""


DUMMY_STEP = -1
"""The number of a step without tokens that the scheduler doesn't know of: other ranks share experts in it."""


class StepPlan(msgspec.Struct, array_like=True):
    """One step, as a delta to what the workers already know.

    A worker applies it in this order: free `freed_slots`, add `new_requests`, append `new_block_ids`, then compute the
    next `num_tokens[i]` tokens of `slots[i]`. If all known tokens of a slot have then been computed, the worker samples
    one new token and appends it to the slot's known tokens. If the plan has `tokens`, these say instead which tokens a
    slot has, from which position on, and after which of them the worker samples.

    A *draft* is a guess of the token that a request gets next. The worker samples after each draft, too, and keeps the
    tokens up to the first one that differs from the draft at its position. Drafts are in `tokens`, or the worker makes
    them itself, at most `max_drafts[i]` after the tokens of `slots[i]`. The number of a slot's known tokens is then
    the worker's to know: the plan may be made while drafts of earlier steps are being verified.
    """

    step: int
    slots: bytes = b""
    """int32[n], in the order of the batch: decodes (one token) first."""
    num_tokens: bytes = b""
    """int32[n]; empty means one token each."""
    freed_slots: list[int] = []
    new_requests: list[NewRequest] = []
    new_block_slots: bytes = b""
    """int32[m]: element `j` is the slot to which the blocks `new_block_ids[j]` are appended. A slot may occur
    repeatedly."""
    new_block_ids: bytes = b""
    """int32[m, num_groups]: the blocks, one for each group of the KV cache. A block may have been another request's, or
    the same one's, until its last steps, which workers have computed before."""
    tokens: StepTokens | None = None
    """None: the step has no drafts, and the workers know the tokens."""
    states: StatePlan | None = None
    """None: the model's layers keep no states, or the step has nothing to do with those of prefixes."""
    encoder: EncoderPlan | None = None
    """None: nothing is encoded or dropped."""
    transfer: bytes | None = None
    """What the KV connector of the scheduler tells those of the workers, as it encodes that. None: nothing."""
    max_drafts: bytes = b""
    """int32[n]: how many drafts of its own the worker adds to each slot's tokens at most; empty: none."""
    next_drafts: bytes = b""
    """int32[n]: how many drafts the last of several stages makes after this step, for the next step of each slot;
    empty: none. Other stages can't wait for a model's drafts when that step begins."""
    masked: bool = False
    """Whether some of the new tokens depend on masks, which come after the plan: see `WorkerProtocol.sample_tokens`."""
    grammar: GrammarOutput | None = None
    """The masks, for a worker that takes them together with the plan. None: the step has none, or it is `masked`."""

    @property
    def only_decodes(self) -> bool:
        """Whether each of the step's slots gets one token, from one input, and no request begins."""
        return bool(self.slots) and not self.num_tokens and not self.new_requests and not self.max_drafts

    @property
    def num_step_tokens(self) -> int:
        """Number of tokens that the step computes, without drafts that workers make."""
        return sum(_ints(self.num_tokens)) if self.num_tokens else len(self.slots) // 4

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies drafts."""
        return self.tokens is not None and max(_ints(self.tokens.num_sampled), default=0) > 1


class Pooled(msgspec.Struct, array_like=True):
    """The result of a request that pools."""

    data: bytes
    """float32, of this shape."""
    shape: list[int]


class TransferResult(msgspec.Struct, array_like=True):
    """What workers' KV connectors report. The executor adds up the reports of all workers of a rank."""

    sent: list[int] = []
    """The seq_ids of requests whose blocks have been sent, and may be freed. Each is reported once."""
    received: list[int] = []
    """The seq_ids of requests whose blocks have arrived, or have failed to."""
    failed_blocks: list[int] = []
    """Blocks whose content didn't arrive, or isn't what it should be. Their tokens are computed."""
    reply: list[bytes] = []
    """What each worker's connector tells that of the scheduler, as it encodes that, if it has something to tell."""


class TokenReport(NamedTuple):
    """What a part tells of some of a sequence's tokens: each gets as many bytes of `data`. Without tokens, what it
    tells of the sequence's end."""

    part: str
    """Its name."""
    position: int
    """That of the first of the tokens, in prompt and output."""
    num_tokens: int
    data: bytes


class StepResult(msgspec.Struct, array_like=True):
    """The result of a step, in the order of the plan's `slots`."""

    step: int
    token_ids: bytes = b""
    """int32[k]: the new tokens, slot after slot."""
    num_tokens: bytes = b""
    """int32[n]: the number of each slot's new tokens; empty means one each. It is 0 for a prompt's earlier chunks, and
    more than 1 if drafts were right."""
    logprobs: list[tuple[int, TokenLogprobs]] = []
    """(index into `slots`, logprobs of a new token), for requests with `logprobs`, in the order of `token_ids`."""
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = []
    """(index into `slots`, first position, logprobs of that position and of the following ones), for requests with
    `prompt_logprobs`. A prompt's first position is 1, because nothing predicts position 0. After a preemption,
    positions come again."""
    reports: list[tuple[int, TokenReport]] = []
    """(index into `slots`, what a part tells of tokens of this slot). After a preemption, tokens come again. With
    `ReportsOfAll`, those of all workers, in the order of their ranks."""
    failed: list[tuple[int, str]] = []
    """(index into `slots`, reason) of requests that fail. Their last new token means nothing."""
    is_anyone_busy: bool = True
    """For ranks that share experts: whether any of them had tokens to compute in this step."""
    pooled: list[tuple[int, Pooled]] = []
    """(index into `slots`, result) of requests that pool. Their new token means nothing."""
    transfer: TransferResult | None = None
    """None: no worker's KV connector has anything to report."""
    num_drafts: bytes = b""
    """int32[n]: the number of each slot's drafts; empty means none."""

    @property
    def has_extras(self) -> bool:
        """Whether there is anything beside new tokens and failures."""
        return bool(self.logprobs or self.prompt_logprobs or self.reports or self.pooled)


class WeightVersion(NamedTuple):
    """Which weights a rank computes with."""

    number: int
    """How often the weights have changed since the engine's start."""
    name: str
    """What those who changed them call them."""


FIRST_WEIGHTS = WeightVersion(0, "default")
"""Those that the engine has started with."""


class FinishedRequest(NamedTuple):
    """The end of a sequence. No output follows it."""

    seq_id: int
    finish_reason: str
    """`stop`, `length`, `repetition`, `abort`, `error` (refused) or `failed` (can't continue)."""
    stop_reason: int | str | None = None
    """The token of `stop_token_ids` that ended the sequence, or `repetition_detected`. For `error` and `failed`, the
    error's text."""


class DraftStats(msgspec.Struct, frozen=True, array_like=True):
    """What has become of a rank's drafts since its start."""

    num_drafts: int = 0
    """How many times a step had drafts for a request."""
    num_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """Number of drafted tokens that were right, by their position in the draft."""


NO_DRAFT_STATS = DraftStats()


class ExternalHits(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's KV connector has brought since the rank's start: tokens of requests, by where they were."""

    num_queries: int = 0
    """Tokens that it was asked for: those that the prefix cache didn't have."""
    host: int = 0
    disk: int = 0
    p2p: int = 0
    """On another rank."""
    external_unspecified: int = 0
    """The connector doesn't say where."""


NO_EXTERNAL_HITS = ExternalHits()


class KVFetches(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of requests that wait for keys and values from elsewhere, by how far they are."""

    waiting_to_start: int = 0
    """The connector doesn't know yet what it can bring."""
    in_progress: int = 0
    completed_waiting: int = 0
    """What they waited for has arrived."""


NO_KV_FETCHES = KVFetches()


class AdapterUse(msgspec.Struct, frozen=True, array_like=True):
    """The names of the LoRA adapters that a rank's unfinished requests use, without duplicates."""

    running: tuple[str, ...] = ()
    """Those of requests that have begun."""
    waiting: tuple[str, ...] = ()
    """Those of requests that haven't."""


NO_ADAPTER_USE = AdapterUse()


class LoadView(msgspec.Struct, frozen=True, array_like=True):
    """A rank's load and counters."""

    num_waiting: int
    num_running: int
    kv_usage: float
    """Fraction of the KV cache's blocks that running requests hold, 0 to 1."""
    num_preemptions: int = 0
    """Preemptions of running requests. This and the prefix cache's counters count from the rank's start."""
    prefix_cache_queries: int = 0
    """Tokens looked up in the prefix cache when their requests were first scheduled."""
    prefix_cache_hits: int = 0
    """Tokens that the lookups found, without those that the KV connector brought."""
    num_deferred: int = 0
    """Requests among `num_waiting` that wait for their grammars or adapters, or for keys and values from elsewhere."""
    drafts: DraftStats = NO_DRAFT_STATS
    adapters: AdapterUse = NO_ADAPTER_USE
    external: ExternalHits = NO_EXTERNAL_HITS
    kv_fetches: KVFetches = NO_KV_FETCHES
    decode_s: float = 0.0
    """How long a step takes that only decodes: a mean in which recent steps count most. 0: there was none."""


NO_LOAD = LoadView(0, 0, 0.0)


class SequenceEvents(msgspec.Struct, array_like=True):
    """Events of sequences, except new tokens.

    Every field is a list of tuples that begin with a seq_id. `append`, `clients` and `entries_of` handle all fields
    alike, so these methods need no change when a field is added.
    """

    started: list[tuple[int, int]] = []
    """(seq_id, num_cached_tokens) of requests that were scheduled for the first time."""
    queued: list[tuple[int, float]] = []
    """(seq_id, seconds from the arrival in the engine to the first step) of the requests in `started`."""
    adapter_revisions: list[tuple[int, int]] = []
    """(seq_id, revision of its adapter) of those requests in `started` that use an adapter; see `AddedAdapter`."""
    finished: list[FinishedRequest] = []
    """Finished sequences. Their last tokens are in the same message."""
    logprobs: list[tuple[int, TokenLogprobs]] = []
    """(seq_id, logprobs of the sequence's next token), in token order."""
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = []
    """(seq_id, first position, one entry per position from there on). Each position is sent once."""
    reports: list[tuple[int, TokenReport]] = []
    """(seq_id, what a part tells of tokens of this sequence). After a preemption, and on another rank, tokens come
    again. There may be some behind the sequence's last token."""
    pooled: list[tuple[int, Pooled]] = []
    """(seq_id, its result) of requests that pool."""
    missing_features: list[tuple[int, list[str]]] = []
    """(seq_id, identifiers) of requests that can't begin, because the engine doesn't have the data of these features.
    The client sends the request again, with them."""
    hints: list[tuple[int, dict[str, Any]]] = []
    """(seq_id, what the rank that goes on is told of its blocks) of sequences that this rank was to hand over."""
    external: list[tuple[int, int]] = []
    """(seq_id, how many of its cached tokens the KV connector brought) of those requests in `started` that have some.
    """
    preempted: list[tuple[int]] = []
    """(seq_id,) for each preemption of a request."""

    def append(self, later: SequenceEvents) -> None:
        """Add the entries of `later`. Ignores fields that only a subclass has."""
        for field in SequenceEvents.__struct_fields__:
            entries = getattr(later, field)
            if entries:
                getattr(self, field).extend(entries)

    def clients(self) -> set[int]:
        """The indices of the clients whose sequences have an entry."""
        fields = SequenceEvents.__struct_fields__
        return {client_of(entry[0]) for field in fields for entry in getattr(self, field)}

    def entries_of(self, client: int) -> dict[str, Any]:
        """For each field: those of its entries that are about sequences of this client."""
        return {
            field: [entry for entry in getattr(self, field) if client_of(entry[0]) == client]
            for field in SequenceEvents.__struct_fields__
        }


class CacheChanges(msgspec.Struct, array_like=True):
    """What has happened to a rank's prefix cache since the last message. Digests have 16 bytes each, without gaps."""

    stored: bytes = b""
    removed: bytes = b""
    is_whole: bool = False
    """Whether `stored` is all that the cache has now, whatever was said before."""
    identity: bytes = b""
    """If `is_whole`: what digests begin with. See `raycore.parts.transfers.connectors.identity`."""


class OutputBatch(SequenceEvents, array_like=True):
    """One message to one client: its sequences' new tokens, in the order of generation, and their events.

    A batch may have no tokens or events: its load then tells the client about other clients' requests.
    """

    seq_ids: bytes = b""
    """int64[k]: element `i` is the sequence to which `token_ids[i]` belongs. A seq_id may occur repeatedly."""
    token_ids: bytes = b""
    """int32[k]: the tokens."""
    steps: list[tuple[int, float, float]] = []
    """(tokens, age, duration) of each step in this batch, in order: the number of tokens that the step generated for
    this client; seconds from the end of the step until the batch was sent; seconds from the step's plan to its
    result."""
    load: LoadView = NO_LOAD
    """The rank's load when the batch was sent."""
    cache: CacheChanges | None = None
    """None: nothing has changed, or clients don't want to know."""
    versions: list[tuple[int, WeightVersion]] = []
    """(index in `token_ids` of the first token, version) of the weights that tokens come from, in order. Tokens before
    the first of these come from `FIRST_WEIGHTS`."""


class Computation(msgspec.Struct, frozen=True):
    """What computes a model in a worker."""

    backend: str
    """`native`, with the instruction set, `triton`, or `torch`."""
    parts_by_torch: list[str] = []
    """The parts of the model that plain torch computes because the backend doesn't know them."""
    weights: str = ""
    """Which quantized weights of a GGUF file stay as they are. Empty for other checkpoints."""
    step_bytes: int = 0
    """How many bytes of weights a decode step reads, on a CPU. 0: it isn't known, or caches may hold them."""
    memory_rate: float = 0.0
    """How many bytes the worker's threads read in a second. 0: `step_bytes` is 0."""


class StartPhase(msgspec.Struct, frozen=True, array_like=True):
    """What a process did when it started."""

    name: str
    begun_s: float
    """As `time.time()` of its node."""
    duration_s: float


class EngineInfo(msgspec.Struct):
    """What the engine of a rank reports about itself once it has started."""

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
    kv_cache_dtype: str = "auto"
    """The option's value."""
    enable_prefix_caching: bool = True
    """The option's value."""
    gpu_memory_utilization: float = 0.0
    """The option's value."""
    max_loras: int = 0
    """The maximum number of LoRA adapters of running requests; 0 without `enable_lora`."""
    kernels: list[tuple[str, bool, str] | None] = []
    """On CPUs, for each worker: what `raycore.kernels.are_compiled` says of its native kernels."""
    computations: list[Computation] = []
    """What computes the model, for each worker."""
    cache_layout: CacheLayout | None = None
    """The groups of layers that share the KV cache's blocks. None: there is one, which keeps all tokens."""
    kv_addresses: list[str] = []
    """How workers of other ranks reach each worker, to read its blocks. Empty: they don't."""
    phases: list[StartPhase] = []
    """What the engine's process did until now, the first phase first. Empty if no traces are sent."""
    worker_phases: list[list[StartPhase]] = []
    """The same of each worker. One in the engine's process has no phase of its own for that process's start."""

    @property
    def backends(self) -> tuple[str, ...]:
        """The different backends of the workers."""
        return tuple(dict.fromkeys(computation.backend for computation in self.computations))

    @property
    def parts_by_torch(self) -> tuple[str, ...]:
        """The parts of the model that plain torch computes on any worker."""
        return tuple(dict.fromkeys(part for computation in self.computations for part in computation.parts_by_torch))

    @property
    def weights(self) -> tuple[str, ...]:
        """What the workers say of their weights, without duplicates."""
        return tuple(dict.fromkeys(each.weights for each in self.computations if each.weights))

    @property
    def step_bytes(self) -> int:
        """How many bytes of weights all workers together read in a decode step; 0: it isn't known."""
        known = [computation.step_bytes for computation in self.computations]
        return sum(known) if all(known) else 0

    @property
    def memory_rate(self) -> float:
        """How many bytes all workers together read in a second."""
        return sum(computation.memory_rate for computation in self.computations)

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens that fit in the rank's KV cache, in requests as long as they may become."""
        if self.cache_layout is None:
            return self.num_blocks * self.block_size
        return self.cache_layout.num_tokens_in(self.num_blocks)
