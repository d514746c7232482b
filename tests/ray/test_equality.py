"""Greedy tokens equal transformers' own, token for token, whatever the parallel shape and whatever the scheduler does.

Every family runs through `EngineCore` on living workers: of TP 1 with every three of the values of prefix caching,
budgets, block counts, and one or two steps in flight; of TP 2 and 4 and PP 2 with what `combinations_of` gives. Shapes
of several ranks run through `LLM`, with a dense family, one of experts, and one with states, a budget that forces
chunking and a block count that forces preemption.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cloudpickle
import msgspec
import pytest
from equality import (
    CHUNKING_BUDGET,
    PARAMS,
    PREEMPTING_BLOCKS,
    Lasting,
    check_every_schedule,
    every_schedule,
    generate,
    reload,
)
from families import make_checkpoint, prompts, reference

from raycore import LLM
from raycore.cache_layout import divide_layers
from raycore.config import EngineConfig, resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.worker.rank import RankIdentity

# workers can't import a test module, so what they are to call travels whole
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@every_schedule((1, 1, 1, 1))
def test_every_schedule_gives_the_reference_tokens(workers, checkpoints, family, overlaps):
    check_every_schedule(workers, checkpoints, family, overlaps)


@pytest.mark.parametrize(
    ("max_model_len", "equal", "other"),
    [(28, range(3), range(0)), (None, range(3, 6), range(3))],
    ids=["short", "long"],
)
def test_long_rope_uses_the_factors_of_the_engines_maximum_length(tmp_path, max_model_len, equal, other):
    path = make_checkpoint("phi3_longrope", tmp_path)
    config_file = path / "config.json"
    fields = json.loads(config_file.read_text())
    fields["rope_parameters"].pop("original_max_position_embeddings")
    # the third prompt and its continuation have as many tokens, and the prompts after it have more
    config_file.write_text(json.dumps(fields | {"original_max_position_embeddings": 28}))
    expected = reference(path)
    config = resolve(str(path), dtype="float32", num_threads=1, max_num_seqs=8, max_model_len=max_model_len)
    executor = InlineExecutor(config, RankIdentity(0, 1))
    found = generate(EngineCore(config, executor), prompts()[: max(equal) + 1])
    executor.shutdown()
    assert [found[index] for index in equal] == [expected[index] for index in equal]
    assert all(found[index] != expected[index] for index in other)  # transformers gives short ones the short factors


@pytest.fixture(scope="module")
def living_llms(ray_cluster, checkpoints):
    """By shape and base: an `LLM`, which families take turns in.

    Its schedulers know whether the model's layers keep states.
    """
    with Lasting(lambda key: LLM(str(checkpoints[key[1]][0]), **_shape(*key[0]))) as llms:
        yield llms


@pytest.fixture
def living_llm(request, living_llms):
    shape, _ = request.param
    return living_llms.of(request.param), shape


def _shape(tp: int, dp: int, overlaps: bool, pp: int = 1) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "async_scheduling": overlaps,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "data_parallel_size": dp,
        "num_threads": 1,
        "max_num_seqs": 8,
        "block_size": 8,
        "max_num_batched_tokens": CHUNKING_BUDGET,
        "num_gpu_blocks_override": PREEMPTING_BLOCKS,
        "standby_delay_s": None,
    }


def _become(worker, config: EngineConfig) -> None:
    from raycore.cache_layout import KVCacheConfig
    from raycore.worker.cache_specs import layer_cache_specs

    reload(worker, config)
    # the engine goes on with the groups of the model that it has started with: one
    limits = msgspec.structs.replace(config.cache_limits, frees_windows=False)
    layers = layer_cache_specs(worker._core.setup, range(config.model.spec.num_layers))
    worker.initialize_cache(KVCacheConfig(PREEMPTING_BLOCKS, divide_layers(layers, limits)))


SHAPES = {
    "llama2": [(1, 2, True), (2, 2, False), (4, 2, True), (2, 1, True, 2), (1, 2, True, 2)],
    "qwen3_next": [(1, 2, True), (2, 2, False), (4, 2, True), (1, 2, True, 2)],
}
"""By base. What one rank's worker computes is compared above, and what two or four compute in files of their own."""
FAMILIES_OF_BASES = {"llama2": ("llama3", "mixtral"), "qwen3_next": ("qwen3_next",)}
KINDS = {
    "llama2": ("gemma3", "gpt_oss", "deepseek_v3", "glm_moe_dsa"),
    "qwen3_next": ("qwen3_5_moe", "granitemoehybrid", "kimi_linear", "falcon_h1", "minimax", "jamba"),
}
"""More families, whose layers keep other things."""
SHAPE_OF_ALL_KINDS = (2, 2, False)


@pytest.mark.parametrize(
    ("living_llm", "family"),
    [
        pytest.param((shape, base), family, id="tp{}-dp{}-{}-pp{}-{}".format(*(*shape, 1)[:4], family))
        for base, families in FAMILIES_OF_BASES.items()
        for shape in SHAPES[base]
        for family in (*families, *(KINDS[base] if shape == SHAPE_OF_ALL_KINDS else ()))
    ],
    indirect=["living_llm"],
)
def test_every_shape_gives_the_reference_tokens(living_llm, checkpoints, family):
    llm, shape = living_llm
    path, expected = checkpoints[family]
    assert llm.reset_prefix_cache()
    config = resolve(str(path), **_shape(*shape))
    assert len(llm.collective_rpc(_become, args=(config,))) == config.parallel.world_size * shape[1]
    for _ in range(2):  # the second time finds prefixes
        outputs = llm.generate(prompts(), PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
