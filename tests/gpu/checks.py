"""Correctness checks of `benchmarks/gpu.py`: the device's tokens and logits against transformers and the CPU backend.

Checks run small random checkpoints through the scheduler, the engine core and a worker in this process, without Ray.
"""

from __future__ import annotations

import functools
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

# isort: off
import raycore.worker.openmp  # noqa: F401  # before torch: sets the environment of its OpenMP

# isort: on
import numpy as np
import torch
from families import make_checkpoint
from sampling_values import CHANGING_DRAWS
from torch import Tensor

from gpu.engines import FAMILIES, VOCAB_SIZE, Answer, Device, engine, generate, int32, prompts, write_checkpoint
from raycore.engine.core import EngineCore
from raycore.messages import NewRequest, StepPlan, TokenLogprobs
from raycore.runner.decode_graphs import CudaCapture
from raycore.sampling_params import SamplingParams

Report = Callable[[str], None]
Check = Callable[[], tuple[bool, str]]

NUM_NEW_TOKENS = 12
NUM_LATER_TOKENS = 40
"""So many new tokens take more blocks than requests started with, so that requests are preempted."""
ALL = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, ignore_eos=True)
"""Asks for the log probabilities of the whole vocabulary at each position of the prompt."""
FLOAT32_ERROR = 1e-3
"""The largest difference of two log probabilities in float32."""
BFLOAT16_RATIO = 2.0
"""Errors in bfloat16 may be so many times those of transformers in bfloat16 on the CPU."""


@dataclass
class Checks:
    """Runs checks, and reports a line for each."""

    report: Report
    device: Device
    directory: Path
    """Where checkpoints are written."""
    deadline_s: float = math.inf
    """On the clock of `time.monotonic`. Checks that would start later are skipped."""
    num_failed: int = 0

    def run(self, name: str, check: Check) -> None:
        """Run `check`, which returns whether it passed, and figures. An error is a failure, too."""
        started_s = time.monotonic()
        if started_s > self.deadline_s:
            self.report(f"skipped {name}: out of time")
            return
        try:
            is_ok, figures = check()
        except Exception as error:  # the device's libraries may raise anything; the other checks still run
            traceback.print_exc()
            is_ok, figures = False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        self.num_failed += not is_ok
        self.report(f"{'ok' if is_ok else 'FAILED'} {name}: {figures} ({time.monotonic() - started_s:.1f} s)")

    def checkpoint(self, family: str) -> Path:
        """The directory of a small random checkpoint. Families that `engines` doesn't have need transformers."""
        path = self.directory / family
        if path.exists():
            return path
        if family in FAMILIES:
            return write_checkpoint(family, path)
        return make_checkpoint(family, self.directory, vocab_size=VOCAB_SIZE)

    def needs_gpu(self, name: str) -> bool:
        """Return whether this is a CPU, where the check `name` is then reported as skipped."""
        if self.device == "cpu":
            self.report(f"skipped {name}: needs a GPU")
        return self.device == "cpu"


def mixed_params() -> list[SamplingParams]:
    """One way to sample for each of `prompts()`."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, "top_k": 7, "seed": 5, "logprobs": 3},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01, "seed": 6},
        {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.3, "logprobs": 2},
        {"temperature": 1.0, "seed": 8, "prompt_logprobs": 2},
        {"temperature": 0.7, "min_p": 0.05, "logit_bias": {3: 2.0}, "min_tokens": 5, "stop_token_ids": [1, 2]},
    ]
    return [SamplingParams(max_tokens=NUM_LATER_TOKENS, ignore_eos=True, **way) for way in ways]


def first_difference(found: Sequence[Answer], expected: Sequence[Answer], allowed: float = FLOAT32_ERROR) -> str | None:
    """Describe where tokens differ, or log probabilities by more than `allowed`. None if nowhere."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.token_ids != other.token_ids:
            return f"request {index} has tokens {one.token_ids}, expected {other.token_ids}"
        for kind in ("logprobs", "prompt_logprobs"):
            entries, wanted = getattr(one, kind), getattr(other, kind)
            if len(entries) != len(wanted):
                return f"request {index} has {len(entries)} {kind}, expected {len(wanted)}"
            for entry, want in zip(entries, wanted, strict=True):
                logprobs, expected_logprobs = _by_token(entry), _by_token(want)
                if logprobs.keys() != expected_logprobs.keys():
                    return f"{kind} of request {index} name tokens {entry.token_ids}, expected {want.token_ids}"
                worst = max(abs(logprobs[token_id] - expected_logprobs[token_id]) for token_id in logprobs)
                if not worst <= allowed:
                    return f"{kind} of request {index} differ by {worst:.2g}, allowed {allowed:g}"
    return None


