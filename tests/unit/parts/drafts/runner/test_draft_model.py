"""A draft model drafts what it would generate itself after the known tokens, whatever has happened before."""

from __future__ import annotations

import pytest
from drafting_runners import PROMPT, RUNNERS, DraftModelRunner, check_whatever_comes
from native_kernels import needs_kernels
from small_model import SPEC

from raycore.sampling_params import SamplingParams


@pytest.fixture(params=[pytest.param(each, marks=needs_kernels if each == "native" else ()) for each in RUNNERS])
def drafting(request: pytest.FixtureRequest) -> DraftModelRunner:
    return DraftModelRunner(**RUNNERS[request.param])


def test_drafts_are_the_draft_models_own_tokens_whatever_came_before(drafting: DraftModelRunner) -> None:
    check_whatever_comes(drafting, 24)


def test_the_draft_model_does_not_compute_right_drafts_again() -> None:
    drafting = DraftModelRunner(SPEC)  # the target itself, so drafts are right
    sequences = drafting.sequences
    sequences.start(3, PROMPT[:5])
    sequences.step({3: drafting.check({3: 3})[3]})
    assert drafting.num_computed == 6 + 2, "six known tokens, and all of the draft but its last token"
    assert len(sequences.known[3]) == 10
    drafting.check({3: 1})
    assert drafting.num_computed == 8 + 2, "eight tokens had blocks of the sequence"
    drafting.check({3: 1})
    assert drafting.num_computed == 8 + 2 + 1, "a draft needs the logits after the last token"


def test_the_draft_model_reuses_a_computed_prefix(drafting: DraftModelRunner) -> None:
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
    drafting = DraftModelRunner(SPEC)
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
