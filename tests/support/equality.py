"""Greedy tokens that equal transformers' own, on workers that several families take turns on."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import cloudpickle
import msgspec
import pytest
from families import FAMILIES, NUM_NEW_TOKENS, make_checkpoint, prompts, reference

from placement.reserve import RankBundles
from raycore import SamplingParams
from raycore.cache_layout import CacheLayout, LayerCacheSpec, divide_layers
from raycore.config import EngineConfig, resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.executor.ray_executor import RayExecutor
from raycore.messages import EngineRequest
from raycore.worker.rank import RankIdentity

K = TypeVar("K")
T = TypeVar("T")

# workers can't import a test module, so what they are to call travels whole
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)

CHUNKING_BUDGET = 24
PREEMPTING_BLOCKS = 12
"""Of 8 tokens: the longest request needs 8 of them, all together need 30. With several groups of layers, see `few`."""
LONGEST = 50 + NUM_NEW_TOKENS - 1
"""Tokens of the longest request in the cache."""

COMBINATIONS = list(itertools.product((True, False), (CHUNKING_BUDGET, 2048), (PREEMPTING_BLOCKS, 200)))
PAIRS = [
    (caching, budget, blocks)
    for caching, budget, blocks in COMBINATIONS
    if caching == ((budget == CHUNKING_BUDGET) == (blocks == PREEMPTING_BLOCKS))
]
"""Half of the combinations: with the other half, for which the steps in flight differ, they have every three values."""
CORNERS = [(True, CHUNKING_BUDGET, PREEMPTING_BLOCKS), (False, 2048, 200)]
"""Everything that makes a request's steps differ from those of a whole prompt alone, and nothing of it."""
NEXT_TO_CORNERS = [
    (False, CHUNKING_BUDGET, PREEMPTING_BLOCKS),
    (True, 2048, PREEMPTING_BLOCKS),
    (True, CHUNKING_BUDGET, 200),
]
"""With more steps in flight than for the corners, these and the corners have every two of all four values."""


class Checkpoints:
    """By family: its checkpoint, and transformers' continuations. Each is made when it is first asked for."""

    def __init__(self, directory: Path):
        """`directory`: where they are made. Several processes may have the same."""
        self._directory = directory
        self._made: dict[str, tuple[Path, list[list[int]]]] = {}

    def __getitem__(self, family: str) -> tuple[Path, list[list[int]]]:
        if family not in self._made:
            folder = self._directory / family
            if not folder.exists():
                self._make(family, folder)
            self._made[family] = folder / family, json.loads((folder / "expected.json").read_text())
        return self._made[family]

    def _make(self, family: str, folder: Path) -> None:
        made = Path(tempfile.mkdtemp(dir=self._directory))
        path = make_checkpoint(family, made)
        (made / "expected.json").write_text(json.dumps(reference(path)))
        with suppress(OSError):  # another process was faster
            made.rename(folder)


class Lasting(Generic[K, T]):
    """What successive tests share: it lasts until a test asks for another one.

    A fixture with parameters can't do this where some of a test's parameters aren't fixtures: pytest then makes the
    fixture anew for each test, whatever its scope is.
    """

    def __init__(self, make: Callable[[K], AbstractContextManager[T]]):
        self._make = make
        self._exits = ExitStack()
        self._made: tuple[K, T] | None = None

    def __enter__(self) -> Lasting[K, T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()

    def of(self, key: K) -> T:
        if self._made is None or self._made[0] != key:
            self._made = None
            self._exits.close()
            self._made = key, self._exits.enter_context(self._make(key))
        return self._made[1]


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
        self.executor.collective_rpc(reload, args=(self.config,))

    def shutdown(self):
        """The fixture's business."""

    def __getattr__(self, name):
        return getattr(self.executor, name)


def reload(worker, config: EngineConfig) -> None:
    from raycore.worker.setup import set_up

    worker._core.take(set_up(config, worker.rank))
    worker._make_parts()
    worker.load_model()


@contextmanager
def living_workers(ray_cluster, checkpoints: Checkpoints, sizes: tuple[int, ...]) -> Generator[LivingWorkers]:
    """Workers of the sizes that `SIZES_OF_WORKERS` lists."""
    shape = dict(zip(SIZES_OF_WORKERS, sizes, strict=True))
    config = resolve(str(checkpoints["multi_query"][0]), dtype="float32", num_threads=1, max_num_seqs=8, **shape)
    size = config.parallel.world_size
    if size == 1:
        executor = InlineExecutor(config, RankIdentity(0, 1))
        group = None
    else:
        group = ray_cluster.util.placement_group([{"CPU": 1}] * size)
        executor = RayExecutor(config, RankIdentity(0, size), RankBundles(group, range(size)))
    executor.initialize()
    try:
        yield LivingWorkers(executor, shape)
    finally:
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
    (4, 1, 2, 1): (
        *("multi_query", "mistral", "ministral3", "mixtral", "gemma2", "gemma3", "gpt_oss", "laguna", "llama4"),
        *("gemma4", "qwen3_next", "granitemoehybrid", "lfm2", "falcon_h1", "minimax", "jamba"),
    ),
    (2, 1, 2, 1): ("multi_query", "deepseek_v3", "kimi_linear"),
    (2, 2, 2, 1): ("multi_query", "deepseek_v3"),
    (2, 1, 2, 2): ("multi_query", "deepseek_v3"),
    (1, 1, 1, 2): (
        *("llama2", "mistral", "ministral3", "mixtral", "gemma2", "gpt_oss", "deepseek_v3", "mimo_v2_flash", "llama4"),
        *("gemma4", "qwen3_next", "kimi_linear", "granitemoehybrid", "lfm2", "falcon_h1", "jamba"),
    ),
}
"""Of workers that hold different tokens' keys and values. The other shapes have only the first family here."""


