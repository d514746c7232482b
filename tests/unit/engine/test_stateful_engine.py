"""Models whose layers keep states: their tokens, whatever is cached, drafted, preempted or asleep."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from families import VOCAB_SIZE, make_checkpoint, reference
from families import prompts as family_prompts
from number_formats import BATCH_INVARIANT

from raycore.activity import RUNNING
from raycore.config import resolve
from raycore.engine import scheduling
from raycore.engine.core import EngineCore
from raycore.errors import InvalidConfig, WorkerFailed
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.parts.drafts.guesses.drafts import Drafts
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

FAMILIES: dict[str, int | None] = {
    "qwen3_next": 1 << 19,
    "granitemoehybrid": 1 << 19,
    "kimi_linear": 1 << 19,
    "lfm2": 1 << 17,
    "falcon_h1": 1 << 19,
    "minimax": 1 << 19,
    "olmo_hybrid": 1 << 19,
    "mamba2": None,
    "mamba": None,
    "jamba": 1 << 19,
}
"""With bytes that hold the states of a few requests, and fewer blocks than these could use. None: no layer has anything
in blocks."""
NUM_NEW = 20
RNG = random.Random(5)
LONG = [RNG.randrange(VOCAB_SIZE) for _ in range(41)]
PROMPTS = [LONG, LONG[:33], [*LONG[:20], 1, 2], LONG[:7], [5]]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """Without caching, one prompt at a time."""
    core = engine(path, enable_prefix_caching=False)
    return [generate(core, [prompt])[0] for prompt in PROMPTS]


def engine(path: Path, **options: Any) -> EngineCore:
    sizes = {"num_threads": 1, "max_num_seqs": 6, "block_size": 4, "num_gpu_blocks_override": 200}
    config = resolve(path, **{"dtype": "float32", **sizes, "mamba_block_size": 8, "num_prefix_states": 40, **options})
    return EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))


def generate(core: EngineCore, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": NUM_NEW, "ignore_eos": True} | params)
    for seq_id, prompt in enumerate(prompts):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, chosen, seed=0))
    while core.has_work():
        step = core.step()
        if step is not None:
            for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
                tokens[seq_id].append(token)
    core.scheduler.check_integrity()
    return tokens


def logprobs(core: EngineCore, prompt: list[int]) -> list[float]:
    """Of the generated tokens."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, logprobs=0, ignore_eos=True)
    core.submit(EngineRequest(0, "0", prompt, params, seed=0))
    values: list[float] = []
    while core.has_work():
        step = core.step()
        if step is not None:
            values += [value for _, entry in step.logprobs for value in entry.logprobs]
    return values


def count_tokens(core: EngineCore) -> list[int]:
    """A list that gets the number of tokens of each step."""
    counts: list[int] = []
    execute = core.executor.execute

    def counting(plan):
        counts.append(plan.num_step_tokens)
        return execute(plan)

    core.executor.execute = counting
    return counts


class Prophet(Speculation):
    """Drafts what is known to come, with a wrong token in most drafts."""

    wholes: list[list[int]]
    """Prompts with what follows them."""

    def propose(self, slots, running, limits, budget, num_other):
        rng, drafts = random.Random(self._num_steps), dict[int, list[int]]()
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            known = running.tokens[slot, : running.received[slot]].tolist()
            whole = next(each for each in self.wholes if each[: len(known)] == known)
            tokens = whole[len(known) :][: max(0, min(limit, budget, rng.randint(0, 4)))]
            if rng.random() < 0.7 and tokens:
                tokens[rng.randrange(len(tokens))] = rng.randrange(VOCAB_SIZE)
            if tokens:
                drafts[slot], budget = tokens, budget - len(tokens)
        return Drafts.of(list(drafts), list(drafts.values()))


def test_tokens_are_those_of_transformers(path: Path) -> None:
    assert generate(engine(path), family_prompts(), max_tokens=12) == reference(path)


