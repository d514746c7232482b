"""The experts that an engine returns are those that the routers choose, whatever becomes of requests and steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import auto_class, make_checkpoint, prompts
from torch import Tensor
from transformers import AutoConfig

from raycore.client.output_parts import make_output_parts
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest, LoadView
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3"]
NUM_NEW_TOKENS = 20
ALWAYS_DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "num_speculative_tokens_per_batch_size": [(1, 256, 3)],
}
"""Whether that pays or not, which depends on how long steps take."""
Ids = np.ndarray[Any, Any]


def run(path: Path, texts: list[list[int]], **options: Any) -> tuple[list[list[int]], list[Ids | None], LoadView]:
    """What an engine makes of prompts: tokens, experts, and its load at the end."""
    options = {"enable_return_routed_experts": True} | options
    config = resolve(path, dtype="float32", num_threads=1, max_model_len=64, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    parts = [part for part in make_output_parts(config) if part.is_asked(params)]
    added = [{part.name: part.begin(params) for part in parts} for _ in texts]
    tokens: list[list[int]] = [[] for _ in texts]
    for seq_id, text in enumerate(texts):
        core.submit(EngineRequest(seq_id, str(seq_id), text, params, seed=0))
    while core.has_work():
        step = core.step()
        if step is None:
            continue
        for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
            tokens[seq_id].append(token)
        for seq_id, report in step.reports:
            added[seq_id][report.part].take(0, report)
        core.scheduler.check_integrity()
    load = core.load()
    core.shutdown()
    outputs = [CompletionOutput(0, "", output, finish_reason="length") for output in tokens]
    for text, output, additions in zip(texts, outputs, added, strict=True):
        for addition in additions.values():
            addition.add_to(RequestOutput("r", None, text, None, [output], finished=True))
    return tokens, [output.routed_experts for output in outputs], load


def expected(path: Path, texts: list[list[int]], tokens: list[list[int]]) -> list[Ids]:
    """The choices of the routers for transformers' hidden states, in plain torch."""
    config = AutoConfig.from_pretrained(path)
    network = auto_class(config).from_pretrained(path, dtype=torch.float32)
    chosen: dict[int, Ids] = {}

    def note(layer: int, gate: Any) -> Callable[..., None]:
        def hook(_: object, args: tuple[Tensor, ...]) -> None:
            hidden_TD = args[0].reshape(-1, args[0].shape[-1])
            chosen[layer] = choice(config, hidden_TD @ gate.weight.T, gate).numpy()

        return hook

    for name, module in network.named_modules():
        if name.endswith(".gate") and "layers." in name:
            layer = int(name.partition("layers.")[2].partition(".")[0])
            module.register_forward_pre_hook(note(layer, module))
    found: list[Ids] = []
    for text, output in zip(texts, tokens, strict=True):
        chosen.clear()
        with torch.inference_mode():
            network(torch.tensor([text + output[:-1]]))
        ids = np.zeros((len(text) + len(output) - 1, config.num_hidden_layers, config.num_experts_per_tok), np.uint16)
        for layer, ids_TK in chosen.items():
            ids[:, layer] = ids_TK
        found.append(ids)
    return found


def choice(config: Any, logits_TE: Tensor, gate: Any) -> Tensor:
    if config.model_type != "deepseek_v3":
        return logits_TE.topk(config.num_experts_per_tok).indices
    scores_TE = logits_TE.sigmoid() + gate.e_score_correction_bias
    by_group_TGE = scores_TE.view(len(scores_TE), config.n_group, -1)
    groups = by_group_TGE.topk(2).values.sum(-1).topk(config.topk_group).indices
    is_in_TG = torch.zeros(by_group_TGE.shape[:2]).scatter_(1, groups, 1.0).bool()
    allowed_TE = by_group_TGE.masked_fill(~is_in_TG.unsqueeze(-1), -torch.inf).view_as(scores_TE)
    return allowed_TE.topk(config.num_experts_per_tok).indices


def check(found: list[Ids | None], expected: list[Ids], dtype: type = np.uint8) -> None:
    for own, each in zip(found, expected, strict=True):
        assert own is not None
        assert own.dtype == dtype
        np.testing.assert_array_equal(own, each)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_are_those_of_a_direct_computation(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    texts = [prompt[:12] for prompt in prompts()[:3]]
    tokens, found, _ = run(path, texts)
    wanted = expected(path, texts, tokens)
    assert any(ids.any() for ids in wanted)
    check(found, wanted)


def test_ids_of_many_experts_have_two_bytes(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path, num_experts=300)
    texts = [prompt[:12] for prompt in prompts()[:3]]
    tokens, found, _ = run(path, texts)
    wanted = expected(path, texts, tokens)
    assert max(int(ids.max()) for ids in wanted) > 255
    check(found, wanted, np.uint16)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 12, "block_size": 8},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_gpu_blocks_override": 12, "block_size": 8},
        {"speculative_config": ALWAYS_DRAFTS},
        {"speculative_config": ALWAYS_DRAFTS, "async_scheduling": True},
        {
            "speculative_config": ALWAYS_DRAFTS,
            "async_scheduling": True,
            "num_gpu_blocks_override": 12,
            "block_size": 8,
        },
        {"enable_prefix_caching": False},
    ],
    ids=["chunks", "preemptions", "steps in flight", "both", "drafts", "drafts in flight", "all", "no prefix cache"],
)
def test_they_survive_what_happens_to_requests(options: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint("mixtral", tmp_path)
    texts = [prompt[:20] for prompt in prompts()[:4]]
    tokens, found, load = run(path, texts, **options)
    check(found, expected(path, texts, tokens))
    assert (load.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    if "speculative_config" in options:
        assert load.drafts.num_draft_tokens > sum(load.drafts.accepted_per_position), "some were wrong"


@pytest.mark.parametrize("is_async", [False, True])
def test_those_of_cached_prefixes_are_the_same_as_without_the_cache(is_async: bool, tmp_path: Path) -> None:
    path = make_checkpoint("mixtral", tmp_path)
    shared = [5 + 7 * index % 19 for index in range(24)]
    texts = [shared + [5 + index] * index for index in range(1, 5)] + [[*shared, 6]]
    options = {"block_size": 8, "max_num_seqs": 2, "async_scheduling": is_async}
    tokens, found, load = run(path, texts, **options)
    assert load.prefix_cache_hits > 0
    plain_tokens, plain, _ = run(path, texts, **options, enable_prefix_caching=False)
    assert tokens == plain_tokens
    check(found, [ids for ids in plain if ids is not None])
    check(found, expected(path, texts, tokens))


@pytest.mark.parametrize("block_size", [8, 16])
def test_those_of_prefixes_are_kept_where_all_layers_have_windows(block_size: int, tmp_path: Path) -> None:
    path = make_checkpoint("mixtral", tmp_path, sliding_window=9)
    shared = [5 + 7 * index % 19 for index in range(32)]
    texts = [[*shared[: 8 * index], 5 + index] for index in (1, 4, 3, 4, 4)]
    tokens, found, load = run(path, texts, block_size=block_size, max_num_seqs=1)
    assert load.prefix_cache_hits > 0
    check(found, expected(path, texts, tokens))


def test_without_the_option_nothing_is_noted(tmp_path: Path) -> None:
    tokens, found, _ = run(make_checkpoint("mixtral", tmp_path), [[5, 6, 7]], enable_return_routed_experts=False)
    assert (len(tokens[0]), found) == (NUM_NEW_TOKENS, [None])
