"""Checks of every architecture on a device: greedy tokens in float32, against transformers on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import inspect

from families import FAMILIES, NUM_NEW_TOKENS, make_checkpoint, prompts, reference

from gpu.checks import Checks
from gpu.engines import engine, generate
from raycore.sampling_params import SamplingParams

NUM_SHARES = 4
"""The architectures are checked in as many parts, which run at the same time."""


def check_architectures(checks: Checks, share: int) -> None:
    """Check every `NUM_SHARES`th of the tests' families, beginning with number `share`."""
    if importlib.util.find_spec("transformers") is None:
        checks.report(f"skipped architectures {share}: transformers isn't installed")
        return
    import transformers

    transformers.logging.set_verbosity_error()
    for family in list(FAMILIES)[share::NUM_SHARES]:
        if (reason := _why_no_reference(family)) is not None:
            checks.report(f"skipped {family}, greedy tokens as transformers: {reason}")
            continue
        checks.run(f"{family}, greedy tokens as transformers", functools.partial(_check, checks, family))


def _why_no_reference(family: str) -> str | None:
    """Return why the installed transformers computes a family otherwise than the newest one. None: it doesn't."""
    if family != "granitemoehybrid_groups":
        return None
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

    if "group_size" in inspect.signature(GraniteMoeHybridRMSNormGated).parameters:
        return None
    return "this version of transformers normalizes all groups of Mamba-2 together"


def _check(checks: Checks, family: str) -> tuple[bool, str]:
    path = make_checkpoint(family, checks.directory)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    with engine(path, checks.device) as core:
        # twice: the second time, decodes run as graphs
        answers = [answer for _ in range(2) for answer in generate(core, [(prompt, greedy) for prompt in prompts()])]
        by_torch = core.executor.collective_rpc("computation")[0].parts_by_torch
    num_equal = num_tokens = 0
    for answer, expected in zip(answers, reference(path) * 2, strict=True):
        num_equal += sum(map(int.__eq__, answer.token_ids, expected))
        num_tokens += len(expected)
    figures = f"{num_equal} of {num_tokens} tokens equal"
    if by_torch:
        figures += f"; by plain torch: {', '.join(by_torch)}"
    return num_equal == num_tokens == NUM_NEW_TOKENS * len(answers), figures