def _by_token(entry: TokenLogprobs) -> dict[int, float]:
    """Log probabilities by token, because roundings can exchange two that are almost equally likely."""
    return dict(zip(entry.token_ids, entry.logprobs, strict=True))


# ---- the device against transformers


def check_families(checks: Checks) -> None:
    """Every family's tokens in float32 and log probabilities in both dtypes, against transformers."""
    try:
        import transformers
    except ImportError as error:
        checks.report(f"skipped comparison with transformers: {error}")
        return
    transformers.logging.set_verbosity_error()
    for family in FAMILIES:
        reference = functools.cache(functools.partial(_Reference, checks.checkpoint(family)))
        for name, check in (
            ("float32, greedy tokens as transformers", _check_float32),
            ("bfloat16, logits near transformers", _check_bfloat16),
        ):
            checks.run(f"{family}, {name}", functools.partial(check, checks, reference))


class _Reference:
    """transformers' model of a checkpoint, on the CPU."""

    def __init__(self, path: Path) -> None:
        import transformers

        self.path = path
        load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, path, attn_implementation="eager")
        self._models = {dtype: load(dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)}

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], dtype: torch.dtype) -> Tensor:
        """float32[T, V]: after each token, the log probabilities of the next one."""
        logits_TV = self._models[dtype](torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits_TV.float().log_softmax(-1)


def _check_float32(checks: Checks, load: Callable[[], _Reference]) -> tuple[bool, str]:
    reference = load()
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    with engine(reference.path, checks.device) as core:
        answers = generate(core, [(prompt, greedy) for prompt in prompts()])
        worst = float(_prompt_errors(core, reference).max())
    num_equal = num_tokens = 0
    for prompt, answer in zip(prompts(), answers, strict=True):
        likely = reference.logprobs([*prompt, *answer.token_ids], torch.float32).argmax(-1).tolist()
        expected = likely[len(prompt) - 1 : -1]
        num_equal += sum(map(int.__eq__, answer.token_ids, expected))
        num_tokens += len(expected)
    is_ok = num_equal == num_tokens == NUM_NEW_TOKENS * len(answers) and worst <= FLOAT32_ERROR
    return is_ok, f"{num_equal} of {num_tokens} tokens equal, log probabilities off by at most {worst:.1e}"


def _check_bfloat16(checks: Checks, load: Callable[[], _Reference]) -> tuple[bool, str]:
    """Compare quantiles: a rounding that sends a token to another expert makes a few errors large, in both."""
    reference = load()
    with engine(reference.path, checks.device, dtype="bfloat16") as core:
        errors = _prompt_errors(core, reference)
    theirs = torch.cat(
        [
            (reference.logprobs(prompt, torch.bfloat16) - reference.logprobs(prompt, torch.float32)).abs().flatten()
            for prompt in prompts()
        ]
    )
    is_ok, figures = True, ""
    for quantile in (0.5, 0.9):
        found, allowed = float(errors.quantile(quantile)), BFLOAT16_RATIO * float(theirs.quantile(quantile))
        is_ok = is_ok and found <= allowed
        figures += f"{quantile:.0%} of errors below {found:.4f}, allowed {allowed:.4f}; "
    return is_ok, f"{figures}largest {float(errors.max()):.3f}"


def _prompt_errors(core: EngineCore, reference: _Reference) -> Tensor:
    """Return the errors of all log probabilities at all positions of the prompts. NaN where one is missing."""
    asked = [prompt for prompt in prompts() if len(prompt) > 1]
    errors: list[Tensor] = []
    for prompt, answer in zip(asked, generate(core, [(prompt, ALL) for prompt in asked]), strict=True):
        expected_TV = reference.logprobs(prompt, torch.float32)
        for entry, expected_V in zip(answer.prompt_logprobs, expected_TV[:-1], strict=True):
            found_V = torch.full((VOCAB_SIZE,), math.nan)
            found_V[torch.tensor(entry.token_ids)] = torch.tensor(entry.logprobs)
            errors.append((found_V - expected_V).abs())
    return torch.cat(errors)


# ---- the device against the CPU backend


def check_engine(checks: Checks) -> None:
    """Tokens in float32 are those of plain torch on the CPU, however steps are scheduled and tokens are sampled."""
    # mistral's windows free their blocks, so it needs fewer
    for family, num_blocks in (("qwen3", 9), ("mistral", 5), ("qwen3_moe", 9)):
        check_engine_of(checks, family, num_blocks)


def check_engine_of(checks: Checks, family: str, num_blocks: int) -> None:
    """Check one family. `num_blocks`: so few that requests are preempted."""
    tight = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": num_blocks}
    reference = functools.cache(functools.partial(_reference_answers, checks.checkpoint(family)))
    for in_flight in (1, 2):
        options = {"async_scheduling": in_flight == 2}
        for name, more in (("prefix cache", {}), ("chunks, preemption", tight)):
            checks.run(
                f"{family}, float32, tokens as on the CPU, {in_flight} in flight, {name}",
                functools.partial(_check_answers, checks, family, reference, options | more),
            )


def _reference_answers(path: Path) -> list[Answer]:
    with engine(path, "cpu", attention_backend="torch", async_scheduling=False) as core:
        return generate(core, list(zip(prompts(), mixed_params(), strict=True)))


def _check_answers(
    checks: Checks, family: str, reference: Callable[[], list[Answer]], options: dict[str, Any]
) -> tuple[bool, str]:
    with engine(checks.checkpoint(family), checks.device, **options) as core:
        answers = generate(core, list(zip(prompts(), mixed_params(), strict=True)))
        # again: prompts are now in the prefix cache
        again = generate(core, list(zip(prompts(), mixed_params(), strict=True)))
        load = core.load()
    difference = first_difference(answers, reference()) or first_difference(again, reference())
    is_tight = "num_gpu_blocks_override" in options
    has_tested = load.num_preemptions > 0 if is_tight else load.prefix_cache_hits > 0
    num_tokens = sum(len(answer.token_ids) for answer in [*answers, *again])
    figures = f"{num_tokens} tokens, {load.num_preemptions} preemptions, {load.prefix_cache_hits} cached tokens"
    return difference is None and has_tested, f"{figures}{'; ' + difference if difference else ''}"


# ---- batch invariance


def check_invariance(checks: Checks) -> None:
    """With `batch_invariant=True`, logits in bfloat16 have the same bits alone, in a batch, and in chunks."""
    for family in ("qwen3", "mistral", "qwen3_moe"):
        check_invariance_of(checks, family)


def check_invariance_of(checks: Checks, family: str) -> None:
    """Check one family."""
    checks.run(f"{family}, bfloat16, batch_invariant, same bits", functools.partial(_check_invariance, checks, family))


def _check_invariance(checks: Checks, family: str) -> tuple[bool, str]:
    asked = invariant_requests()
    options: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True, "enable_prefix_caching": False}
    path = checks.checkpoint(family)
    with engine(path, checks.device, **options) as core:
        alone = [answer for each in asked for answer in generate(core, [each])]
        together = generate(core, asked)
    with engine(path, checks.device, max_num_batched_tokens=16, **options) as core:
        in_chunks = generate(core, asked)
    differing = [
        f"{name}: {difference}"
        for name, found in (("in a batch", together), ("in chunks", in_chunks))
        if (difference := _difference_of_bits(found, alone))
    ]
    num_logits = sum(len(entry.logprobs) for answer in alone for entry in answer.logprobs)
    return not differing, f"{num_logits} logits" + (f"; others than alone {'; '.join(differing)}" if differing else "")