FAMILIES_WITHOUT_OVERLAP = ("llama2", "multi_query")
"""Several workers compute only these without a step more in flight. One worker computes every family both ways."""


FAMILIES_OF_KINDS = (
    *("gemma3", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "qwen3_next", "kimi_linear", "granitemoehybrid", "lfm2"),
    *("falcon_h1", "minimax", "jamba"),
)
"""Families with each kind of layers that keep something else than all keys and values."""


PLAIN_SHAPES = ((1, 1, 1, 1), (2, 1, 1, 1))
"""Of workers that compute families of which other families have every part (`Toy.is_plain`)."""


WITHOUT_STAGES = ("gemma3n", "gemma4", "gemma4_experts")
"""Their layers have inputs of their own, which only the first stage could make."""


def every_schedule(*shapes: tuple[int, ...]) -> Callable[[Any], Any]:
    """Parametrize a test by these shapes of workers, by their families, and by how many steps are in flight."""
    parameters = [
        pytest.param(shape, family, overlaps, id=_name(shape, family, overlaps))
        for shape in shapes
        for family in (CONTEXT_FAMILIES.get(shape, ("multi_query",)) if shape in CONTEXT_SHAPES else FAMILIES)
        for overlaps in (False, True)
        if overlaps or (set(shape) == {1} and not FAMILIES[family].is_plain) or family in FAMILIES_WITHOUT_OVERLAP
        if shape in PLAIN_SHAPES or not FAMILIES[family].is_plain
        if shape[1] == 1 or family not in WITHOUT_STAGES
    ]
    return pytest.mark.parametrize(("workers", "family", "overlaps"), parameters, indirect=["workers"])


def _name(shape: tuple[int, ...], family: str, overlaps: bool) -> str:
    sizes = (f"{name}{size}" for name, size in zip(SIZES_OF_WORKERS.values(), shape, strict=True))
    return "-".join((*sizes, family, "one more" if overlaps else "one step in flight for each stage"))


def combinations_of(shape: tuple[int, ...], family: str, overlaps: bool) -> list[tuple[bool, int, int]]:
    """What a family's tokens are compared with.

    All workers of a shape get the same plan of a step. So what a schedule does to a family shows on one worker, what it
    does to several workers shows with one family of each kind of layers, and what dividing does to a family shows with
    any schedule: the one with the fewest steps. What schedules do to a plain family's parts shows with others.
    """
    if FAMILIES[family].is_plain:
        return CORNERS if set(shape) == {1} else CORNERS[1:]
    if set(shape) == {1}:
        return PAIRS if overlaps else [each for each in COMBINATIONS if each not in PAIRS]
    if family in FAMILIES_WITHOUT_OVERLAP:
        return NEXT_TO_CORNERS if overlaps else CORNERS
    if family in FAMILIES_OF_KINDS:
        return CORNERS[:1] if shape == (4, 1, 1, 1) else CORNERS
    return CORNERS[1:]


def check_every_schedule(workers: LivingWorkers, checkpoints: Checkpoints, family: str, overlaps: bool) -> None:
    """Check that each of `combinations_of` gives the reference's tokens."""
    path, expected = checkpoints[family]
    for caching, budget, blocks in combinations_of(tuple(workers.shape.values()), family, overlaps):
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
            config = few(config)
        core = EngineCore(config, workers.for_engine(config))
        preempted = count_preemptions(core)
        for _ in range(1 + scheduling["enable_prefix_caching"]):  # the second time finds prefixes
            assert generate(core) == expected, scheduling
        core.scheduler.check_integrity()
        # otherwise this test would test less than it says
        is_tight = blocks == PREEMPTING_BLOCKS
        if is_tight and budget > CHUNKING_BUDGET and not _layout(config).keeps_all_in_one_group:
            continue  # a whole prompt takes as many blocks as all that run beside it once windows have freed theirs
        assert bool(preempted) == is_tight, scheduling


def _layout(config: EngineConfig) -> CacheLayout:
    spec, tp_size = config.model.spec, config.parallel.tensor_parallel_size
    cached = [mixer.cached(spec, layer) for layer, mixer in enumerate(spec.mixers)]
    numbers = [mixer.cached_numbers(spec, tp_size) for mixer in spec.mixers]
    layers = [LayerCacheSpec(kind, size, window) for (kind, window), size in zip(cached, numbers, strict=True)]
    return divide_layers(layers, config.cache_limits)


def few(config: EngineConfig) -> EngineConfig:
    """The configuration with so few blocks that requests are preempted: with windows, just enough for the longest one.

    Then they need more blocks while they are short, and are rarely preempted.
    """
    layout = _layout(config)
    num_blocks = PREEMPTING_BLOCKS if layout.keeps_all_in_one_group else layout.num_blocks_for(LONGEST)
    cache = msgspec.structs.replace(config.cache, num_gpu_blocks_override=num_blocks)
    return msgspec.structs.replace(config, cache=cache)


def generate(core: EngineCore, all_prompts: list[list[int]] | None = None) -> list[list[int]]:
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


def count_preemptions(core: EngineCore) -> list[int]:
    """A list that grows by an entry for each preemption: a request that comes to the workers with output."""
    preemptions: list[int] = []
    execute = core.executor.execute

    def counting(plan):
        has_output = (len(request.token_ids) // 4 > request.num_prompt_tokens for request in plan.new_requests)
        preemptions.extend(1 for _ in filter(None, has_output))
        return execute(plan)

    core.executor.execute = counting
    return preemptions
