"""Prompts of embeddings, in one engine: those of tokens give what the tokens give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from raycore.client.inputs import OnlyText, ParsedPrompt, parse_prompts
from raycore.client.prompt_embeds import PromptEmbeds
from raycore.config import EngineConfig, resolve
from raycore.demo import demo_model_path
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer
from raycore.worker.rank import RankIdentity

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LENGTHS = 7, 150, 300, 250, 251


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


@pytest.fixture(scope="module")
def rows() -> Any:
    """[V, D]: the embeddings of all tokens."""
    (file,) = Path(demo_model_path()).glob("*.safetensors")
    return load_file(file)["model.embed_tokens.weight"]


def prompt_ids(length: int) -> list[int]:
    return [(7 * index * index + 3 * index + length) % 200 + 20 for index in range(length)]


class Engine:
    """Submits prompts, and runs steps until they have ended."""

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        sizes = {
            "dtype": "float32",
            "num_threads": 1,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "block_size": 16,
        }
        self.config: EngineConfig = resolve(demo_model_path(), enable_prompt_embeds=True, **(sizes | options))
        self.core = EngineCore(self.config, InlineExecutor(self.config, RankIdentity(0, 1)))
        self.tokenizer = tokenizer
        self._next = 0

    def parse(self, prompts: list[Any]) -> list[ParsedPrompt]:
        return parse_prompts(prompts, self.tokenizer, images=OnlyText("demo", PromptEmbeds(self.config)))

    def generate(self, prompts: list[Any], **more: Any) -> list[list[int]]:
        first = self._next
        for prompt in self.parse(prompts):
            seq_id, self._next = self._next, self._next + 1
            features = {"features": [*prompt.features], "feature_data": [*prompt.feature_data]}
            request = EngineRequest(seq_id, str(seq_id), prompt.token_ids, GREEDY, seed=0, **features, **more)
            assert not self.core.submit(request)
        outputs: list[list[int]] = [[] for _ in prompts]
        while self.core.has_work():
            step = self.core.step()
            if step is not None:
                for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
                    outputs[seq_id - first].append(token)
        return outputs


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer) -> list[list[int]]:
    engine = Engine(tokenizer)
    tokens = engine.generate([prompt_ids(length) for length in LENGTHS])
    engine.core.shutdown()
    assert len({tuple(each) for each in tokens}) == len(tokens), "prompts should matter"
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 20, "max_num_seqs": 2},
        {"attention_backend": "torch", "enable_prefix_caching": False},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"model_impl": "transformers"},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()) or "default",
)
def test_embeddings_of_tokens_give_what_the_tokens_give(
    tokenizer: Tokenizer, rows: Any, expected: list[list[int]], options: dict[str, Any]
) -> None:
    engine = Engine(tokenizer, **options)
    embeds = [{"prompt_embeds": rows[prompt_ids(length)]} for length in LENGTHS]
    assert engine.generate(embeds) == expected
    engine.core.scheduler.check_integrity()
    engine.core.shutdown()


def test_cached_prefixes_are_shared_with_the_same_embeddings_only(
    tokenizer: Tokenizer, rows: Any, expected: list[list[int]]
) -> None:
    engine = Engine(tokenizer)
    embeds = {"prompt_embeds": rows[prompt_ids(300)]}
    assert engine.generate([embeds]) == expected[2:3]
    hits = engine.core.load().prefix_cache_hits
    assert engine.generate([embeds]) == expected[2:3]
    assert engine.core.load().prefix_cache_hits == hits + 288
    # other embeddings of the same shape, whose placeholders are the same tokens
    engine.generate([{"prompt_embeds": rows[[each + 1 for each in prompt_ids(300)]]}])
    assert engine.core.load().prefix_cache_hits == hits + 288
    # the beginning is shared by whole pieces of 128 tokens
    engine.generate([{"prompt_embeds": rows[prompt_ids(300)[:200] + [9] * 100]}])
    assert engine.core.load().prefix_cache_hits == hits + 288 + 128
    engine.core.shutdown()


def test_preempted_and_moved_requests_give_the_same_tokens(
    tokenizer: Tokenizer, rows: Any, expected: list[list[int]]
) -> None:
    engine = Engine(tokenizer, num_gpu_blocks_override=129, block_size=4, max_num_batched_tokens=512)
    embeds = [{"prompt_embeds": rows[prompt_ids(length)]} for length in (250, 251)]
    assert engine.generate(embeds) == expected[3:]
    assert engine.core.load().num_preemptions > 0
    # as after the death of another rank, which has generated some tokens
    assert engine.generate(embeds[:1], output_token_ids=expected[3][:5]) == [expected[3][5:]]
    engine.core.shutdown()


def test_tokens_count_where_the_mask_says_so(tokenizer: Tokenizer, rows: Any, expected: list[list[int]]) -> None:
    engine = Engine(tokenizer)
    ids = prompt_ids(150)
    is_token = [10 <= index < 40 or index >= 140 for index in range(150)]
    wrong = rows[ids].clone()
    wrong[is_token] = 0.5
    mixed = {"prompt_embeds": wrong, "prompt_token_ids": ids, "prompt_is_token_ids": is_token}
    assert engine.generate([mixed]) == expected[1:2]
    assert engine.generate([mixed | {"prompt_is_token_ids": None}]) != expected[1:2]
    engine.core.shutdown()
