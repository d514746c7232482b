"""A draft model drafts what it would generate itself after the known tokens, whatever has happened before."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch
from drafted_sequences import Sequences
from kernels import needs_kernels
from small_model import (
    BLOCK_SIZE,
    CPU,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    SPEC,
    make_attention,
    make_runner,
    make_weights,
    reference_tokens,
)

from raycore.model.attention.kv_tensors import KVTensors
from raycore.model.compute_threads import ComputeThreads
from raycore.model.decoder import Decoder
from raycore.model.drafting.draft_model import DraftModel
from raycore.model.drafting.drafter import Drafter
from raycore.model.drafting.rows import num_scratch_blocks
from raycore.model.layers import TensorParallel
from raycore.sampling_params import SamplingParams

MAX_DRAFT = 5
MAX_STEP_TOKENS = 10
PROMPT = [5, 80, 33, 2, 61, 17, 90, 44, 44, 8, 71, 23, 12]
DRAFT_SPEC = msgspec.structs.replace(SPEC, num_layers=2, layer_windows=[None, 7])

RUNNERS: dict[str, dict[str, Any]] = {
    "torch": {},
    "batch-invariant": {"batch_invariant": True},
    "native": {"backend": "native"},
    "memory of its own": {"is_shared": False},
}


class Drafting:
    """A runner with a draft model, and how many tokens the draft model has computed."""

    def __init__(self, spec=DRAFT_SPEC, **options: Any) -> None:
        self.spec = spec
        self.num_computed = 0
        self.sequences = Sequences(make_runner(make_drafter=self._make, **options))

    def check(self, num_tokens: dict[int, int]) -> dict[int, list[int]]:
        """Draft, and compare with the reference. Returns the drafts."""
        drafts = self.sequences.draft(num_tokens)
        for slot, num in num_tokens.items():
            assert drafts[slot] == reference_tokens(self.sequences.known[slot], num, self.spec)
        return drafts

    def _make(self, target, batch, sampler, operations) -> Drafter:
        backend = "native" if type(operations).__name__ == "NativeOperations" else "torch"
        decoder = Decoder(self.spec, make_weights(self.spec), TensorParallel(), operations)
        forward = decoder.forward

        def counted(inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.num_computed += len(inputs)
            assert len(inputs) <= MAX_STEP_TOKENS
            return forward(inputs, *rest)

        decoder.forward = counted
        num_blocks = NUM_BLOCKS + 8 * num_scratch_blocks(MAX_DRAFT, BLOCK_SIZE)
        kv = KVTensors(
            self.spec.num_layers, num_blocks, SPEC.num_kv_heads, BLOCK_SIZE, SPEC.head_dim, torch.float32, CPU
        )
        attention = make_attention(self.spec, decoder, kv, MAX_MODEL_LEN, 8, backend)
        sizes = {"max_tokens": MAX_DRAFT, "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
        network = DraftModel(decoder, attention, batch, ComputeThreads(), max_step_tokens=MAX_STEP_TOKENS, **sizes)
        return Drafter(network, batch, sampler, **sizes)


@pytest.fixture(params=[pytest.param(each, marks=needs_kernels if each == "native" else ()) for each in RUNNERS])
def drafting(request: pytest.FixtureRequest) -> Drafting:
    return Drafting(**RUNNERS[request.param])


def test_drafts_are_the_models_own_tokens_whatever_came_before(drafting: Drafting) -> None:
    rng = random.Random(1)
    sequences = drafting.sequences
    for slot in range(4):
        sequences.start(slot, PROMPT[: 4 + 3 * slot])
    for number in range(24):
        slots = rng.sample(sorted(sequences.known), rng.randint(1, len(sequences.known)))
        drafts = drafting.check({slot: rng.randint(1, MAX_DRAFT) for slot in slots})
        # of what was drafted, some is verified: as it is, cut, changed, or nothing at all
        guesses = {slot: drafts.get(slot, [])[: rng.randint(0, MAX_DRAFT)] for slot in sequences.known}
        for guess in guesses.values():
            if guess and rng.random() < 0.5:
                guess[rng.randrange(len(guess))] = rng.randrange(SPEC.vocab_size)
        sequences.step({slot: guess for slot, guess in guesses.items() if rng.random() < 0.7 or slot == slots[0]})
        longest = max(sequences.known, key=lambda slot: len(sequences.known[slot]))
        if len(sequences.known[longest]) > 30 or number % 9 == 8:
            sequences.end(longest)
            sequences.start(longest, rng.choices(range(SPEC.vocab_size), k=rng.randint(2, 20)))


def test_right_drafts_are_not_computed_again() -> None:
    drafting = Drafting(SPEC)  # the target itself, so drafts are right
    sequences = drafting.sequences
    sequences.start(3, PROMPT[:5])
    sequences.step({3: drafting.check({3: 3})[3]})
    assert drafting.num_computed == 6 + 2, "six known tokens, and all of the draft but its last token"
    assert len(sequences.known[3]) == 10
    drafting.check({3: 1})
    assert drafting.num_computed == 8 + 2, "eight tokens had blocks of the sequence"
    drafting.check({3: 1})
    assert drafting.num_computed == 8 + 2 + 1, "a draft needs the logits after the last token"


def test_a_prefix_that_was_computed_is_used(drafting: Drafting) -> None:
    sequences = drafting.sequences
    sequences.start(0, PROMPT)
    sequences.start(1, PROMPT, shared_with=0)
    drafting.check({1: 2})
    assert drafting.num_computed == len(PROMPT) + 2, "nobody had computed the blocks"
    sequences.start(2, PROMPT, shared_with=0)
    drafting.check({2: 1})
    assert drafting.num_computed == len(PROMPT) + 2 + 2, "slot 1 had computed three blocks of four tokens"
    # blocks that another request gets are not taken for computed ones
    for slot in range(3):
        sequences.end(slot)
    sequences.start(2, [each + 1 for each in PROMPT])
    sequences.start(0, [each + 2 for each in PROMPT])
    drafting.check({2: 3, 0: 1})


def test_a_draft_follows_the_requests_sampling_parameters() -> None:
    """With the target's own logits, a draft is what the target will sample."""
    drafting = Drafting(SPEC)
    sequences = drafting.sequences
    kinds = [
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.6, logprobs=2),
        SamplingParams(temperature=1.0, allowed_token_ids=list(range(20))),
        SamplingParams(temperature=2.0, top_k=9),
    ]
    for slot, params in enumerate(kinds):
        sequences.start(slot, PROMPT, params)
    for _ in range(4):
        num_known = {slot: len(known) for slot, known in sequences.known.items()}
        drafts = sequences.draft(dict.fromkeys(range(4), 3))
        sequences.step(drafts)
        for slot, known in sequences.known.items():
            assert known[num_known[slot] : -1] == drafts[slot]
