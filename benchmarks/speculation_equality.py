"""Compares outputs with and without speculation: greedy and sampled, with log probabilities, grammars and penalties.

    python benchmarks/speculation_equality.py                         2,000 requests on the bundled model
    python benchmarks/speculation_equality.py --speculative-config '{"method": "suffix"}'

With `batch_invariant=True`, every output has to be the same, bit for bit, log probabilities included. Without it, in
float32, a different token may come only where the last bits of logits decide. So for the first token of each output
that differs, transformers computes the logits after the same tokens, and the sampler gets copies of them with random
changes below 1e-3: it has to draw both tokens from these copies.

The exit status is 1 if an output differs otherwise, or if hardly any draft was right.
"""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import table

from raycore import LLM, SamplingParams, StructuredOutputsParams
from raycore.checkpoint.model_spec import load_model_spec
from raycore.demo import demo_model_path
from raycore.metrics.counts import RankCounts
from raycore.outputs import RequestOutput
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.sampling.kernels import SamplingKernels
from raycore.sampling.sampler import Sampler

ROUNDING = 1e-3
"""Changes of logits that may change a token. The error in float32 is far smaller."""
NUM_CHANGED = 4096

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, log probabilities": {"temperature": 0, "logprobs": 3},
    "greedy, penalties": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "sampled": {"temperature": 1.0},
    "sampled, log probabilities": {"temperature": 0.7, "logprobs": 2},
    "sampled, penalties": {"temperature": 1.2, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "sampled, top-p, top-k, min-p": {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "a regular expression": {
        "temperature": 1.0,
        "structured_outputs": StructuredOutputsParams(regex="([0-9]{1,3} [+] [0-9]{1,3} = ){30}"),
    },
    "JSON": {"temperature": 0, "structured_outputs": StructuredOutputsParams(json_object=True)},
    "bad words": {"temperature": 1.0, "bad_words": ["1", "0 0"]},
}


def main() -> None:
    """Run both comparisons, and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--num-tokens", type=int, default=64, help="generated for each request")
    parser.add_argument(
        "--speculative-config",
        default='{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4, '
        '"num_speculative_tokens_per_batch_size": [[1, 64, 5]]}',
        help="the default drafts whether it pays or not",
    )
    args = parser.parse_args()
    print(f"{args.requests} requests, {args.num_tokens} tokens each, {args.speculative_config}")
    results = [_compare(args, batch_invariant=batch_invariant) for batch_invariant in (True, False)]
    sys.exit(0 if all(results) else 1)


def _compare(args: argparse.Namespace, *, batch_invariant: bool) -> bool:
    names = list(KINDS)
    prompts = ["37 + 58 = " * (1 + index % 5) + f"{index % 97} + {index % 89} =" for index in range(args.requests)]
    params = [
        SamplingParams(max_tokens=args.num_tokens, ignore_eos=True, seed=index, **KINDS[names[index % len(names)]])
        for index in range(args.requests)
    ]
    expected, _ = _generate(prompts, params, None, batch_invariant=batch_invariant)
    found, counts = _generate(prompts, params, json.loads(args.speculative_config), batch_invariant=batch_invariant)
    drafts = f"{counts.num_draft_tokens} drafted tokens, {counts.num_accepted_tokens} of them accepted"
    print(f"\nbatch_invariant={batch_invariant}, float32: {drafts}")
    rows: list[list[object]] = [["kind", "requests", "different", "beyond rounding"]]
    num_wrong = 0
    for index, name in enumerate(names):
        pairs = list(zip(expected, found, params, strict=True))[index :: len(names)]
        differing = [pair for pair in pairs if not _is_same(*pair[:2], batch_invariant=batch_invariant)]
        wrong = differing if batch_invariant else [pair for pair in differing if not _is_rounding(*pair)]
        num_wrong += len(wrong)
        rows.append([name, len(pairs), len(differing), len(wrong)])
    print(table(rows), flush=True)
    return num_wrong == 0 and counts.num_accepted_tokens > args.requests


def _generate(
    prompts: list[str],
    params: list[SamplingParams],
    config: dict[str, Any] | None,
    *,
    batch_invariant: bool,
) -> tuple[list[RequestOutput], RankCounts]:
    """Return the outputs, and what was counted meanwhile."""
    with LLM(
        demo_model_path(),
        dtype="float32",
        batch_invariant=batch_invariant,
        speculative_config=config,
        max_num_seqs=64,
        standby_delay_s=None,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return outputs, llm.read_metrics().counts[0]


def _is_same(one: RequestOutput, other: RequestOutput, *, batch_invariant: bool) -> bool:
    ours, theirs = one.outputs[0], other.outputs[0]
    if (ours.token_ids, ours.finish_reason) != (theirs.token_ids, theirs.finish_reason):
        return False
    return not batch_invariant or ours.logprobs == theirs.logprobs


def _is_rounding(one: RequestOutput, other: RequestOutput, params: SamplingParams) -> bool:
    """Whether the first different token may be the other one if logits change by less than `ROUNDING`."""
    ours, theirs = one.outputs[0].token_ids, other.outputs[0].token_ids
    index = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if index is None:
        return False
    tokens = [*one.prompt_token_ids, *ours[:index]]
    logits_V = _logits_after(tokens)
    changes_NV = torch.rand(NUM_CHANGED, len(logits_V), generator=torch.Generator().manual_seed(0)) * 2 - 1
    drawn = _draw(logits_V + ROUNDING * changes_NV, tokens, len(one.prompt_token_ids), params)
    print(f"token {index} of a request is {ours[index]} or {theirs[index]}; drawn: {sorted(drawn)}", file=sys.stderr)
    return {ours[index], theirs[index]} <= drawn


def _logits_after(tokens: list[int]) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, -1].clone()


def _draw(logits_NV: torch.Tensor, tokens: list[int], num_prompt: int, params: SamplingParams) -> set[int]:
    """Return the tokens that the sampler draws for a request with these tokens from each row of logits."""
    spec = load_model_spec(demo_model_path())
    grammars = GrammarCompiler(str(demo_model_path()), spec.vocab_size, spec.eos_token_ids)
    sampler = Sampler(spec.vocab_size, SamplingKernels(torch.device("cpu")), grammars=grammars)
    token_ids = np.array([[*tokens, 0]], np.int32)
    batch = SimpleNamespace(
        token_ids=token_ids, token_ids_SM=torch.as_tensor(token_ids), num_prompt=np.array([num_prompt])
    )
    sampler.add(0, params, params.seed or 0, spec.eos_token_ids)
    position = np.array([len(tokens)])
    rows = [sampler.sample(row_V[None], np.array([0]), position, batch).token_ids_R for row_V in logits_NV]
    return set(torch.cat(rows).tolist())


if __name__ == "__main__":
    main()
