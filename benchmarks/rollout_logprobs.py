"""Log probabilities of rollouts, bit by bit: on 1 and 2 tensor-parallel ranks, and in a trainer.

    python benchmarks/rollout_logprobs.py CHECKPOINT [--sequences 1000]

Samples the same prompts with the same seeds on engines with `batch_invariant=True`, and has `raycore.trainer.logprobs`
compute the first engine's sequences again. Prints how many tokens and log probabilities differ, and what batch
invariance costs: output tokens a second with and without it, alternately.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from common import median, table
from transformers import AutoModelForCausalLM

from raycore import LLM, RequestOutput, SamplingParams
from raycore.trainer import logprobs

NUM_PROMPT = 24


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--new", type=int, default=32, help="tokens to generate for each")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    rows: list[list[object]] = [["tensor-parallel ranks", "plain tokens/s", "batch-invariant tokens/s", "ratio"]]
    rollouts: list[list[RequestOutput]] = []
    for tp_size in (1, 2):
        options = {"tensor_parallel_size": tp_size, "dtype": arguments.dtype, "max_model_len": 256, "max_logprobs": 1}
        with (
            LLM(arguments.checkpoint, **options) as plain,
            LLM(arguments.checkpoint, batch_invariant=True, **options) as invariant,
        ):
            for llm in (plain, invariant):
                sample(llm, arguments, min(64, arguments.sequences))  # warms up
            rates: list[list[float]] = [[], []]
            for _ in range(arguments.rounds):
                for llm, found in zip((plain, invariant), rates, strict=True):
                    llm.reset_prefix_cache()
                    rate, outputs = sample(llm, arguments, arguments.sequences)
                    found.append(rate)
            rollouts.append(outputs)
        plain_rate, invariant_rate = map(median, rates)
        rows.append([tp_size, f"{plain_rate:.0f}", f"{invariant_rate:.0f}", f"{invariant_rate / plain_rate:.2f}"])
    print(table(rows))
    started_s = time.perf_counter()
    recomputed = in_trainer(arguments, rollouts[0])
    seconds = time.perf_counter() - started_s
    num_tokens = sum(len(tokens) for tokens in map(tokens_of, rollouts[0]))
    print(f"trainer: {num_tokens + NUM_PROMPT * len(recomputed)} tokens in {seconds:.1f} s\n")
    rows = [["compared with 1 rank", "sequences", "sampled tokens", "other tokens", "other log probabilities"]]
    other = [(tokens_of(each), logprobs_of(each)) for each in rollouts[1]]
    scored = [(tokens_of(each), numbers) for each, numbers in zip(rollouts[0], recomputed, strict=True)]
    for name, found in (("2 ranks", other), ("trainer", scored)):
        num_tokens = num_logprobs = 0
        for first, (tokens, numbers) in zip(rollouts[0], found, strict=True):
            num_tokens += sum(a != b for a, b in zip(tokens_of(first), tokens, strict=True))
            num_logprobs += sum(a != b for a, b in zip(logprobs_of(first), numbers, strict=True))
        total = sum(len(tokens_of(each)) for each in rollouts[0])
        rows.append([name, len(found), total, num_tokens, num_logprobs])
    print(table(rows))


def sample(llm: LLM, arguments: argparse.Namespace, count: int) -> tuple[float, list[RequestOutput]]:
    """Return output tokens a second, and the outputs."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(NUM_PROMPT)] for _ in range(count)]
    params = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=arguments.new, ignore_eos=True, logprobs=0)
        for index in range(count)
    ]
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return count * arguments.new / (time.perf_counter() - started_s), outputs


def in_trainer(arguments: argparse.Namespace, outputs: list[RequestOutput]) -> list[list[float]]:
    """By sequence: the log probabilities of sampled tokens that a trainer computes."""
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=getattr(torch, arguments.dtype))
    ids_BL = torch.tensor([[*output.prompt_token_ids, *tokens_of(output)] for output in outputs])
    with torch.no_grad():
        found_BL = logprobs(model, ids_BL, dtype=arguments.dtype, max_model_len=256)
    return found_BL[:, NUM_PROMPT - 1 :].tolist()


def tokens_of(output: RequestOutput) -> list[int]:
    """Return the sampled tokens."""
    return list(output.outputs[0].token_ids)


def logprobs_of(output: RequestOutput) -> list[float]:
    """Return the sampled tokens' log probabilities."""
    entries = output.outputs[0].logprobs
    assert entries is not None, "they were asked for"
    return [entry[token].logprob for entry, token in zip(entries, tokens_of(output), strict=True)]


if __name__ == "__main__":
    main()
