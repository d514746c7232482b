"""With `batch_invariant`, a token's logits have the same bits whatever a step computes beside it, and however."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from native_kernels import needs_kernels
from small_model import CPU, SPEC, make_attention, make_operations, make_sampling, make_weights, new_request, plan

from raycore.attention.batch_invariant import TILE, BatchInvariantAttention
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.scratch import GatherScratch
from raycore.attention.spec import AttentionSpec, MixerConstants
from raycore.decoder.decoder import Decoder
from raycore.kernels import Backend
from raycore.layers.operations import check_tiles
from raycore.layers.rows import TILE_ROWS, Tiles, is_order_invariant, on_one_thread
from raycore.messages import StepPlan, TokenLogprobs
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.runner.runner import ModelRunner
from raycore.runner.sampling_head import SamplingHead
from raycore.runner.sources import Tokens
from raycore.sampling.logprobs import TokenLogprobsDownload
from raycore.sampling.sampler import Sampler
from raycore.sampling_params import SamplingParams
from raycore.step.batch import SlotBatch
from raycore.step.device_batch import DeviceBatch

BLOCK_SIZE = 16
BLOCKS_PER_SLOT = 12
NUM_SLOTS = 6
MAX_MODEL_LEN = BLOCK_SIZE * BLOCKS_PER_SLOT
"""Some lengths need two stretches of keys."""

LLAMA = msgspec.structs.replace(
    SPEC,
    model_type="llama",
    hidden_size=72,
    intermediate_size=100,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,
    layer_windows=[None, 40],
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=None,
    tie_word_embeddings=True,
    max_position_embeddings=MAX_MODEL_LEN,
)
QWEN3 = msgspec.structs.replace(
    LLAMA, model_type="qwen3", hidden_size=40, num_kv_heads=2, head_dim=16, layer_windows=[None, None], qk_norm="heads"
)
CAPPED = msgspec.structs.replace(
    QWEN3, attention_softcap=0.5, sinks=True, logits_softcap=2.0, norm_offset=1.0, gate="gelu_tanh"
)
ALIGNED = msgspec.structs.replace(LLAMA, hidden_size=64, intermediate_size=96, vocab_size=112)
"""Its linear layers fit the tiles of AMX."""
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, top_k=30, logprobs=3)
GREEDY = SamplingParams(temperature=0.0)

KINDS = [
    "torch",
    "torch, tight",
    *(pytest.param(kind, marks=needs_kernels) for kind in ("native", "native, integers")),
]

Logits = dict[int, torch.Tensor]
"""By position of the token that they are for."""


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


class Engine:
    """A runner that remembers the logits of every token, by slot and position."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, kind: str = "torch") -> None:
        """`kind`: `torch`, `torch, tight` (attention has scratch memory for one request at a time), `native`, or
        `native, integers` (which the cache stores).
        """
        backend: Backend = "native" if kind.startswith("native") else "torch"
        kv = KVTensors(
            spec.num_layers,
            NUM_SLOTS * BLOCKS_PER_SLOT,
            spec.num_kv_heads,
            BLOCK_SIZE,
            spec.head_dim,
            torch.int8 if kind == "native, integers" else dtype,
            CPU,
        )
        for rows in kv.rows:
            rows.normal_(std=30.0)  # what earlier requests may have left there
        if not kv.rows:
            for blocks in kv.blocks:
                blocks.random_()
        operations = make_operations(backend, batch_invariant=True)
        decoder = Decoder(spec, make_weights(spec, dtype), TensorParallel(), operations)
        self.depends_on_threads = operations.depends_on_threads
        check_tiles(operations, TensorParallel())
        self.batch = SlotBatch(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE)
        self.sampler = Sampler(spec.vocab_size, make_sampling(backend, batch_invariant=True))
        max_gathered = 1 if kind == "torch, tight" else NUM_SLOTS
        attention = make_attention(
            spec, decoder, kv, MAX_MODEL_LEN, max_gathered, backend, batch_invariant=True, dtype=dtype
        )
        batch = DeviceBatch(self.batch, CPU)
        head = SamplingHead(decoder, batch, self.sampler)
        self.runner = ModelRunner(decoder, attention, batch, Tokens(batch), head)
        self.logits: dict[int, Logits] = {slot: {} for slot in range(NUM_SLOTS)}
        self.logprobs: dict[int, list[TokenLogprobs]] = {slot: [] for slot in range(NUM_SLOTS)}
        self._decoder = decoder

    def add(self, slot: int, tokens: list[int], num_prompt: int, params: SamplingParams, num_cached: int = 0):
        """A request for `step`; its blocks are the slot's own, in a strange order."""
        blocks = [slot * BLOCKS_PER_SLOT + (index * 5 + slot) % BLOCKS_PER_SLOT for index in range(BLOCKS_PER_SLOT)]
        request = new_request(slot, tokens, blocks, num_cached, params)
        request.num_prompt_tokens, request.seed = num_prompt, num_prompt
        return request

    def step(self, counts: dict[int, int], requests=(), freed=()) -> None:
        """Compute so many tokens of each slot."""
        slots = sorted(counts, key=lambda slot: counts[slot] > 1)
        step_plan: StepPlan = plan(slots, [counts[s] for s in slots], new_requests=list(requests))
        step_plan.freed_slots = list(freed)
        captured: list[torch.Tensor] = []
        compute = self._decoder.logits
        self._decoder.logits = lambda hidden: captured.append(compute(hidden)) or captured[-1]  # pyright: ignore
        result = self.runner.execute(step_plan)
        self._decoder.logits = compute
        has_token = np.frombuffer(result.num_tokens, np.int32) if result.num_tokens else np.ones(len(slots))
        sampled = [slot for slot, has in zip(slots, has_token, strict=True) if has]
        for row, slot in enumerate(sampled):
            self.logits[slot][int(self.batch.num_known[slot]) - 1] = captured[0][row].clone()
        for index, entry in result.logprobs:
            self.logprobs[slots[index]].append(entry)

    def tokens_left(self, slot: int) -> int:
        return int(self.batch.num_known[slot] - self.batch.num_computed[slot])

    def tokens(self, slot: int) -> list[int]:
        return self.batch.token_ids[slot, : self.batch.num_known[slot]].tolist()