def _difference_of_bits(found: Sequence[Answer], expected: Sequence[Answer]) -> str | None:
    """Describe where the first request that differs begins to differ, and in what. None if all bits are equal."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        for position, (entry, wanted) in enumerate(zip(one.logprobs, other.logprobs, strict=False)):
            if entry != wanted:
                logprobs, expected_logprobs = _by_token(entry), _by_token(wanted)
                differing = [token_id for token_id in logprobs if logprobs[token_id] != expected_logprobs.get(token_id)]
                order = "the same order" if entry.token_ids == wanted.token_ids else "another order"
                return f"request {index}, output {position}: {len(differing)} other logits, {order} of tokens"
        if one != other:
            return f"request {index} has tokens {one.token_ids}, expected {other.token_ids}"
    return None


def invariant_requests() -> list[tuple[list[int], SamplingParams]]:
    """Requests for the log probabilities of the whole vocabulary after each new token."""
    draw = SamplingParams(temperature=0.8, top_p=0.9, logprobs=-1, max_tokens=6, ignore_eos=True)
    greedy = SamplingParams(temperature=0, logprobs=-1, max_tokens=6, ignore_eos=True)
    return [(prompt, greedy if index % 2 else draw) for index, prompt in enumerate(prompts())]


# ---- CUDA graphs, and waiting for the device


def check_graphs(checks: Checks) -> None:
    """Decodes as CUDA graphs have the tokens of eager ones, and steps are launched without waiting for the device."""
    for family in ("qwen3", "qwen3_moe"):
        check_graphs_of(checks, family)
    if checks.needs_gpu("no synchronization in steady decodes"):
        return
    for is_eager in (True, False):
        for name, params in waiting_params().items():
            checks.run(
                f"no synchronization, {'eager' if is_eager else 'graphs'}, {name}",
                functools.partial(check_waiting, checks, "qwen3_moe", params, is_eager),
            )


def check_graphs_of(checks: Checks, family: str) -> None:
    """Compare one family's graphs with eager decodes."""
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16", "batch_invariant": True}):
        name = f"{family}, {options['dtype']}, graphs as eager"
        checks.run(name, functools.partial(_check_graphs, checks, family, options))


