"""What log probabilities are of, in each mode, and those of tokens that a request chose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_kernels import needs_kernels
from small_model import make_sampling

from raycore.errors import InvalidRequest
from raycore.sampling.sampler import Sampler
from raycore.sampling_params import SamplingParams

VOCAB = 120
MODES = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


class Batch:
    """Sequences with a prompt of one token each."""

    def __init__(self, *sequences):
        self.token_ids = np.zeros((len(sequences), 8), np.int32)
        for slot, sequence in enumerate(sequences):
            self.token_ids[slot, : len(sequence)] = sequence
        self.num_prompt = np.ones(len(sequences), np.int64)
        self.token_ids_SM = torch.as_tensor(self.token_ids)


def sampled(mode, wanted, logits, implementation):
    """What a sampler returns for requests with these parameters, and by row, the entries of their tokens."""
    sampler = Sampler(VOCAB, make_sampling(implementation), logprobs_mode=mode)
    for slot, params in enumerate(wanted):
        sampler.add(slot, params, slot)
    batch = Batch(*[[1, 2]] * len(wanted))
    result = sampler.sample(logits, np.arange(len(wanted)), np.full(len(wanted), 2), batch)
    found = {row: each for rows, got in result.logprobs for row, each in zip(rows, got.entries(), strict=True)}
    return result.token_ids_R.tolist(), found


def processed(logits_V, params):
    """The logits that decide about a request's token, as vLLM's documentation defines them, one filter at a time."""
    logits_V = logits_V.double()
    for token_id, bias in (params.logit_bias or {}).items():
        logits_V[token_id] += bias
    if params.is_greedy:
        return logits_V
    logits_V = logits_V / params.temperature
    if params.min_p:
        probs = logits_V.softmax(-1)
        logits_V = logits_V.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    if params.top_k:
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        order = logits_V.argsort(descending=True)
        before = logits_V.softmax(-1)[order].cumsum(-1) - logits_V.softmax(-1)[order]
        logits_V = logits_V.scatter(0, order[before >= params.top_p], -torch.inf)
    return logits_V


WANTED = [
    SamplingParams(temperature=0.0, logprobs=4, logit_bias={7: 50.0}),
    SamplingParams(temperature=0.5, logprobs=4, top_k=20),
    SamplingParams(temperature=2.0, logprobs=-1, top_p=0.7, min_p=0.01),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, logprob_token_ids=[5, 110, 5], top_k=3),
    SamplingParams(temperature=1.5, logprobs=2, top_k=30, top_p=0.6),
    SamplingParams(temperature=0.0, logprob_token_ids=[9]),
]


@pytest.mark.parametrize("implementation", ["torch", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_returns_what_it_says(mode, implementation):
    logits = torch.randn(len(WANTED), VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    token_ids, found = sampled(mode, WANTED, logits, implementation)
    assert sorted(found) == [0, 1, 2, 4, 5, 6]
    for row, entry in found.items():
        params = WANTED[row]
        values = processed(logits[row], params) if mode.startswith("processed") else logits[row].double()
        if mode.endswith("logprobs"):
            values = values.log_softmax(-1)
        assert entry.token_ids[0] == token_ids[row]
        if params.logprob_token_ids is not None:
            assert entry.token_ids[1:] == params.logprob_token_ids
        else:
            count = VOCAB if params.logprobs == -1 else params.logprobs
            assert entry.logprobs[1:] == pytest.approx(values.topk(count).values.tolist(), abs=1e-4)
        assert entry.logprobs == pytest.approx(values[entry.token_ids].tolist(), abs=1e-4)
        assert entry.rank == 1 + int((values > values[token_ids[row]]).sum())


@pytest.mark.parametrize("implementation", ["torch", pytest.param("native", marks=needs_kernels)])
def test_modes_and_chosen_tokens_do_not_change_what_is_sampled(implementation):
    logits = torch.randn(len(WANTED), VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    before = logits.clone()
    results = [sampled(mode, WANTED, logits, implementation)[0] for mode in MODES]
    assert results == [results[0]] * len(MODES)
    assert torch.equal(logits, before)


def test_prompts_have_raw_values_in_each_mode():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    for mode in MODES:
        sampler = Sampler(VOCAB, make_sampling("torch"), logprobs_mode=mode)
        entries = sampler.prompt_logprobs(logits, torch.tensor([4, 5, 6]), 2).entries()
        values = logits if mode.endswith("logits") else logits.log_softmax(-1)
        assert [entry.logprobs[0] for entry in entries] == pytest.approx(
            [float(values[row, row + 4]) for row in range(3)], abs=1e-5
        )
        assert [entry.token_ids[1:] for entry in entries] == logits.topk(2).indices.tolist()


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_true_means_one_token_and_false_none(name):
    assert getattr(SamplingParams(**{name: True}), name) == 1
    assert getattr(SamplingParams(**{name: False}), name) is None


def test_chosen_tokens_are_limited_and_agree_with_logprobs():
    assert SamplingParams(logprob_token_ids=[]).num_logprobs is None
    assert SamplingParams(logprob_token_ids=[3, 4], logprobs=2).num_logprobs == 2
    with pytest.raises(InvalidRequest, match="logprobs=1 with 2 logprob_token_ids"):
        SamplingParams(logprob_token_ids=[3, 4], logprobs=1)
    with pytest.raises(InvalidRequest, match="logprob_token_ids has 129 entries; at most 128"):
        SamplingParams(logprob_token_ids=list(range(129)))
    with pytest.raises(InvalidRequest, match="logprob_token_ids=-1"):
        SamplingParams(logprob_token_ids=[-1])
