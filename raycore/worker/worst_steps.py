"""The steps that need the most memory, to be run on a device before it is decided how large the KV cache becomes."""

from __future__ import annotations

import numpy as np

from raycore.config import EngineConfig, SchedulerConfig
from raycore.messages import NO_STATE, NewRequest, StatePlan, StepPlan, StepTokens
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams, PoolingTask
from raycore.runner.runner import ModelRunner
from raycore.sampling_params import SamplingParams

EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.99,
    top_k=1000,
    min_p=1e-9,
    top_n_sigma=1000.0,
    logprobs=20,
    prompt_logprobs=20,
    return_hidden_states=True,
    return_prompt_hidden_states=True,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
)
"""Has all on that allocates tensors of the size of the logits or of a row, or of the sequences' lengths."""


def run_worst_steps(runner: ModelRunner, config: EngineConfig, num_groups: int) -> None:
    """Run the steps that need the most memory within the limits of a configuration. Drafts follow if there are any.

    `num_groups`: number of groups of the KV cache.
    """
    prompts, *others = worst_steps(config.scheduler, config.tokens_per_block, config.max_drafts, num_groups)
    if config.model.spec.pooling is not None:
        _pool_all(prompts, config.model.spec.pooling)
        others = [StepPlan(2, freed_slots=[new.slot for new in prompts.new_requests])]
    runner.execute(prompts)
    if config.drafter is not None:
        # logits and sampling take as much as in the target's largest steps, which follow
        slots: list[int] = np.frombuffer(prompts.slots, np.int32).tolist()
        runner.take_draft_token_ids(slots, [1] * len(slots))
    for plan in others:
        runner.execute(plan)


def _pool_all(plan: StepPlan, pooling: PoolingSpec) -> None:
    """Have the requests of a plan take the result of each token, if the model has such results."""
    tasks: list[PoolingTask] = [*(task for task in pooling.tasks if pooling.is_per_token(task)), *pooling.tasks]
    for new in plan.new_requests:
        new.pooling = PoolingParams(task=tasks[0])
        new.params = SamplingParams()


def worst_steps(limits: SchedulerConfig, block_size: int, max_drafts: int = 0, num_groups: int = 1) -> list[StepPlan]:
    """Return the plan of a step with as many tokens as the limits allow, and that of one with as many long requests.

    Every request samples a token in every way that takes memory. In the second step, requests have as many drafts as
    the limits allow. All blocks of all requests are block 0. Each plan ends the requests of the one before; a plan
    without requests is the last one.
    """
    longest, num_seqs = limits.max_model_len - 1, limits.max_num_seqs
    num_whole, rest = divmod(min(limits.max_num_batched_tokens, num_seqs * longest), longest)
    counts = [rest] * (rest > 0) + [longest] * num_whole
    prompts = _plan(0, counts, counts, (num_groups, block_size), 0)
    num_sampled = min(1 + max_drafts, limits.max_num_batched_tokens // num_seqs, longest)
    decodes = _plan(1, [longest] * num_seqs, [num_sampled] * num_seqs, (num_groups, block_size), len(counts))
    if num_sampled > 1:
        decodes.tokens = StepTokens(
            starts=np.full(num_seqs, longest - num_sampled, np.int32).tobytes(),
            num_sampled=np.full(num_seqs, num_sampled, np.int32).tobytes(),
            token_ids=np.zeros(num_seqs * num_sampled, np.int32).tobytes(),
        )
    return [prompts, decodes, StepPlan(2, freed_slots=list(range(num_seqs)))]


def _plan(step: int, lengths: list[int], counts: list[int], cache: tuple[int, int], num_freed: int) -> StepPlan:
    """A step that computes the last `counts` tokens of requests of these lengths.

    `cache`: number of groups of the KV cache, and its block size.
    """
    num_groups, block_size = cache
    requests = [
        NewRequest(
            slot=slot,
            token_ids=np.zeros(length, np.int32).tobytes(),
            num_prompt_tokens=count,
            num_computed_tokens=length - count,
            block_ids=np.zeros(-(-length // block_size) * num_groups, np.int32).tobytes(),
            params=EVERYTHING,
            seed=0,
        )
        for slot, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    slots = np.arange(len(lengths), dtype=np.int32)
    num_tokens = np.array(counts, np.int32).tobytes()
    # if layers keep states, those of the first tokens don't matter
    states = StatePlan(np.stack([slots, np.full_like(slots, NO_STATE)], 1).tobytes())
    return StepPlan(step, slots.tobytes(), num_tokens, list(range(num_freed)), requests, states=states)