def test_a_second_request_computes_only_what_follows_the_last_state(path: Path, expected: list[list[int]]) -> None:
    core = engine(path, mamba_block_size=16)
    assert generate(core, [LONG])[0] == expected[0]
    counts = count_tokens(core)
    for prompt, num_cached, tokens in [
        (LONG, 40, expected[0]),
        (LONG[:33], 32, expected[1]),
        (PROMPTS[2], 16, expected[2]),
        (LONG[:7], 0, expected[3]),
    ]:
        counts.clear()
        assert generate(core, [prompt])[0] == tokens
        assert counts == [len(prompt) - num_cached] + [1] * (NUM_NEW - 1)
    whole = LONG + expected[0]
    counts.clear()
    assert generate(core, [whole[:50]], max_tokens=11)[0] == whole[50:]
    assert counts[0] == 2, "the state after 48 tokens was kept while they were generated"


@pytest.mark.parametrize("budget", [*range(6, 12), 17, 23, 32, 33, 40])
def test_borders_of_chunks_change_no_token(path: Path, expected: list[list[int]], budget: int) -> None:
    core = engine(path, max_num_batched_tokens=budget)
    for _ in range(2):
        assert generate(core, PROMPTS) == expected


@pytest.mark.parametrize("options", BATCH_INVARIANT)
def test_bits_are_the_same_however_a_prompt_is_computed(path: Path, options: dict[str, Any]) -> None:
    if path.name == "kimi_linear" and "kv_cache_dtype" in options:
        pytest.skip("latents aren't kept in integers")
    alone = logprobs(engine(path, **options, enable_prefix_caching=False), LONG)
    core = engine(path, **options, max_num_batched_tokens=11)
    generate(core, [PROMPTS[2], LONG[:7]])
    for _ in range(2):
        assert logprobs(core, LONG) == alone
    assert core.load().prefix_cache_hits >= 40


@pytest.mark.parametrize("blocks", [200, 18], ids=["enough blocks", "preemptions"])
@pytest.mark.parametrize("interval", [4, 32])
def test_drafts_change_no_token(
    path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, blocks: int, interval: int
) -> None:
    monkeypatch.setattr(scheduling, "Speculation", Prophet)
    wholes = [prompt + tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    monkeypatch.setattr(Prophet, "wholes", wholes, raising=False)
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    core = engine(path, num_gpu_blocks_override=blocks, mamba_block_size=interval, **drafts)
    for _ in range(3):
        assert generate(core, PROMPTS) == expected
    load = core.load()
    assert (load.num_preemptions > 0) == (blocks == 18)
    assert load.prefix_cache_hits >= 40
    assert 0.2 < sum(load.drafts.accepted_per_position) / load.drafts.num_draft_tokens < 0.9
    assert load.drafts.accepted_per_position[-1] > 0


def test_a_model_of_attention_drafts_for_one_with_states(path: Path, expected: list[list[int]], tmp_path: Path) -> None:
    config = {"model": str(make_checkpoint("llama3", tmp_path)), "num_speculative_tokens": 3}
    always = {"num_speculative_tokens_per_batch_size": [(1, 6, 3)]}
    core = engine(path, speculative_config=config | always)
    for _ in range(2):
        assert generate(core, PROMPTS) == expected
    assert core.load().drafts.num_drafts > 0
    with pytest.raises(InvalidConfig, match=r"ForCausalLM\) has layers that keep a state"):
        engine(tmp_path / "llama3", speculative_config=config | {"model": str(path)})


def test_states_are_dropped_in_a_sleep_and_computed_again(path: Path, expected: list[list[int]]) -> None:
    core = engine(path)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    core.submit(EngineRequest(0, "0", LONG, params, seed=0))
    tokens = [token for _ in range(5) for token in core.step().token_ids.tolist()]  # pyright: ignore
    core.set_activity(RUNNING.put_to_sleep(1))
    core.set_activity(RUNNING)
    while core.has_work():
        tokens += core.step().token_ids.tolist()  # pyright: ignore
    assert tokens == expected[0]
    assert generate(core, PROMPTS) == expected


def test_states_take_their_memory_before_blocks_do(path: Path) -> None:
    if FAMILIES[path.name] is None:
        pytest.skip("blocks of this family take no memory")
    sized = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": FAMILIES[path.name]}
    many, few = (engine(path, **sized, num_prefix_states=num).cache.num_blocks for num in (0, 2))
    assert many > few
    with pytest.raises(WorkerFailed, match=r"leaves -\d+ bytes for blocks of .*, after 140 states.*max_num_seqs=100"):
        engine(path, **sized, max_num_seqs=100)
    with pytest.raises(InvalidConfig, match=r"mamba_block_size=6 isn't a multiple of block_size=4"):
        engine(path, mamba_block_size=6)
