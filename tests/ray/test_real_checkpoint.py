"""Trained weights: text that means something, as transformers generates it.

`RAYCORE_REAL_CHECKPOINT` is the directory of a small chat model for which transformers has a class.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import save_demo_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from raycore import LLM, SamplingParams, StructuredOutputsParams
from raycore.lora.request import LoRARequest

PATH = os.environ.get("RAYCORE_REAL_CHECKPOINT", "")
pytestmark = [
    pytest.mark.skipif(not PATH, reason="RAYCORE_REAL_CHECKPOINT names no checkpoint"),
    pytest.mark.timeout(600),  # transformers takes most of it
]

QUESTIONS = [
    "What is the capital of France?",
    "Name three animals that can fly.",
    "Write one sentence about the sea.",
    "How many days does a week have?",
    "Why is the sky blue?",
    "Explain gravity to a child.",
    "What do bees make?",
    "Write a haiku about winter.",
    "Which language is spoken in Brazil?",
    "What is the opposite of hot?",
]
TEXTS = [
    "Once upon a time, there was a little girl who",
    "The largest planet of the solar system is",
    "To make a cup of tea, first",
    "In 1969, the first humans",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colors are",
    "My favorite season is autumn, because",
    "The train left the station at noon and",
    "A good friend is someone who",
]
NUM_TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
OPTIONS: dict[str, Any] = {"max_model_len": 512, "dtype": "float32"}
MOST_NATS_LOST = 0.3
"""What rounding weights to 8 bits may cost a token of the text, by the exact model. Of a random token it is 5."""


class Reference:
    """The checkpoint in transformers, in float32."""

    def __init__(self, path: str | Path = PATH) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(PATH)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.prompts = [self.chat_ids(question) for question in QUESTIONS] + [
            self.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS
        ]

    def chat_ids(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def generate(self, prompt: list[int]) -> list[int]:
        """Return the tokens that follow, greedily. The last may be the end of the text."""
        outputs = self.model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
        return outputs[0, len(prompt) :].tolist()

    def nats(self, prompt: list[int], continued: list[int]) -> float:
        """Return how unlikely a token of the continuation is, on average."""
        with torch.inference_mode():
            logprobs_TV = self.model(torch.tensor([prompt + continued])).logits[0].log_softmax(-1)
        predicting = range(len(prompt) - 1, len(prompt) + len(continued) - 1)
        return -sum(float(logprobs_TV[i, token]) for i, token in zip(predicting, continued, strict=True)) / len(
            continued
        )


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    """Of ten chats, and of ten texts that go on."""
    return [reference.generate(prompt) for prompt in reference.prompts]


@pytest.fixture(scope="module")
def llm(ray_cluster) -> Iterator[LLM]:
    with LLM(PATH, enable_prefix_caching=True, **OPTIONS) as llm:
        yield llm


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_chats_and_completions_equal_those_of_transformers(llm: LLM, reference: Reference, expected) -> None:
    chats = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], GREEDY, use_tqdm=False)
    texts = llm.generate(TEXTS, GREEDY, use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in chats + texts] == reference.prompts
    assert tokens_of(chats + texts) == expected
    decoded = [reference.tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    assert [output.outputs[0].text for output in chats + texts] == decoded
    assert "Paris" in chats[0].outputs[0].text


def test_speculative_decoding_changes_no_token(ray_cluster, reference: Reference, expected) -> None:
    always = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [(1, 32, 4)]}
    drafts = {"method": "ngram", "prompt_lookup_min": 1, **always}
    with LLM(PATH, speculative_config=drafts, **OPTIONS) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in reference.prompts], GREEDY, use_tqdm=False)
        counts = llm.read_metrics().counts[0]
    assert tokens_of(outputs) == expected
    assert counts.num_accepted_tokens > 0


def test_text_ends_before_a_stop_string(llm: LLM, reference: Reference, expected) -> None:
    whole = [reference.tokenizer.decode(ids, skip_special_tokens=True) for ids in expected[:10]]
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in reference.prompts[:10]],
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, stop=[".", "\n"]),
        use_tqdm=False,
    )
    assert [output.outputs[0].text for output in outputs] == [
        text.partition("\n")[0].partition(".")[0] for text in whole
    ]


def test_a_json_schema_gives_an_output_that_parses_and_conforms(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "country": {"enum": ["France", "Italy"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(json=schema))
    question = "Name the capital of France, as JSON with city and country."
    output = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)[0].outputs[0]
    answer = json.loads(output.text)
    assert output.finish_reason == "stop"
    assert set(answer) == {"city", "country"}
    assert answer["country"] in ("France", "Italy")


def test_an_adapter_gives_the_tokens_of_merged_weights(
    ray_cluster, reference: Reference, expected, tmp_path: Path
) -> None:
    adapter, merged = save_demo_adapter(tmp_path, 1, PATH, lora_alpha=1)
    adapted = [Reference(merged).generate(prompt) for prompt in reference.prompts[:6]]
    prompts = [{"prompt_token_ids": ids} for ids in reference.prompts[:6]]
    request = LoRARequest("adapter", 1, str(adapter))
    with LLM(PATH, enable_lora=True, max_lora_rank=8, **OPTIONS) as llm:
        outputs = llm.generate(prompts * 2, GREEDY, lora_request=[request] * 6 + [None] * 6, use_tqdm=False)
    assert tokens_of(outputs) == adapted + expected[:6]
    assert adapted != expected[:6]


@pytest.mark.parametrize("pipeline_parallel_size", [1, 2])
def test_weights_in_8_bits_give_answers_almost_as_likely_as_the_exact_ones(
    ray_cluster, reference: Reference, expected, pipeline_parallel_size: int
) -> None:
    options = OPTIONS | {"pipeline_parallel_size": pipeline_parallel_size, "standby_delay_s": None}
    with LLM(PATH, quantization="int8", **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in reference.prompts], GREEDY, use_tqdm=False)
    for prompt, exact, rounded in zip(reference.prompts, expected, tokens_of(outputs), strict=True):
        assert reference.nats(prompt, rounded) < reference.nats(prompt, exact) + MOST_NATS_LOST
    assert "Paris" in outputs[0].outputs[0].text
