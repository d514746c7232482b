"""Engines whose workers hold different tokens' keys and values. `test_equality.py` compares their schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting_checkpoints import (
    STEP,
    VOCAB,
    head_config,
    random_head,
    write_checkpoint,
    write_counting_head,
    write_counting_target,
)
from equality import Checkpoints
from families import FAMILIES, NUM_NEW_TOKENS, VOCAB_SIZE, make_checkpoint, prompts, reference
from faults import signal_in_step
from native_kernels import needs_kernels
from number_formats import BATCH_INVARIANT
from peft_adapters import save_demo_adapter
from safetensors.torch import load_file

from raycore import LLM, InvalidConfig, SamplingParams
from raycore.lora.request import LoRARequest

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
WITH_LOGPROBS = [
    SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.95, seed=5, max_tokens=8, logprobs=2, ignore_eos=True),
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
SHAPES = [
    {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    {"prefill_context_parallel_size": 2},
]
IDS = ["dcp", "pcp"]


@pytest.fixture
def checkpoint(checkpoints: Checkpoints) -> Path:
    return checkpoints["multi_query"][0]


@pytest.fixture
def expected(checkpoints: Checkpoints) -> list[list[int]]:
    return checkpoints["multi_query"][1]


def start(checkpoint: Path, **options: Any) -> LLM:
    options = {"dtype": "float32", "num_threads": 1, "block_size": 4, "max_num_seqs": 8} | options
    return LLM(str(checkpoint), **options)


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_requests_of_a_killed_worker_go_on_with_the_reference_tokens(ray_cluster, checkpoint, expected, shape) -> None:
    with start(checkpoint, num_gpu_blocks_override=30, **shape) as llm:
        (info,) = llm.engine_infos
        # a block has 4 tokens of each of two workers
        assert (info.block_size, info.num_kv_tokens, len(info.worker_pids)) == (8, 240, 2)
        assert tokens_of(llm) == expected
        # whole blocks of the prompts are found again
        again = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in again] == [(len(ids) - 1) // 8 * 8 for ids in prompts()]
        signal_in_step(llm, 0, info.worker_pids[1], 5)
        assert tokens_of(llm) == expected
        assert llm.engine_infos[0].worker_pids != info.worker_pids


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_guesses_ranks_and_sleep_keep_the_reference_tokens(ray_cluster, checkpoint, expected, shape) -> None:
    options = {"speculative_config": NGRAM, "data_parallel_size": 2, "standby_delay_s": None}
    with start(checkpoint, **options, **shape) as llm:
        assert tokens_of(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        assert tokens_of(llm) == expected


DRAFTING = [
    ("ngram", SHAPES[0], True),
    ("suffix", SHAPES[1], True),
    ("suffix", SHAPES[0], False),
    ("draft_model", SHAPES[0], False),
    ("draft_model", SHAPES[1], True),
    ("a draft model of one rank", SHAPES[0] | SHAPES[1], True),
    ("eagle3", SHAPES[0], True),
    ("eagle3", SHAPES[1], False),
    ("eagle3", SHAPES[1] | {"pipeline_parallel_size": 2}, True),
]
"""How tokens are guessed, on which workers, and whether steps are in flight meanwhile."""


@pytest.mark.parametrize(
    ("method", "shape", "is_async"), DRAFTING, ids=[f"{method}, {'-'.join(shape)}" for method, shape, _ in DRAFTING]
)
def test_all_ways_of_drafting_keep_the_reference_tokens(
    ray_cluster, checkpoint, expected, tmp_path, method, shape, is_async
) -> None:
    head = head_config(64, VOCAB_SIZE, eagle_aux_hidden_state_layer_ids=[0, 1])
    settings = {
        "ngram": NGRAM | {"prompt_lookup_min": 1},
        "suffix": {"method": "suffix"},
        "draft_model": {"model": str(checkpoint)},
        "a draft model of one rank": {"model": str(checkpoint), "draft_tensor_parallel_size": 1},
    }
    speculative = settings.get(method) or {"model": str(write_checkpoint(tmp_path / "head", head, random_head(head)))}
    always = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 4, 3)]}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 12}
    with start(
        checkpoint, speculative_config=always | speculative, async_scheduling=is_async, **limits, **shape
    ) as llm:
        assert tokens_of(llm) == expected
        assert tokens_of(llm) == expected, "with cached prefixes"
        counts = llm.read_metrics().counts[0]
        assert counts.num_draft_tokens
        if speculative.get("model") == str(checkpoint):
            assert counts.num_accepted_tokens > 0.9 * counts.num_draft_tokens, "the model drafts its own tokens"
        signal_in_step(llm, 0, llm.engine_infos[0].worker_pids[-1], 5)
        assert tokens_of(llm) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_a_head_gets_the_hidden_states_of_all_workers(ray_cluster, tmp_path, shape) -> None:
    target, head = write_counting_target(tmp_path / "target", 1), write_counting_head(tmp_path / "head")
    always = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [(1, 4, 4)]}
    options = {"speculative_config": {"model": str(head)} | always, "max_model_len": 128, "standby_delay_s": None}
    with start(target, **options, **shape) as llm:
        prompts = [[*range(9, 9 + length), first] for length, first in ((40, 3), (1, 50))]
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], GREEDY, use_tqdm=False)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        counts = llm.read_metrics().counts[0]
    steps = range(STEP, STEP * (NUM_NEW_TOKENS + 1), STEP)
    assert found == [[(prompt[-1] + offset) % VOCAB for offset in steps] for prompt in prompts]
    assert counts.num_accepted_tokens > 0.5 * counts.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        pytest.param(*mode.values, SHAPES[index % 2], id=mode.id, marks=mode.marks)
        for index, mode in enumerate(BATCH_INVARIANT)
    ],
)
def test_batched_requests_give_the_same_bits_as_each_request_alone(ray_cluster, checkpoint, shape, mode) -> None:
    limits = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 12, "standby_delay_s": None}
    with start(checkpoint, **limits, **mode, **shape) as llm:
        for params in WITH_LOGPROBS:
            alone = [outcome(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt in prompts()]
            assert [outcome(output) for output in llm.generate(prompts(), params, use_tqdm=False)] == alone


def outcome(output: Any) -> Any:
    """Tokens and all log probabilities; `==` on floats is equality of bits."""
    return output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs


@needs_kernels
def test_an_8_bit_cache_may_be_divided(ray_cluster, checkpoint) -> None:
    options = {"kv_cache_dtype": "int8_per_token_head", "standby_delay_s": None}
    with start(checkpoint, tensor_parallel_size=2, **options) as llm:
        expected = tokens_of(llm)
    with start(checkpoint, **SHAPES[0], **options) as llm:
        assert tokens_of(llm) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_adapters_give_the_tokens_of_merged_weights(ray_cluster, checkpoint, expected, shape, tmp_path) -> None:
    path, merged = save_demo_adapter(tmp_path, 1, checkpoint)
    adapter = LoRARequest("a", 1, str(path))
    limits = {"enable_lora": True, "max_num_batched_tokens": 40, "standby_delay_s": None}
    with start(checkpoint, **limits, **shape) as llm:
        # rows with and without an adapter are in the same steps
        chosen = [None, adapter] * len(prompts())
        twice = [prompt for prompt in prompts() for _ in range(2)]
        outputs = llm.generate(twice, GREEDY, use_tqdm=False, lora_request=chosen)
        found = [output.outputs[0].token_ids for output in outputs]
        assert (found[::2], found[1::2]) == (expected, reference(merged))


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_hidden_states_and_log_probabilities_are_those_of_one_worker(ray_cluster, checkpoint, shape) -> None:
    states = {"return_hidden_states": True, "return_prompt_hidden_states": True}
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=1, ignore_eos=True, **states)
    with start(checkpoint, standby_delay_s=None) as llm:
        expected = llm.generate(prompts(), params, use_tqdm=False)
    with start(checkpoint, standby_delay_s=None, max_num_batched_tokens=40, **shape) as llm:
        found = llm.generate(prompts(), params, use_tqdm=False)
    for one, other in zip(found, expected, strict=True):
        assert np.allclose(one.prompt_hidden_states, other.prompt_hidden_states, atol=1e-4)
        assert np.allclose(one.outputs[0].hidden_states, other.outputs[0].hidden_states, atol=1e-4)
        assert np.allclose(_logprobs(one), _logprobs(other), atol=1e-4)


def _logprobs(output: Any) -> list[float]:
    """Those of the prompt's tokens and of the output's."""
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    ids = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
    return [position[token_id].logprob for position, token_id in zip(positions, ids, strict=True)]


def test_saved_shares_of_the_weights_are_those_of_tensor_parallelism(ray_cluster, checkpoint, expected, tmp_path):
    with start(checkpoint, standby_delay_s=None, **SHAPES[1]) as llm:
        llm.save_sharded_state(tmp_path / "saved")
    # one of the two workers writes the share that both have
    assert len([*(tmp_path / "saved").glob("*.safetensors")]) == 1
    with start(tmp_path / "saved", standby_delay_s=None, load_format="sharded_state", **SHAPES[1]) as llm:
        assert tokens_of(llm) == expected


@pytest.fixture
def latents(checkpoints: Checkpoints) -> Path:
    return checkpoints["deepseek_v3"][0]


@pytest.fixture
def expected_of_latents(checkpoints: Checkpoints) -> list[list[int]]:
    return checkpoints["deepseek_v3"][1]


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        *((shape, backend) for shape in SHAPES for backend in ("auto", "torch")),
        ({"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, "auto"),
        (SHAPES[0] | {"pipeline_parallel_size": 2}, "auto"),
        (SHAPES[0] | {"enable_expert_parallel": True}, "auto"),
    ],
    ids=[*(f"{name}, {backend}" for name in IDS for backend in ("auto", "torch")), "half", "stages", "experts"],
)
def test_divided_latents_give_the_reference_tokens(ray_cluster, latents, expected_of_latents, shape, backend) -> None:
    limits = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 40, "standby_delay_s": None}
    with start(latents, attention_backend=backend, **limits, **shape) as llm:
        (info,) = llm.engine_infos
        assert (info.block_size, info.num_kv_tokens) == (8, 240)
        assert tokens_of(llm) == expected_of_latents
        assert tokens_of(llm) == expected_of_latents, "with cached prefixes"


# every two of the values: a backend sums the same scores in each shape
@pytest.mark.parametrize(
    ("dtype", "backend", "shape"),
    [
        ("float32", "auto", SHAPES[0]),
        ("float32", "torch", SHAPES[1]),
        ("bfloat16", "auto", SHAPES[1]),
        ("bfloat16", "torch", SHAPES[0]),
    ],
)
def test_latents_of_batched_requests_give_the_same_bits_as_each_request_alone(
    ray_cluster, latents, shape, dtype, backend
) -> None:
    options = {"batch_invariant": True, "dtype": dtype, "attention_backend": backend, "standby_delay_s": None}
    with start(latents, max_num_batched_tokens=24, num_gpu_blocks_override=12, **options, **shape) as llm:
        for params in WITH_LOGPROBS:
            alone = [outcome(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt in prompts()]
            assert [outcome(output) for output in llm.generate(prompts(), params, use_tqdm=False)] == alone


def test_engines_that_share_experts_divide_contexts(ray_cluster, tmp_path, monkeypatch) -> None:
    toy = FAMILIES["mixtral"]
    monkeypatch.setitem(FAMILIES, "mixtral", toy._replace(settings={**toy.settings, "num_key_value_heads": 1}))
    path = make_checkpoint("mixtral", tmp_path)
    shape = SHAPES[0] | {"data_parallel_size": 2, "enable_expert_parallel": True}
    with start(path, standby_delay_s=None, **shape) as llm:
        assert tokens_of(llm) == reference(path)
    with pytest.raises(
        InvalidConfig, match="prefill_context_parallel_size=2 can't be used with enable_expert_parallel"
    ):
        start(path, enable_expert_parallel=True, **SHAPES[1])


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_embeddings_of_prompts_are_computed_as_their_tokens(ray_cluster, checkpoint, expected, shape) -> None:
    rows_VD = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    given = [{"prompt_embeds": rows_VD[ids]} for ids in prompts()]
    limits = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 12, "standby_delay_s": None}
    with start(checkpoint, enable_prompt_embeds=True, **limits, **shape) as llm:
        outputs = llm.generate([*given, *prompts()], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected * 2


@pytest.mark.parametrize(
    ("shape", "is_async"), [(SHAPES[0] | {"enable_expert_parallel": True}, True), (SHAPES[1], False)], ids=IDS
)
def test_states_drafts_and_experts_go_together(ray_cluster, tmp_path, monkeypatch, shape, is_async) -> None:
    toy = FAMILIES["qwen3_next"]
    monkeypatch.setitem(FAMILIES, "qwen3_next", toy._replace(settings={**toy.settings, "num_key_value_heads": 1}))
    path = make_checkpoint("qwen3_next", tmp_path)
    expected = reference(path)
    guesses = {"speculative_config": NGRAM | {"prompt_lookup_min": 1}, "async_scheduling": is_async}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "mamba_block_size": 16, "num_gpu_blocks_override": 12}
    with start(path, **guesses, **limits, **shape) as llm:
        for _ in range(2):
            assert tokens_of(llm) == expected
        counts = llm.read_metrics().counts[0]
        assert counts.num_cached_prompt_tokens
        assert counts.num_draft_tokens
        signal_in_step(llm, 0, llm.engine_infos[0].worker_pids[1], 5)
        assert tokens_of(llm) == expected
    with pytest.raises(InvalidConfig, match=r"=20 isn't a multiple of block_size=4 times the 2 workers"):
        start(path, **limits | {"mamba_block_size": 20}, **shape)