def alone(
    spec: ModelSpec, dtype: torch.dtype, kind: str, prompt: list[int], num_tokens: int, params: SamplingParams
) -> Engine:
    """The prompt in one step, then decodes, in slot 0."""
    engine = Engine(spec, dtype, kind)
    engine.step({0: len(prompt)}, [engine.add(0, prompt, len(prompt), params)])
    for _ in range(num_tokens - 1):
        engine.step({0: 1})
    return engine


def assert_same(engine: Engine, slot: int, expected: Engine) -> None:
    assert engine.tokens(slot) == expected.tokens(0)
    assert engine.logits[slot].keys() == expected.logits[0].keys()
    for position, logits in expected.logits[0].items():
        assert torch.equal(engine.logits[slot][position], logits), (slot, position)
    assert engine.logprobs[slot] == expected.logprobs[0]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("spec", "seed"),
    [(LLAMA, 0), (QWEN3, 1), (ALIGNED, 2), (CAPPED, 3)],
    ids=["llama", "qwen3", "aligned", "capped"],
)
def test_a_request_in_any_batch_has_the_same_bits_as_alone(
    spec: ModelSpec, seed: int, dtype: torch.dtype, kind: str
) -> None:
    """Random prompts, chunks, company and preemptions."""
    rng = random.Random(seed)
    num_tokens = 4
    prompts = [[rng.randrange(97) for _ in range(rng.choice([1, 7, 16, 33, 61, 127, 150]))] for _ in range(NUM_SLOTS)]
    params = [rng.choice([GREEDY, DRAWN]) for _ in prompts]
    engine = Engine(spec, dtype, kind)
    waiting = set(range(NUM_SLOTS))
    while waiting or any(len(engine.logits[slot]) < num_tokens for slot in range(NUM_SLOTS)):
        requests, counts, freed = [], {}, []
        for slot in range(NUM_SLOTS):
            known, is_preempted = prompts[slot], False
            if slot not in waiting and rng.random() < 0.1:
                known, is_preempted = engine.tokens(slot), True
                freed.append(slot)
            if is_preempted or (slot in waiting and rng.random() < 0.5):
                waiting.discard(slot)
                requests.append(engine.add(slot, known, len(prompts[slot]), params[slot]))
                counts[slot] = rng.choice([len(known), rng.randint(1, len(known))])
            elif slot not in waiting and len(engine.logits[slot]) < num_tokens and rng.random() < 0.8:
                left = engine.tokens_left(slot)
                counts[slot] = rng.choice([left, rng.randint(1, left)])
        if counts:
            engine.step(counts, requests, freed)
    for slot, prompt in enumerate(prompts):
        num_made = len(engine.tokens(slot)) - len(prompt)
        assert_same(engine, slot, alone(spec, dtype, kind, prompt, num_made, params[slot]))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_change_no_bit(dtype: torch.dtype, kind: str) -> None:
    prompts = [[(slot + 7 * index) % 97 for index in range(length)] for slot, length in enumerate((9, 40))]
    engine = Engine(QWEN3, dtype, kind)
    engine.step({0: 9, 1: 17}, [engine.add(slot, prompts[slot], len(prompts[slot]), DRAWN) for slot in range(2)])
    engine.step({0: 1, 1: 23})
    assert_same(engine, 0, alone(QWEN3, dtype, kind, prompts[0], 2, DRAWN))
    assert_same(engine, 1, alone(QWEN3, dtype, kind, prompts[1], 1, DRAWN))


