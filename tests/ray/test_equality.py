"""Greedy tokens equal transformers' own, token for token, whatever the parallel shape and whatever the scheduler does.

Two sweeps cover the product. Every shape (TP 1, 2, 4 x DP 1, 2 x one or two steps in flight) runs through `LLM` with a
dense family and one of experts, and TP 2 x DP 2 with every family, with a budget that forces chunking and a block count
that forces preemption. So do PP 2 x TP 2 and PP 2 x DP 2. Every family also runs through `EngineCore` on living workers
of TP 1 with every combination of prefix caching, budgets and block counts, and of TP 2 and 4 and PP 2 with every pair
of these, both with one step at a time and with two in flight (with stages, there are always two).
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import pytest
from families import FAMILIES, NUM_NEW_TOKENS, make_checkpoint, prompts, reference

from placement.reserve import RankBundles
from raycore import LLM, SamplingParams
from raycore.cache_layout import CacheLayout, LayerCacheSpec, divide_layers
from raycore.config import EngineConfig, resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.executor.ray_executor import RayExecutor
from raycore.messages import EngineRequest
from raycore.worker.rank import RankIdentity

# workers can't import a test module, so what they are to call travels whole
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)

CHUNKING_BUDGET = 24
PREEMPTING_BLOCKS = 12
"""Of 8 tokens: the longest request needs 8 of them, all together need 30. With several groups of layers, see `_few`."""
LONGEST = 50 + NUM_NEW_TOKENS - 1
"""Tokens of the longest request in the cache."""

COMBINATIONS = list(itertools.product((True, False), (CHUNKING_BUDGET, 2048), (PREEMPTING_BLOCKS, 200)))
PAIRS = [
    (caching, budget, blocks)
    for caching, budget, blocks in COMBINATIONS
    if caching == ((budget == CHUNKING_BUDGET) == (blocks == PREEMPTING_BLOCKS))
]
"""Some of the combinations, which together have every two of their values."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, tuple[Path, list[list[int]]]]:
    """Each family's checkpoint and transformers' continuations."""
    made = {}
    for family in FAMILIES:
        path = make_checkpoint(family, tmp_path_factory.mktemp("checkpoints"))
        made[family] = path, reference(path)
    return made


class LivingWorkers:
    """An executor whose workers outlive the engine: each engine has them load another model."""

    def __init__(self, executor, shape: dict[str, int]):
        self.executor = executor
        self.shape = shape

    def for_engine(self, config: EngineConfig) -> LivingWorkers:
        made = LivingWorkers(self.executor, self.shape)
        made.config = config
        made.max_concurrent_batches = config.max_steps_in_flight
        return made

    @property
    def num_shares(self) -> int:
        """How many workers have different tokens' keys and values of the same heads."""
        return self.shape["decode_context_parallel_size"] * self.shape["prefill_context_parallel_size"]

    def initialize(self, rendezvous=None, *, is_new=False):
        self.executor.collective_rpc(_reload, args=(self.config,))

    def shutdown(self):
        """The fixture's business."""

    def __getattr__(self, name):
        return getattr(self.executor, name)


def _reload(worker, config: EngineConfig) -> None:
    from raycore.worker.setup import set_up

    worker.config = config
    worker._setup = set_up(config, worker.rank)
    worker.load_model()


@pytest.fixture(scope="module")
def workers(request, ray_cluster, checkpoints):
    shape = dict(zip(SIZES_OF_WORKERS, request.param, strict=True))
    config = resolve(str(checkpoints["multi_query"][0]), dtype="float32", num_threads=1, max_num_seqs=8, **shape)
    size = config.parallel.world_size
    if size == 1:
        executor = InlineExecutor(config, RankIdentity(0, 1))
        group = None
    else:
        group = ray_cluster.util.placement_group([{"CPU": 1}] * size)
        executor = RayExecutor(config, RankIdentity(0, size), RankBundles(group, range(size)))
    executor.initialize()
    yield LivingWorkers(executor, shape)
    executor.shutdown()
    if group is not None:
        ray_cluster.util.remove_placement_group(group)


SIZES_OF_WORKERS = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "decode_context_parallel_size": "dcp",
    "prefill_context_parallel_size": "pcp",
}
CONTEXT_SHAPES = [(2, 1, 2, 1), (4, 1, 2, 1), (4, 1, 4, 1), (2, 2, 2, 1), (1, 1, 1, 2), (2, 1, 2, 2), (1, 2, 1, 2)]
CONTEXT_FAMILIES = {
    (4, 1, 2, 1): ("multi_query", "mistral", "ministral3", "mixtral", "gemma2", "gemma3", "gpt_oss"),
    (2, 1, 2, 1): ("multi_query", "deepseek_v3"),
    (2, 2, 2, 1): ("multi_query", "deepseek_v3"),
    (2, 1, 2, 2): ("multi_query", "deepseek_v3"),
    (1, 1, 1, 2): ("llama2", "mistral", "ministral3", "mixtral", "gemma2", "gpt_oss", "deepseek_v3"),
}
"""Of workers that hold different tokens' keys and values. The other shapes have only the first family here."""


def _workers_and_families() -> list[Any]:
    shapes = {(*shape, 1, 1): tuple(FAMILIES) for shape in [(1, 1), (2, 1), (4, 1), (1, 2)]}
    shapes |= {shape: CONTEXT_FAMILIES.get(shape, ("multi_query",)) for shape in CONTEXT_SHAPES}
    names = SIZES_OF_WORKERS.values()
    ids = {shape: "-".join(f"{name}{size}" for name, size in zip(names, shape, strict=True)) for shape in shapes}
    return [
        pytest.param(shape, family, id=f"{ids[shape]}-{family}")
        for shape, families in shapes.items()
        for family in families
    ]


