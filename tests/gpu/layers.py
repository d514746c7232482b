"""Checks of layers that keep latents or states, and of windows whose layers have blocks of their own.

Tokens in float32 are those of plain torch on the CPU, however steps are scheduled, with drafts and without; so are
hidden states. Logits in bfloat16 have the same bits in any batch, and in CUDA graphs.
"""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
from numpy.typing import NDArray

from gpu.checks import (
    NUM_LATER_TOKENS,
    Checks,
    check_engine_of,
    check_graphs_of,
    check_invariance_of,
    check_waiting,
    first_difference,
)
from gpu.engines import Answer, Device, engine, generate, prompts
from raycore.messages import NO_DRAFT_STATS
from raycore.sampling_params import SamplingParams

NUM_BLOCKS: dict[str, int] = {
    "deepseek_v3": 9,
    "glm4_moe_lite": 9,
    "glm_moe_dsa": 9,
    "qwen3_next": 9,
    "kimi_linear": 9,
    "lfm2": 9,
    "granitemoehybrid": 9,
    "granitemoehybrid_groups": 9,
    "falcon_h1": 9,
    "minimax": 9,
    "jamba": 9,
    "gemma3": 20,
}
"""The tests' families that are checked, and so few blocks that requests are preempted."""
WITHOUT_GRAPHS = (
    *("qwen3_next", "kimi_linear", "lfm2", "granitemoehybrid", "granitemoehybrid_groups", "falcon_h1", "minimax"),
    *("jamba", "glm_moe_dsa"),
)
"""Their layers keep states, or plain torch computes them."""
STATE_ERROR = 1e-4
"""The largest error of hidden states in float32, relative to the largest number."""
DRAFTS = {
    "method": "suffix",
    "num_speculative_tokens": 3,
    # always, whatever the measured times
    "num_speculative_tokens_per_batch_size": [(1, 8, 3)],
}


def check_layers(checks: Checks, family: str) -> None:
    """Check one family."""
    if importlib.util.find_spec("transformers") is None:
        checks.report(f"skipped layers of {family}: transformers isn't installed")
        return
    import transformers

    transformers.logging.set_verbosity_error()
    check_engine_of(checks, family, NUM_BLOCKS[family])
    checks.run(f"{family}, float32, hidden states as on the CPU", functools.partial(_check_hidden, checks, family))
    checks.run(f"{family}, float32, tokens with drafts as without", functools.partial(_check_drafts, checks, family))
    check_invariance_of(checks, family)
    if family not in WITHOUT_GRAPHS:
        check_graphs_of(checks, family)
    if checks.needs_gpu(f"{family}, no synchronization in steady decodes"):
        return
    for is_eager in (True,) if family in WITHOUT_GRAPHS else (True, False):
        name = f"{family}, no synchronization, {'eager' if is_eager else 'graphs'}"
        checks.run(name, functools.partial(check_waiting, checks, family, SamplingParams(temperature=0), is_eager))


def _check_hidden(checks: Checks, family: str) -> tuple[bool, str]:
    found, expected = (_hidden_states(checks, family, device) for device in (checks.device, "cpu"))
    if found.shape != expected.shape:
        return False, f"{len(found)} states, expected {len(expected)}"
    worst = float(np.abs(found - expected).max() / np.abs(expected).max())
    return worst <= STATE_ERROR, f"{len(found)} states, off by at most {worst:.1e} of the largest number"


def _hidden_states(checks: Checks, family: str, device: Device) -> NDArray[np.float32]:
    """Return the states of all prompts and outputs, [n, D]."""
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, return_hidden_states=True, return_prompt_hidden_states=True
    )
    options = {"attention_backend": "torch"} if device == "cpu" else {}
    with engine(checks.checkpoint(family), device, max_num_batched_tokens=32, **options) as core:
        answers = generate(core, [(prompt, params) for prompt in prompts()])
    states = [state for each in answers for state in (each.states[position] for position in sorted(each.states))]
    return np.stack([np.frombuffer(state, np.float32) for state in states])


def _check_drafts(checks: Checks, family: str) -> tuple[bool, str]:
    """Drafts are what was answered before: right if the same is asked again, and mostly wrong if tokens are drawn."""
    greedy = SamplingParams(temperature=0, max_tokens=NUM_LATER_TOKENS, ignore_eos=True)
    # with a small model, a low temperature may draw what is most likely, and a high one what nobody guesses
    drawn = [
        SamplingParams(temperature=temperature, max_tokens=NUM_LATER_TOKENS, ignore_eos=True, seed=3)
        for temperature in (0.6, 3.0)
    ]
    path = checks.checkpoint(family)
    answers: list[list[Answer]] = []
    drafts = NO_DRAFT_STATS
    for options in ({}, {"speculative_config": DRAFTS}):
        with engine(path, checks.device, **options) as core:
            asked = [[(prompt, params) for prompt in prompts()] for params in (greedy, greedy, *drawn)]
            answers.append([answer for each in asked for answer in generate(core, each)])
            drafts = core.load().drafts
    difference = first_difference(answers[1], answers[0])
    num_drafted, num_right = drafts.num_draft_tokens, sum(drafts.accepted_per_position)
    figures = f"{num_right} of {num_drafted} drafted tokens were right"
    return difference is None and 0 < num_right < num_drafted, figures + (f"; {difference}" if difference else "")