def _check_graphs(checks: Checks, family: str, options: dict[str, Any]) -> tuple[bool, str]:
    num_captured = 0
    capture = CudaCapture.__call__

    def count(self: CudaCapture, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        nonlocal num_captured
        launch = capture(self, compute)
        num_captured += 1
        return launch

    answers: list[list[Answer]] = []
    with mock.patch.object(CudaCapture, "__call__", count):
        for is_eager in (True, False):
            with engine(checks.checkpoint(family), checks.device, enforce_eager=is_eager, **options) as core:
                answers.append(generate(core, invariant_requests()))
    eager, replayed = answers
    difference = first_difference(replayed, eager)
    if difference is None and "batch_invariant" in options:
        difference = _difference_of_bits(replayed, eager)
    is_ok = difference is None and (num_captured > 0 or checks.device == "cpu")
    figures = f"{sum(len(answer.token_ids) for answer in eager)} tokens, {num_captured} graphs"
    return is_ok, f"{figures}{'; ' + difference if difference else ''}"


def waiting_params() -> dict[str, SamplingParams]:
    """Ways to sample that take different kernels."""
    return {
        "greedy": SamplingParams(temperature=0),
        "top-k, top-p, min-p": SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01),
        "penalties": SamplingParams(temperature=0, repetition_penalty=1.2, presence_penalty=0.2, frequency_penalty=0.1),
        "logprobs": SamplingParams(temperature=0.7, logprobs=3, logit_bias={3: 1.0}, stop_token_ids=[4]),
        "allowed tokens": SamplingParams(temperature=0, allowed_token_ids=[1, 5, 9]),
        "all together": SamplingParams(**CHANGING_DRAWS),
    }


def check_waiting(checks: Checks, family: str, params: SamplingParams, is_eager: bool) -> tuple[bool, str]:
    """Launch decodes while every call that waits for the device is an error."""
    with engine(checks.checkpoint(family), checks.device, enforce_eager=is_eager, async_scheduling=True) as core:
        execute, size = core.executor.execute, 8 * core.cache.layout.num_groups
        requests = [
            NewRequest(slot, int32([3] * 5), 5, 0, int32(range(size * slot, size * slot + size)), params, seed=slot)
            for slot in range(3)
        ]
        slots = int32(range(3))
        execute(StepPlan(0, slots, int32([5] * 3), new_requests=requests)).result()
        for _ in range(3):  # compiles kernels and captures a graph
            execute(StepPlan(1, slots)).result()
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = [execute(StepPlan(2, slots)) for _ in range(3)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        tokens = [np.frombuffer(each.result().token_ids, np.int32) for each in launched]
    return bool(np.min(tokens) >= 0), f"{len(launched)} steps launched"


def quiet_libraries() -> None:
    """Keep libraries from reaching for a network, and from drawing progress bars."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
