"""The sampler against plain, slow statements of what each parameter means."""

import math
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from native_kernels import needs_kernels
from sampling_values import CHANGING_DRAWS
from small_model import make_sampling

from raycore.sampling import keyed_random, picking
from raycore.sampling.kernels import SamplingKernels
from raycore.sampling.logprobs import TokenLogprobsDownload
from raycore.sampling.sampler import Sampler
from raycore.sampling_params import SamplingParams

VOCAB = 300
EOS = 7


@dataclass
class Batch:
    token_ids: np.ndarray
    num_prompt: np.ndarray

    def __post_init__(self):
        self.token_ids_SM = torch.as_tensor(self.token_ids)


kernels: SamplingKernels


@pytest.fixture(autouse=True, params=["torch", pytest.param("native", marks=needs_kernels)])
def _implementation(request):
    global kernels
    kernels = make_sampling(request.param)


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors don't gain from threads, and lose where other processes keep the cores busy."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def batch_of(*sequences, num_prompt=1):
    ids = np.zeros((len(sequences), max(map(len, sequences)) + 1), np.int32)
    for slot, sequence in enumerate(sequences):
        ids[slot, : len(sequence)] = sequence
    return Batch(ids, np.full(len(sequences), num_prompt))


def random_logits(num_rows, vocab_size=VOCAB, seed=0, scale=2.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def pick(logits_V, params, sequence=(1,), num_prompt=1, seed=5, **kwargs):
    """The token that one request gets from one row of logits."""
    sampler = Sampler(len(logits_V), kernels)
    sampler.add(0, params, seed, **kwargs)
    batch = batch_of(list(sequence), num_prompt=num_prompt)
    return int(sampler.sample(logits_V[None], np.array([0]), np.array([len(sequence)]), batch).token_ids_R[0])


def draw_many(logits_V, params, num_draws=4000):
    """Tokens that the positions 1, 2, … of one request would get from the same logits."""
    sampler = Sampler(len(logits_V), kernels)
    sampler.add(0, params, seed=11)
    batch = Batch(np.zeros((1, num_draws + 2), np.int32), np.array([1]))
    slots = np.zeros(num_draws, np.int64)
    return sampler.sample(logits_V.expand(num_draws, -1), slots, np.arange(1, num_draws + 1), batch).token_ids_R.numpy()


def greedy(**kwargs):
    return SamplingParams(temperature=0.0, **kwargs)


# ---- the random numbers


def test_uniform_is_a_function_of_seed_and_position_alone():
    state, gamma = (np.array([part] * 5, np.uint64) for part in keyed_random.stream_key(42))
    together = keyed_random.uniform(state, gamma, np.arange(5))
    alone = [keyed_random.uniform(state[:1], gamma[:1], np.array([i]))[0] for i in range(5)]
    assert together.tolist() == alone
    assert len(set(alone)) == 5


def test_uniform_is_uniform_and_seeds_are_independent():
    positions = np.arange(20_000)
    streams = []
    for seed in (0, 1, 2**63 - 1):
        state, gamma = (np.full(len(positions), part, np.uint64) for part in keyed_random.stream_key(seed))
        streams.append(keyed_random.uniform(state, gamma, positions))
    for stream in streams:
        assert stream.min() >= 0.0
        assert stream.max() < 1.0
        counts = np.histogram(stream, 100, (0, 1))[0]
        assert chi_square(counts, np.full(100, len(stream) / 100)) < chi_square_limit(99)
    correlation = np.corrcoef(streams)
    assert np.abs(correlation - np.eye(3)).max() < 0.03


def chi_square(counts, expected):
    return float((((counts - expected) ** 2) / expected).sum())


def chi_square_limit(degrees):
    """Exceeded once in about 10,000 times (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


# ---- greedy


@pytest.mark.parametrize("vocab_size", [50, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_most_likely(vocab_size, dtype):
    logits = random_logits(20, vocab_size).to(dtype)
    logits[3, [9, 40]] = 30.0
    sampler = Sampler(vocab_size, kernels)
    for slot in range(20):
        sampler.add(slot, greedy(), slot)
    slots = np.arange(20)
    tokens = sampler.sample(logits, slots, slots + 1, batch_of(*[[1]] * 20)).token_ids_R
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [int(np.argmax(row)) for row in logits.float().numpy()]
    assert tokens[3] == 9


def test_plain_greedy_means_nothing_but_the_most_likely_token():
    plain, others = Sampler(VOCAB, kernels), Sampler(VOCAB, kernels)
    plain.add(0, greedy(), 0)
    plain.add(100, greedy(top_p=0.5, top_k=3, min_p=0.2, top_n_sigma=1.0), 0)
    assert plain.is_plain_greedy(np.array([0, 100]))
    ignored = {"temperature", "top_p", "top_k", "min_p", "top_n_sigma", "min_tokens", "stop_token_ids"}
    wanting_more = [
        SamplingParams(),
        greedy(logprobs=0),
        *(greedy(**{name: value}) for name, value in CHANGING_DRAWS.items() if name not in ignored),
        greedy(min_tokens=2, stop_token_ids=[5]),
    ]
    for slot, params in enumerate(wanting_more):
        others.add(slot, params, 0)
        assert not others.is_plain_greedy(np.array([slot])), params
    others.add(50, greedy(), 0, bad_words_token_ids=[[4]])
    assert not others.is_plain_greedy(np.array([50]))
    others.add(50, greedy(), 0)
    assert others.is_plain_greedy(np.array([50]))


def test_whether_slots_are_plain_greedy_changes_with_their_requests():
    sampler, slots = Sampler(VOCAB, kernels), np.array([0, 1])
    for slot in (0, 1):
        sampler.add(slot, SamplingParams(temperature=0), 0)
    assert [sampler.is_plain_greedy(slots) for _ in range(2)] == [True, True]
    sampler.add(1, SamplingParams(temperature=1), 0)
    assert not sampler.is_plain_greedy(slots)
    sampler.add(1, SamplingParams(temperature=0), 0)
    assert sampler.is_plain_greedy(slots)
    sampler.remove(0)
    assert not sampler.is_plain_greedy(slots)


# ---- draws


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_drawn_frequencies_follow_the_distribution(temperature):
    logits = random_logits(1, 40)[0]
    tokens = draw_many(logits, SamplingParams(temperature=temperature), 20_000)
    expected = 20_000 * torch.softmax(logits / temperature, -1).numpy()
    counts = np.bincount(tokens, minlength=40)
    common = expected >= 5
    assert chi_square(counts[common], expected[common]) < chi_square_limit(common.sum() - 1)


def test_a_large_vocabulary_is_drawn_from_everywhere():
    logits = torch.zeros(8200)
    counts = np.histogram(draw_many(logits, SamplingParams(), 800), 8, (0, 8200))[0]
    assert chi_square(counts, np.full(8, 100)) < chi_square_limit(7)


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[130, 299]] = 0.0
    tokens = draw_many(logits, SamplingParams())
    assert set(tokens.tolist()) == {130, 299}


def kept_by_definition(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Which tokens min-p, then top-k, then top-p keep, one sort at a time."""
    p = torch.softmax(logits.double() / temperature, -1).numpy()
    p[p < min_p * p.max()] = 0.0
    order = np.argsort(-p)
    p[order[top_k or len(p) :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0.0
    return set(np.flatnonzero(p).tolist())


@pytest.mark.parametrize("vocab_size", [40, 4096])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_p": 0.8},
        {"top_k": 6, "top_p": 0.7},
        {"min_p": 0.2},
        {"min_p": 0.3, "top_k": 4},
        {"min_p": 0.2, "top_p": 0.6},
        {"temperature": 0.5, "top_p": 0.9},
        {"top_k": 10_000},
    ],
)
def test_top_k_top_p_and_min_p_keep_exactly_the_tokens_of_their_definition(vocab_size, filters):
    logits = random_logits(1, vocab_size, scale=4.0)[0]
    kept = kept_by_definition(logits, **filters)
    drawn = set(draw_many(logits, SamplingParams(**filters), 4000 if vocab_size < 1000 else 300).tolist())
    assert drawn <= kept
    if vocab_size < 1000:
        assert len(drawn) >= min(len(kept), 4)


def test_top_p_finds_a_wide_nucleus():
    """Far more tokens than the sampler looks at first."""
    shares = [0.05, 0.1, 0.5, 0.9, 0.99]
    logits = torch.linspace(1.0, 0.0, 4096)[torch.randperm(4096, generator=torch.Generator().manual_seed(1))]
    weights = picking.token_weights(logits.expand(5, -1), torch.ones(5))
    thresholds = picking.top_p_thresholds(weights, torch.tensor(shares, dtype=torch.float64))
    num_kept = (weights >= thresholds[:, None]).sum(-1).tolist()
    assert num_kept == [len(kept_by_definition(logits, top_p=top_p)) for top_p in shares]
    assert num_kept[0] > 64


def test_equally_likely_tokens_are_all_kept():
    logits = torch.zeros(10)
    logits[0] = 1.0
    assert set(draw_many(logits, SamplingParams(top_k=2)).tolist()) == set(range(10))


def mixed_requests():
    return [
        SamplingParams(),
        greedy(),
        *(SamplingParams(**{name: value}) for name, value in CHANGING_DRAWS.items()),
        SamplingParams(top_k=3),
        SamplingParams(top_k=200, top_p=0.9),
        SamplingParams(top_p=0.4),
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(logit_bias={5: 3.0}, logprobs=2),
        greedy(min_tokens=10, stop_token_ids=[3]),
    ] * 2


@pytest.mark.parametrize("vocab_size", [VOCAB, 4096])
def test_a_row_draws_the_same_token_alone_and_in_any_batch(vocab_size):
    requests = mixed_requests()
    num = len(requests)
    logits = random_logits(num, vocab_size, scale=1.0).bfloat16()
    rng = np.random.default_rng(0)
    batch = Batch(rng.integers(0, vocab_size, (200, 60), dtype=np.int32), np.full(200, 4))
    positions = rng.integers(5, 50, num)

    def sample(rows, slots):
        sampler = Sampler(vocab_size, kernels)
        for row, slot in zip(rows, slots, strict=True):
            sampler.add(int(slot), requests[row], seed=1000 + int(row))
            moved.token_ids[slot] = batch.token_ids[row]
        return sampler.sample(logits[torch.as_tensor(rows)], slots, positions[rows], moved).token_ids_R.numpy()

    moved = Batch(batch.token_ids.copy(), batch.num_prompt)
    alone = np.array([sample(np.array([row]), np.array([0]))[0] for row in range(num)])
    for _ in range(10):
        rows = rng.permutation(num)[: rng.integers(2, num)]
        slots = rng.permutation(200)[: len(rows)]
        assert sample(rows, slots).tolist() == alone[rows].tolist()


# ---- rules and penalties


def test_allowed_token_ids_allow_nothing_else():
    logits = random_logits(1)[0]
    allowed = [4, 90, 12]
    best = max(allowed, key=lambda i: logits[i])
    assert pick(logits, greedy(allowed_token_ids=allowed)) == best
    assert set(draw_many(torch.zeros(VOCAB), SamplingParams(allowed_token_ids=allowed)).tolist()) == set(allowed)


def test_logit_bias_is_added_and_clamped():
    logits = torch.zeros(VOCAB)
    logits[3] = 5.0
    assert pick(logits, greedy(logit_bias={8: 4.9})) == 3
    assert pick(logits, greedy(logit_bias={8: 5.1})) == 8
    logits[3] = 101.0
    assert pick(logits, greedy(logit_bias={8: 1e6})) == 3
    assert pick(logits, greedy(logit_bias={VOCAB + 5: 1e6})) == 3


@pytest.mark.parametrize("num_sigmas", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("params", [{}, {"temperature": 3.0}, {"allowed_token_ids": list(range(100))}])
def test_top_n_sigma_keeps_the_tokens_within_so_many_deviations_of_the_largest_logit(num_sigmas, params):
    logits = random_logits(1, scale=0.5)[0]
    allowed = params.get("allowed_token_ids", range(VOCAB))
    values = logits.double().numpy()[allowed]
    kept = set(np.flatnonzero(values >= values.max() - num_sigmas * values.std()).tolist())
    drawn = draw_many(logits, SamplingParams(top_n_sigma=num_sigmas, **params))
    assert set(drawn.tolist()) == kept


def test_top_n_sigma_comes_after_penalties():
    logits = torch.zeros(VOCAB)
    logits[3], logits[4] = 40.0, 20.0
    within = SamplingParams(top_n_sigma=1.0)
    assert set(draw_many(logits, within, 100).tolist()) == {3}
    penalised = msgspec.structs.replace(within, repetition_penalty=2.0)
    sampler = Sampler(VOCAB, kernels)
    sampler.add(0, penalised, seed=11)
    batch = batch_of([3] * 101)
    tokens = sampler.sample(logits.expand(100, -1), np.zeros(100, np.int64), np.arange(1, 101), batch).token_ids_R
    assert set(tokens.tolist()) == {3, 4}


def test_min_tokens_delays_the_end_of_sequence():
    logits = torch.zeros(VOCAB)
    logits[[EOS, 20, 30]] = torch.tensor([3.0, 2.0, 1.0])
    params = greedy(min_tokens=2, stop_token_ids=[20])
    picked = [pick(logits, params, [1, 2, 3, *[30] * n], num_prompt=3, eos_token_ids=[EOS]) for n in range(4)]
    assert picked == [30, 30, EOS, EOS]


def test_bad_words_are_not_completed():
    logits = torch.zeros(VOCAB)
    logits[[50, 60]] = torch.tensor([2.0, 1.0])
    bad = {"bad_words_token_ids": [[40, 41, 50], [61]]}
    assert pick(logits, greedy(), [1, 40, 41], **bad) == 60
    assert pick(logits, greedy(), [1, 41, 40], **bad) == 50
    assert pick(logits, greedy(), [1, 41], **bad) == 50
    # the prompt's tokens don't begin a word
    assert pick(logits, greedy(), [1, 40, 41], num_prompt=2, **bad) == 50
    assert pick(logits, greedy(), bad_words_token_ids=[[50]]) == 60


def test_min_tokens_yields_where_it_would_forbid_all_allowed_tokens():
    assert pick(torch.zeros(VOCAB), greedy(allowed_token_ids=[EOS], min_tokens=5), eos_token_ids=[EOS]) == EOS


def test_repetition_penalty_counts_the_prompt():
    logits = torch.zeros(VOCAB)
    logits[[10, 11]] = torch.tensor([3.0, 2.0])
    assert pick(logits, greedy(repetition_penalty=1.4), [10], num_prompt=1) == 10
    assert pick(logits, greedy(repetition_penalty=1.6), [10], num_prompt=1) == 11
    # a negative logit is pushed down, not up
    logits = torch.full((VOCAB,), -5.0)
    logits[[10, 11]] = torch.tensor([-1.0, -1.5])
    assert pick(logits, greedy(repetition_penalty=1.6), [10, 10]) == 11


def test_presence_and_frequency_penalties_count_the_output_alone():
    logits = torch.zeros(VOCAB)
    logits[[10, 11]] = torch.tensor([2.0, 1.25])
    assert pick(logits, greedy(presence_penalty=1.0), [10, 10], num_prompt=2) == 10
    assert pick(logits, greedy(presence_penalty=1.0), [1, 10], num_prompt=1) == 11
    assert pick(logits, greedy(presence_penalty=0.5), [1, 10, 10, 10], num_prompt=1) == 10
    assert pick(logits, greedy(frequency_penalty=0.5), [1, 10], num_prompt=1) == 10
    assert pick(logits, greedy(frequency_penalty=0.5), [1, 10, 10], num_prompt=1) == 11
    assert pick(logits, greedy(frequency_penalty=-0.5), [1, 11, 11], num_prompt=1) == 11


def test_penalties_equal_their_formula():
    rng = np.random.default_rng(3)
    num = 6
    logits = random_logits(num)
    batch = Batch(rng.integers(0, 20, (num, 40), dtype=np.int32), rng.integers(1, 9, num))
    positions = rng.integers(10, 40, num)
    sampler = Sampler(VOCAB, kernels)
    expected = logits.clone()
    for slot in range(num):
        params = greedy(repetition_penalty=1.0 + slot / 5, frequency_penalty=0.3 * slot, presence_penalty=-0.2 * slot)
        sampler.add(slot, params, slot)
        for token in set(batch.token_ids[slot, : positions[slot]].tolist()):
            value = expected[slot, token]
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            count = int((batch.token_ids[slot, batch.num_prompt[slot] : positions[slot]] == token).sum())
            expected[slot, token] = value - params.frequency_penalty * count - params.presence_penalty * (count > 0)
    for _ in range(2):  # the second time finds nothing left over from the first
        adjusted = sampler._rules.apply(logits, np.arange(num), positions, batch)
        assert torch.allclose(adjusted, expected, rtol=1e-6)


def test_sampling_does_not_change_the_logits():
    logits = random_logits(2)
    before = logits.clone()
    pick(logits[0], SamplingParams(logit_bias={1: 2.0}, repetition_penalty=2.0, top_k=3, min_p=0.1))
    assert torch.equal(logits, before)


# ---- log probabilities


def test_logprobs_are_of_the_raw_distribution():
    logits = random_logits(4)
    sampler = Sampler(VOCAB, kernels)
    wanted = [
        greedy(logprobs=0, logit_bias={77: 100.0}),
        greedy(),
        SamplingParams(logprobs=3, temperature=0.1),
        greedy(logprobs=-1),
    ]
    for slot, params in enumerate(wanted):
        sampler.add(slot, params, slot)
    result = sampler.sample(logits, np.arange(4), np.full(4, 2), batch_of(*[[1, 2]] * 4))
    [(rows, download)] = result.logprobs
    entries = dict(zip(rows, download.entries(), strict=True))
    assert list(entries) == [0, 2, 3]
    raw = torch.log_softmax(logits, -1)

    biased = entries[0]
    assert biased.token_ids == [77]
    assert biased.logprobs[0] == pytest.approx(float(raw[0, 77]))
    assert biased.rank == 1 + int((raw[0] > raw[0, 77]).sum()) > 1

    top = entries[2]
    assert top.token_ids[0] == result.token_ids_R[2]
    assert top.token_ids[1:] == raw[2].topk(3).indices.tolist()
    assert top.logprobs[1:] == pytest.approx(raw[2].topk(3).values.tolist())
    assert len(entries[3].token_ids) == VOCAB + 1
    assert entries[3].rank == 1


def test_prompt_logprobs_cover_every_position():
    logits = random_logits(5)
    next_ids = torch.tensor([3, 1, 4, 1, 5])
    entries = TokenLogprobsDownload(kernels.logprobs, logits, next_ids, [2] * 5).entries()
    raw = torch.log_softmax(logits, -1)
    assert [entry.token_ids[0] for entry in entries] == next_ids.tolist()
    assert [entry.logprobs[0] for entry in entries] == pytest.approx([float(raw[t, i]) for t, i in enumerate(next_ids)])
    assert all(len(entry.token_ids) == 3 for entry in entries)
    assert TokenLogprobsDownload(kernels.logprobs, logits[:0], next_ids[:0], []).entries() == []
