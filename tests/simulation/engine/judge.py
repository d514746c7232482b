"""Whether a client has got what follows from its request, each token once and in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from raycore.messages import TokenLogprobs
from simulation.engine.client import Record
from simulation.engine.options import MAX_MODEL_LEN
from simulation.engine.weights import WeightHistory
from simulation.worker import expected
from simulation.worker.model import Shape


def problems(record: Record, shape: Shape, weights: WeightHistory) -> Iterator[str]:
    """What is wrong with what a request has got."""
    for problem in _problems(record, shape, weights):
        yield f"{record.request.seq_id} ({record.request.request_id}): {problem}"


def _problems(record: Record, shape: Shape, weights: WeightHistory) -> Iterator[str]:
    request = record.request
    wanted_reason = _refusal(record)
    if wanted_reason is not None:
        if not record.is_aborted and (record.finish_reason != wanted_reason or record.tokens):
            yield f"ended by {record.finish_reason} with {record.tokens}, not by {wanted_reason}"
        return
    if record.finish_reason is None and not record.is_aborted:
        yield f"hasn't ended: has {len(record.tokens)} tokens"
    if record.num_started > 1:
        yield f"started {record.num_started} times"
    if request.pooling is not None:
        yield from _pooling_problems(record, shape, weights)
        return
    yield from _token_problems(record, shape, weights)
    for count in range(1, len(record.tokens) + 1):
        reason = expected.finish_reason(request, record.tokens[:count], MAX_MODEL_LEN)
        own = record.finish_reason if count == len(record.tokens) else None
        if reason != own and not (record.is_aborted and own is None):
            yield f"ended by {own} after {count} tokens, not by {reason}"
            break
    yield from _logprob_problems(record, shape, weights)


def _refusal(record: Record) -> str | None:
    """The finish reason of a request that can't run. None: it can."""
    for reason in ("error", "failed"):
        if record.request.request_id.endswith(reason):
            return reason
    return None


def _token_problems(record: Record, shape: Shape, weights: WeightHistory) -> Iterator[str]:
    tokens, start = [*record.request.prompt_token_ids, *record.tokens], 0
    for number, same in groupby(record.versions):
        end = start + len(list(same))
        rights = [expected.next_tokens(shape, record.request, tokens, each, start, end) for each in weights.of(number)]
        for index in range(start, end):
            right = [each[index - start] for each in rights]
            if record.tokens[index] not in right:
                yield f"token {index} is {record.tokens[index]}, not {right}, with weights {number}: {record.tokens}"
                return
        start = end


def _logprob_problems(record: Record, shape: Shape, weights: WeightHistory) -> Iterator[str]:
    request, params = record.request, record.request.params
    if params.logprobs is not None:
        if len(record.logprobs) != len(record.tokens):
            yield f"{len(record.logprobs)} logprobs of {len(record.tokens)} tokens"
            return
        for index, own in enumerate(record.logprobs):
            rights = [
                expected.logprobs(shape, request, record.tokens, index, each)
                for each in weights.of(record.versions[index])
            ]
            if own not in rights:
                yield f"the logprobs of token {index} are {own}, not {rights}"
                return
    if params.prompt_logprobs is None:
        if record.prompt_logprobs:
            yield "prompt logprobs that nobody asked for"
        return
    if record.tokens and len(record.prompt_logprobs) != len(request.prompt_token_ids) - 1:
        yield f"{len(record.prompt_logprobs)} prompt logprobs of {len(request.prompt_token_ids)} tokens"
    all_rights: list[list[TokenLogprobs]] = [
        expected.prompt_logprobs(shape, request, each) for each in (weights.all() if record.prompt_logprobs else ())
    ]
    for index, own in enumerate(record.prompt_logprobs):
        if own not in [rights[index] for rights in all_rights]:
            yield f"the prompt logprobs of position {index + 1} are {own}, not {[each[index] for each in all_rights]}"
            return


def _pooling_problems(record: Record, shape: Shape, weights: WeightHistory) -> Iterator[str]:
    if record.is_aborted and not record.pooled:
        return
    rights = [expected.pooled(shape, record.request, each) for each in weights.all()]
    if len(record.pooled) != 1 or record.pooled[0] not in rights:
        yield f"the results are {record.pooled}, not one of {rights}"
