"""What a request gets, computed from the request alone: for those who judge what an engine has made of it.

It knows nothing of blocks, slots, steps or workers. Each token is computed from all tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby

import numpy as np

from raycore.errors import InvalidRequest
from raycore.messages import EngineRequest, Pooled, TokenLogprobs
from raycore.sampling_params import SamplingParams
from simulation.worker import model, sampling
from simulation.worker.model import Shape
from simulation.worker.numbers64 import Words, as_words, mix

WeightsAt = Callable[[int], Words]
"""The weights with which the token of an output with this index is computed: see `model.weights_of`."""


def hidden_states(shape: Shape, request: EngineRequest, tokens: Sequence[int], weights: Words) -> Words:
    """[len(tokens)]: the hidden state after each of the request's tokens, prompt and output."""
    content = as_words(np.array(tokens))
    for feature, data in zip(request.features, request.feature_data, strict=True):
        assert data is not None, "a judge has the data of all features"
        place = slice(feature.position, feature.position + feature.num_tokens)
        content[place] = model.feature_content(model.embedding(data.data, weights), 0, feature.num_tokens)
    return model.whole_sequence(shape, content, _own_key(request), weights)


def _own_key(request: EngineRequest) -> Words:
    adapter = np.uint64(0) if request.lora is None else model.adapter_key(request.lora.lora_path)
    salt = model.salt_key((request.params.extra_args or {}).get("salt"))
    return mix(np.array([adapter], np.uint64), salt)


def next_tokens(
    shape: Shape, request: EngineRequest, tokens: Sequence[int], weights: Words, first: int, end: int
) -> list[int]:
    """The tokens of the output with the indexes from `first` to `end`, each as it follows from those before it.

    `tokens`: prompt and output, with at least `end` - 1 tokens of the output.
    """
    if first == end:
        return []
    num_prompt, params = len(request.prompt_token_ids), request.params
    positions = np.arange(num_prompt + first, num_prompt + end)
    hidden = hidden_states(shape, request, tokens[: num_prompt + end - 1], weights)[positions - 1]
    count = len(positions)
    seeds, is_greedy = as_words(np.full(count, request.seed)), np.full(count, params.is_greedy)
    picked = sampling.pick(hidden, seeds, positions, is_greedy, shape.vocab_size)
    rules = sampling.Rules(params, request.eos_token_ids, request.bad_words_token_ids, shape.vocab_size)
    if rules.has_any:
        for row, position in enumerate(positions.tolist()):
            with suppress(InvalidRequest):  # after a wrong token, no token may follow
                picked[row, ~rules.allowed(tokens[num_prompt:position])] = 0
    return picked.argmax(axis=1).tolist()


def first_wrong(shape: Shape, request: EngineRequest, output: Sequence[int], weights: Sequence[Words]) -> int | None:
    """The index of the first token of an output that isn't what it should be. None: all are.

    `weights`: for each token of the output.
    """
    tokens = [*request.prompt_token_ids, *output]
    start = 0
    for _, same in groupby(weights, key=lambda each: each.tobytes()):
        end = start + len(list(same))
        right = next_tokens(shape, request, tokens, weights[start], start, end)
        for index, (token, own) in enumerate(zip(right, output[start:end], strict=True)):
            if token != own:
                return start + index
        start = end
    return None


def finish_reason(request: EngineRequest, output: Sequence[int], max_model_len: int) -> str | None:
    """Why an output ends with its last token. None: it goes on."""
    params, token = request.params, output[-1]
    can_stop = len(output) >= params.min_tokens or params.structured_outputs is not None
    if can_stop and not params.ignore_eos and token in request.eos_token_ids:
        return "stop"
    if len(output) >= params.min_tokens and token in (params.stop_token_ids or ()):
        return "stop"
    if len(output) == params.max_tokens or len(request.prompt_token_ids) + len(output) == max_model_len:
        return "length"
    return "repetition" if len(output) >= params.min_tokens and _repeats_itself(params, output) else None


def _repeats_itself(params: SamplingParams, output: Sequence[int]) -> bool:
    """Whether an output ends with the same tokens as often as is asked."""
    asked = params.repetition_detection
    if asked is None:
        return False
    for size in range(max(1, asked.min_pattern_size), asked.max_pattern_size + 1):
        end = list(output[-size * asked.min_count :])
        if end == asked.min_count * list(output[-size:]):
            return True
    return False


def expected(shape: Shape, request: EngineRequest, max_model_len: int, weights_at: WeightsAt) -> tuple[list[int], str]:
    """The whole output of a request, and its finish reason."""
    output: list[int] = []
    while True:
        tokens, index = [*request.prompt_token_ids, *output], len(output)
        output += next_tokens(shape, request, tokens, weights_at(index), index, index + 1)
        reason = finish_reason(request, output, max_model_len)
        if reason is not None:
            return output, reason


def prompt_logprobs(shape: Shape, request: EngineRequest, weights: Words) -> list[TokenLogprobs]:
    """What is said of each token of the prompt but the first one."""
    prompt, asked = request.prompt_token_ids, request.params.prompt_logprobs
    assert asked is not None, "the request asks for them"
    hidden = hidden_states(shape, request, prompt, weights)[:-1]
    return sampling.logprobs(hidden, np.array(prompt[1:], np.int64), asked, shape.vocab_size)


def logprobs(shape: Shape, request: EngineRequest, output: Sequence[int], index: int, weights: Words) -> TokenLogprobs:
    """What is said of the token of an output with this index."""
    num_prompt, asked = len(request.prompt_token_ids), request.params.logprobs
    assert asked is not None, "the request asks for them"
    tokens = [*request.prompt_token_ids, *output[:index]]
    hidden = hidden_states(shape, request, tokens, weights)[num_prompt + index - 1 :]
    return sampling.logprobs(hidden, np.array([output[index]]), asked, shape.vocab_size)[0]


def pooled(shape: Shape, request: EngineRequest, weights: Words) -> Pooled:
    """The result of a request that pools."""
    return sampling.pooled(hidden_states(shape, request, request.prompt_token_ids, weights)[-1:])
