"""Chats that a GGUF file's model answers, by raycore and by llama.cpp, both greedy.

usage: python benchmarks/gguf_chats.py FILE.gguf --llama-cpp DIR [--dtype float32] [--new-tokens 64]

DIR has llama.cpp's `llama-server` and its libraries. llama.cpp starts first and renders and tokenizes nothing: it gets
raycore's token ids, after its own rendering and tokens of each chat have been compared with them. What is printed: how
many answers are equal; for each other one, at which token they part, and how far apart the two tokens' log
probabilities are there in raycore. Up to 0.1, that is a near tie, which another order of additions decides. llama.cpp
rounds activations to 8 bits before it multiplies them with quantized weights.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from raycore import LLM, SamplingParams

NEAR_TIE = 0.1
"""Of log probabilities."""
START_S = 120.0
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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class LlamaCpp:
    """A running llama-server. Use it in a `with` statement."""

    def __init__(self, directory: Path, file: Path, context: int) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # open as long as the server runs
        self._process = subprocess.Popen(
            [directory / "llama-server", "-m", file, "-c", str(context), "-np", "1", "--port", str(port), "--jinja"],
            env={**os.environ, "LD_LIBRARY_PATH": str(directory)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> LlamaCpp:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                self._call("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
            else:
                return self
        self._log.seek(0)
        end = self._log.read()[-2000:]
        self.__exit__()
        raise RuntimeError(f"llama-server doesn't serve after {START_S:g} s or has ended:\n{end}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a chat, as the server renders it."""
        prompt = self._call("/apply-template", messages=messages)["prompt"]
        return self._call("/tokenize", content=prompt, add_special=True, parse_special=True)["tokens"]

    def answer(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """Return the tokens that follow, without one that ends the text."""
        greedy = {"temperature": 0, "top_k": 1, "cache_prompt": False, "return_tokens": True, "repeat_penalty": 1.0}
        return self._call("/completion", prompt=prompt_ids, n_predict=num_tokens, **greedy)["tokens"]

    def _call(self, path: str, **fields: Any) -> Any:
        data = json.dumps(fields).encode() if fields else None
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)


def compare(name: str, answer: Any, other: list[int], ends: set[int]) -> str | None:
    """Return what to print of two answers that differ: None if they are equal up to what ends them."""
    own = list(answer.token_ids)
    if [each for each in own if each not in ends] == [each for each in other if each not in ends]:
        return None
    at = next((index for index, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"{name}: one answer ends after {min(len(own), len(other))} tokens, and the other goes on"
    found = answer.logprobs[at]
    if other[at] not in found:
        return f"{name}: token {at} is {own[at]}, and llama.cpp's {other[at]} isn't among raycore's best {len(found)}"
    margin = found[own[at]].logprob - found[other[at]].logprob
    kind = "a near tie" if margin <= NEAR_TIE else "DIFFERENT"
    return f"{name}: token {at} is {own[at]}, and llama.cpp's {other[at]} is {margin:.4f} less likely: {kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    with LLM(str(args.file), dtype=args.dtype, max_model_len=1024) as llm:
        prompts: list[list[int]] = [
            llm.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            for chat in chats
        ]
        params = SamplingParams(temperature=0, max_tokens=args.new_tokens, logprobs=20)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = [output.outputs[0] for output in llm.generate(given, params, use_tqdm=False)]
        ends = set(llm.config.model.spec.eos_token_ids)
    with LlamaCpp(args.llama_cpp, args.file, 1024) as peer:
        same_prompts = sum(peer.prompt_ids(chat) == prompt for chat, prompt in zip(chats, prompts, strict=True))
        others = [peer.answer(prompt, args.new_tokens) for prompt in prompts]
    found = [compare(repr(text), *each, ends) for text, *each in zip(CHATS, answers, others, strict=True)]
    lines = [line for line in found if line is not None]
    near = sum("near tie" in line for line in lines)
    print(f"prompts with the same tokens: {same_prompts} of {len(chats)}")
    print(f"answers: {len(chats) - len(lines)} of {len(chats)} equal, {near} differ from a near tie on")
    print("\n".join(lines))
    if same_prompts < len(chats) or near < len(lines):
        raise SystemExit("different")


if __name__ == "__main__":
    main()
