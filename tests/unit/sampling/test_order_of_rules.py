"""All parameters that change logits together, against vLLM's documented order in plain torch, one after the other."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from native_kernels import needs_kernels
from small_model import make_sampling

from raycore.sampling.logits_processors import AdapterLogitsProcessor
from raycore.sampling.processor_batch import ProcessorBatch
from raycore.sampling.sampler import Sampler
from raycore.sampling_params import SamplingParams

VOCAB, EOS = 50, 7
CHANGE = torch.randn(VOCAB, generator=torch.Generator().manual_seed(11)) * 2


class Adds(AdapterLogitsProcessor):
    """Adds numbers to the logits of requests that ask for it."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return None if params.extra_args is None else lambda output_ids, logits: logits + CHANGE * len(output_ids)


def reference(logits_V, params, prompt, output, bad_words):
    """The logits that a token is picked from."""
    x = logits_V.double()
    if params.allowed_token_ids is not None:
        kept = torch.zeros(VOCAB, dtype=torch.bool)
        kept[params.allowed_token_ids] = True
        x = x.masked_fill(~kept, -torch.inf)
    for word in bad_words:
        if len(word) == 1 or output[1 - len(word) :] == word[:-1]:
            x[word[-1]] = -torch.inf
    if len(output) < params.min_tokens:
        x[[EOS, *(params.stop_token_ids or [])]] = -torch.inf
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += bias
    if params.extra_args is not None:
        x = x + CHANGE.double() * len(output)
    penalty = params.repetition_penalty
    for token_id in {*prompt, *output}:
        x[token_id] *= 1 / penalty if x[token_id] > 0 else penalty
    for token_id in set(output):
        x[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    if params.is_greedy:
        return x
    x = x / params.temperature
    probs = x.softmax(-1)
    x = x.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    if params.top_k:
        x = x.masked_fill(x < x.sort(descending=True).values[params.top_k - 1], -torch.inf)
    if params.top_p == 1:
        return x
    order = x.argsort(descending=True)
    probs = x.softmax(-1)[order]
    return x.scatter(0, order[probs.cumsum(-1) - probs >= params.top_p], -torch.inf)


def chosen_params(chosen: random.Random) -> SamplingParams:
    def maybe(value):
        return value if chosen.random() < 0.5 else None

    given = {
        "temperature": chosen.choice([0.0, 0.4, 1.0, 1.9]),
        "min_p": maybe(chosen.uniform(0, 0.3)),
        "top_k": maybe(chosen.randint(2, 30)),
        "top_p": maybe(chosen.uniform(0.3, 1.0)),
        "allowed_token_ids": maybe([1, *chosen.sample(range(VOCAB), 20)]),  # 1 is never forbidden
        "logit_bias": maybe({token_id: chosen.uniform(-5, 5) for token_id in chosen.sample(range(VOCAB), 10)}),
        "repetition_penalty": maybe(chosen.uniform(0.5, 2)),
        "frequency_penalty": maybe(chosen.uniform(-2, 2)),
        "presence_penalty": maybe(chosen.uniform(-2, 2)),
        "min_tokens": maybe(chosen.randint(1, 6)),
        "stop_token_ids": maybe([3]),
        "extra_args": maybe({"adds": True}),
        "logprobs": -1,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


@pytest.mark.parametrize("implementation", ["torch", pytest.param("native", marks=needs_kernels)])
def test_all_rules_together_are_applied_in_the_documented_order(implementation):
    chosen = random.Random(2)
    for case in range(40):
        processors = ProcessorBatch(lambda: [Adds(None, torch.device("cpu"), False)]) if case % 2 else None
        sampler = Sampler(VOCAB, make_sampling(implementation), logprobs_mode="processed_logits", processors=processors)

        class Batch:
            token_ids = np.zeros((4, 20), np.int32)
            token_ids_SM = torch.as_tensor(token_ids)
            num_prompt = np.zeros(4, np.int64)

        logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(case)) * 3
        expected, lengths = [], []
        for slot in range(4):
            params = chosen_params(chosen)
            prompt = [chosen.randrange(VOCAB) for _ in range(chosen.randint(1, 5))]
            output = [chosen.randrange(10) for _ in range(chosen.randint(0, 8))]
            bad_words = [[5], [*output[-1:], 6], [49, 8]]
            ids = prompt + output
            Batch.token_ids[slot, : len(ids)] = ids
            Batch.num_prompt[slot] = len(prompt)
            sampler.add(slot, params, slot, [EOS], bad_words)
            lengths.append(len(ids))
            if processors is None:
                params.extra_args = None
            expected.append(reference(logits[slot], params, prompt, output, bad_words))
        result = sampler.sample(logits, np.arange(4), np.array(lengths), Batch())
        [(rows, download)] = result.logprobs
        for row, entry, token_id in zip(rows, download.entries(), result.token_ids_R.tolist(), strict=True):
            values = dict(zip(entry.token_ids, entry.logprobs, strict=True))
            assert [values[each] for each in range(VOCAB)] == pytest.approx(expected[row].tolist(), abs=2e-4)
            assert expected[row][token_id] > -torch.inf
