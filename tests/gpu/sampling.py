"""Checks of what changes logits and what is told of them, on a device: answers are those of an engine on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from gpu.checks import Checks, first_difference
from gpu.engines import Answer, engine, generate, prompts
from raycore.client.prompt_embeds import PromptEmbeds
from raycore.engine.core import EngineCore
from raycore.messages import EngineRequest, ThinkingLimit
from raycore.sampling.logits_processors import AdapterLogitsProcessor
from raycore.sampling_params import SamplingParams

FAMILY = "qwen3"
NUM_TOKENS = 12
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


class NeverAgain(AdapterLogitsProcessor):
    """No token that `extra_args` counts back may come again."""

    def is_argmax_invariant(self) -> bool:
        """It changes which token is the most likely one."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """What changes a request's logits."""
        count = (params.extra_args or {}).get("never_again")
        return None if count is None else functools.partial(_without_last, count)


def _without_last(count: int, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    logits[list(output_ids[-count:])] = float("-inf")
    return logits


def check_sampling(checks: Checks) -> None:
    """Compare log probabilities in all modes, users' logits processors, limits of reasoning, and given embeddings."""
    for mode in MODES:
        checks.run(f"{FAMILY}, logprobs_mode {mode}", functools.partial(_check_options, checks, logprobs_mode=mode))
    name = f"{FAMILY}, users' logits processors"
    checks.run(name, functools.partial(_check_processors, checks))
    checks.run(f"{FAMILY}, limits of reasoning", functools.partial(_check_thinking, checks))
    checks.run(f"{FAMILY}, prompts given as embeddings", functools.partial(_check_embeds, checks))


def _asked() -> list[tuple[list[int], SamplingParams]]:
    ways: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.8, "top_k": 5, "seed": 3, "logprobs": 2},
        {"temperature": 0, "extra_args": {"never_again": 4}, "logprobs": 1},
        {"temperature": 0, "logprob_token_ids": [5, 1, 9]},
        {"temperature": 0, "repetition_penalty": 1.4, "logprobs": 0, "prompt_logprobs": 2},
        {"temperature": 1.1, "seed": 9, "extra_args": {"never_again": 2}},
    ]
    return [
        (prompt, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **way))
        for prompt, way in zip(prompts(), ways, strict=True)
    ]


def _check_options(checks: Checks, **options: Any) -> tuple[bool, str]:
    answers: list[list[Answer]] = []
    for device in (checks.device, "cpu"):
        with engine(checks.checkpoint(FAMILY), device, **options) as core:
            answers.append(generate(core, _asked()))
    return _compared(*answers)


def _check_processors(checks: Checks) -> tuple[bool, str]:
    options = {"logits_processors": [f"{__name__}.NeverAgain"]}
    with engine(checks.checkpoint(FAMILY), checks.device, **options) as core:
        ids = generate(core, _asked())[2].token_ids
    comes_again = next((index for index in range(len(ids)) if ids[index] in ids[max(0, index - 4) : index]), None)
    if comes_again is not None:
        return False, f"a token came again: {ids}"
    return _check_options(checks, **options)


def _compared(found: Sequence[Answer], expected: Sequence[Answer]) -> tuple[bool, str]:
    difference = first_difference(found, expected)
    num_tokens = sum(len(answer.token_ids) for answer in expected)
    return difference is None, difference or f"{num_tokens} tokens of {len(expected)} requests as on the CPU"


def _check_thinking(checks: Checks) -> tuple[bool, str]:
    answers: list[list[Answer]] = []
    limit = ThinkingLimit(max_tokens=4, opening=[2], closing=[7, 8], forced=[6, 7, 8], is_open=True)
    for device in (checks.device, "cpu"):
        with engine(checks.checkpoint(FAMILY), device) as core:
            answers.append(_answers(core, [(prompt, {"thinking": limit}) for prompt in prompts()]))
    are_forced = all(answer.token_ids[4:7] == [6, 7, 8] for answer in answers[0])
    is_ok, figures = _compared(*answers)
    return is_ok and are_forced, figures if are_forced else f"no forced end: {answers[0][0].token_ids}"


def _check_embeds(checks: Checks) -> tuple[bool, str]:
    path = checks.checkpoint(FAMILY)
    rows_VD = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    with engine(path, checks.device, enable_prompt_embeds=True) as core:
        expected = _answers(core, [(prompt, {}) for prompt in prompts()])
        embeds = PromptEmbeds(core.config)
        asked: list[tuple[list[int], dict[str, Any]]] = []
        for prompt in prompts():
            ids, features, data = embeds.complete("prompt", rows_VD[prompt], None)
            asked.append((ids, {"features": features, "feature_data": data}))
        found = _answers(core, asked)
    return _compared(found, expected)


def _answers(core: EngineCore, asked: Sequence[tuple[list[int], dict[str, Any]]]) -> list[Answer]:
    """Run requests with further fields of messages, greedily."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = [Answer() for _ in asked]
    for seq_id, (prompt, fields) in enumerate(asked):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, params, seed=1, **fields))
    while core.has_work():
        outputs = core.step()
        if outputs is not None:
            assert not [each for each in outputs.finished if each.finish_reason in ("error", "failed")]
            for seq_id, token_id in zip(outputs.seq_ids.tolist(), outputs.token_ids.tolist(), strict=True):
                answers[seq_id].token_ids.append(int(np.int64(token_id)))
    return answers