@pytest.mark.parametrize("overlaps", [False, True], ids=["one step in flight for each stage", "one more"])
@pytest.mark.parametrize(("workers", "family"), _workers_and_families(), indirect=["workers"])
def test_every_schedule_gives_the_reference_tokens(workers, checkpoints, family, overlaps):
    path, expected = checkpoints[family]
    if not overlaps and workers.shape["pipeline_parallel_size"] > 1 and family not in ("llama2", "multi_query"):
        pytest.skip("one family shows it")
    for caching, budget, blocks in COMBINATIONS if set(workers.shape.values()) == {1} else PAIRS:
        scheduling = {
            "enable_prefix_caching": caching,
            "max_num_batched_tokens": budget,
            "num_gpu_blocks_override": blocks,
        }
        config = resolve(
            str(path),
            dtype="float32",
            **workers.shape,
            num_threads=1,
            max_num_seqs=8,
            block_size=8 // workers.num_shares,
            async_scheduling=overlaps,
            **scheduling,
        )
        if blocks == PREEMPTING_BLOCKS:
            config = _few(config)
        core = EngineCore(config, workers.for_engine(config))
        preempted = _count_preemptions(core)
        for _ in range(1 + scheduling["enable_prefix_caching"]):  # the second time finds prefixes
            assert _generate(core) == expected, scheduling
        core.scheduler.check_integrity()
        # otherwise this test would test less than it says
        is_tight = blocks == PREEMPTING_BLOCKS
        if is_tight and budget > CHUNKING_BUDGET and _layout(config).windows != [None]:
            continue  # a whole prompt takes as many blocks as all that run beside it once windows have freed theirs
        assert bool(preempted) == is_tight, scheduling


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
    found = _generate(EngineCore(config, executor), prompts()[: max(equal) + 1])
    executor.shutdown()
    assert [found[index] for index in equal] == [expected[index] for index in equal]
    assert all(found[index] != expected[index] for index in other)  # transformers gives short ones the short factors


def _layout(config: EngineConfig) -> CacheLayout:
    windows = config.model.spec.layer_windows
    layers = [LayerCacheSpec("full" if window is None else "window", 1, window) for window in windows]
    return divide_layers(layers, config.cache_limits)


def _few(config: EngineConfig) -> EngineConfig:
    """The configuration with so few blocks that requests are preempted: with windows, just enough for the longest one.

    Then they need more blocks while they are short, and are rarely preempted.
    """
    layout = _layout(config)
    num_blocks = PREEMPTING_BLOCKS if layout.windows == [None] else layout.num_blocks_for(LONGEST)
    cache = msgspec.structs.replace(config.cache, num_gpu_blocks_override=num_blocks)
    return msgspec.structs.replace(config, cache=cache)


def _generate(core: EngineCore, all_prompts: list[list[int]] | None = None) -> list[list[int]]:
    all_prompts = all_prompts or prompts()
    tokens: list[list[int]] = [[] for _ in all_prompts]
    for seq_id, prompt in enumerate(all_prompts):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, PARAMS, seed=0))
    while core.has_work():
        outputs = core.step()
        if outputs is not None:
            for seq_id, token in zip(outputs.seq_ids.tolist(), outputs.token_ids.tolist(), strict=True):
                tokens[seq_id].append(token)
    return tokens


def _count_preemptions(core: EngineCore) -> list[int]:
    """A list that grows by an entry for each preemption: a request that comes to the workers with output."""
    preemptions: list[int] = []
    execute = core.executor.execute

    def counting(plan):
        has_output = (len(request.token_ids) // 4 > request.num_prompt_tokens for request in plan.new_requests)
        preemptions.extend(1 for _ in filter(None, has_output))
        return execute(plan)

    core.executor.execute = counting
    return preemptions


@pytest.fixture(scope="module")
def living_llm(request, ray_cluster, checkpoints):
    """An `LLM` of a shape, which families take turns in. Its schedulers know whether the model's layers keep states."""
    shape, base = request.param
    with LLM(str(checkpoints[base][0]), **_shape(*shape)) as llm:
        yield llm, shape


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
    from raycore.cache_layout import KVCacheConfig, divide_layers
    from raycore.worker.cache_specs import layer_cache_specs

    _reload(worker, config)
    # the engine goes on with the groups of the model that it has started with: one
    limits = msgspec.structs.replace(config.cache_limits, frees_windows=False)
    layers = layer_cache_specs(worker._setup, range(config.model.spec.num_layers))
    worker.initialize_cache(KVCacheConfig(PREEMPTING_BLOCKS, divide_layers(layers, limits)))


SHAPES = [*itertools.product((1, 2, 4), (1, 2), (False, True)), (2, 1, True, 2), (1, 2, True, 2)]
SHAPES_OF_ALL_FAMILIES = [(2, 2, False), (2, 2, True)]
STATEFUL = [family for family in FAMILIES if family.startswith(("qwen3_next", "qwen3_5", "granitemoehybrid"))]
BASES = {"llama2": [family for family in FAMILIES if family not in STATEFUL], "qwen3_next": STATEFUL}


@pytest.mark.parametrize(
    ("living_llm", "family"),
    [
        pytest.param((shape, base), family, id="tp{}-dp{}-{}-pp{}-{}".format(*(*shape, 1)[:4], family))
        for shape in SHAPES
        for base, families in BASES.items()
        for family in families
        if shape in SHAPES_OF_ALL_FAMILIES or family in ("llama3", "mixtral", "qwen3_next")
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