@needs_kernels
def test_a_change_of_the_number_of_threads_changes_no_token() -> None:
    engine = Engine(ALIGNED, torch.bfloat16, "native")
    if engine.depends_on_threads:
        pytest.skip("this processor hasn't got AMX")
    prompt = [(7 * index) % 97 for index in range(100)]
    try:
        torch.set_num_threads(3)
        engine.step({0: 77}, [engine.add(0, prompt, len(prompt), DRAWN)])
        torch.set_num_threads(2)
        engine.step({0: 23})
        torch.set_num_threads(1)
        engine.step({0: 1})
    finally:
        torch.set_num_threads(1)
    assert_same(engine, 0, alone(ALIGNED, torch.bfloat16, "native", prompt, 2, DRAWN))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_cached", [16, 32, 128])
def test_a_cached_prefix_gives_the_same_bits(num_cached: int, dtype: torch.dtype, kind: str) -> None:
    prompt = [(7 * index) % 97 for index in range(129)]
    expected = alone(LLAMA, dtype, kind, prompt, 3, DRAWN)
    engine = Engine(LLAMA, dtype, kind)
    engine.step({2: 128}, [engine.add(2, prompt[:128], 128, GREEDY)])
    request = engine.add(2, prompt, len(prompt), DRAWN, num_cached)
    engine.logits[2].clear()
    engine.step({2: len(prompt) - num_cached}, [request], [2])
    for _ in range(2):
        engine.step({2: 1})
    assert_same(engine, 2, expected)


@pytest.mark.parametrize("kind", ["torch", pytest.param("native", marks=needs_kernels)])
def test_logprobs_do_not_depend_on_other_rows(kind: str) -> None:
    logits = torch.randn(5, 37) * 5
    kernels = make_sampling(kind, batch_invariant=True)
    for num_likely in (3, 37):
        together = TokenLogprobsDownload(kernels.logprobs, logits, torch.arange(5), [num_likely] * 5).entries()
        for row in range(5):
            part = logits[row : row + 1]
            alone = TokenLogprobsDownload(kernels.logprobs, part, torch.tensor([row]), [num_likely])
            assert alone.entries() == [together[row]]


@pytest.mark.parametrize("num_rows", [0, 1, TILE_ROWS, 2 * TILE_ROWS + 3])
def test_tiles_of_rows_give_the_result_of_all_rows_at_once(num_rows: int) -> None:
    x, y = torch.arange(num_rows * 6.0).view(num_rows, 6), torch.ones(num_rows, 2, 3)
    seen: list[int] = []

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x + y.flatten(1)

    assert torch.equal(Tiles().apply(function, x, y), x + y.flatten(1))
    assert set(seen) == {TILE_ROWS}


def test_elementwise_operations_run_on_one_thread() -> None:
    x = torch.randn(TILE_ROWS, 5000)
    seen: list[int] = []
    result = on_one_thread(lambda x: seen.append(x.numel()) or x * 2, x)
    assert torch.equal(result, x * 2)
    assert max(seen) < 1 << 15


def test_a_function_whose_result_depends_on_a_rows_index_is_detected() -> None:
    x = torch.randn(TILE_ROWS, 8)
    assert is_order_invariant(lambda x: x * 2, x)
    assert not is_order_invariant(lambda x: torch.cat([x[:12] * 2, x[12:] * 3]), x)
    assert not is_order_invariant(lambda x: x.cumsum(0), x)


def test_a_decoder_whose_tiles_are_not_invariant_computes_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = make_operations(batch_invariant=True)
    decoder = Decoder(LLAMA, make_weights(LLAMA), TensorParallel(), operations)
    sizes: list[int] = []
    monkeypatch.setattr("raycore.layers.linear.is_order_invariant", lambda *_: False)
    assert not check_tiles(operations, TensorParallel())
    head = decoder._lm_head._linear
    monkeypatch.setattr(decoder._lm_head, "_linear", lambda x: sizes.append(len(x)) or head(x))
    decoder.logits(torch.randn(3, LLAMA.hidden_size))
    assert sizes == [1, 1, 1]


def test_a_tile_is_whole_stretches_of_whole_blocks() -> None:
    for block_size in (1, 16, 24, 1024):
        kv = KVTensors(1, 1, 1, block_size, 8, torch.float32, CPU)
        spec = AttentionSpec.of(SPEC, 1, [MixerConstants()], 96, torch.float32, CPU)
        stretch = BatchInvariantAttention(spec, kv, GatherScratch(kv, 1, 1)).stretch
        assert stretch % block_size == stretch % TILE == 0
