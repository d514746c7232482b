"""A worker comes up step by step, runs plans, and stops."""

from __future__ import annotations

import json
import shutil
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import msgspec
import numpy as np
import pytest
import torch
from caches import cache_of
from drafting_checkpoints import head_config, random_head, write_checkpoint
from families import make_checkpoint
from native_kernels import needs_kernels
from own_memory import resident_bytes
from safetensors.torch import load_file, save_file
from waiting import LONG_S, eventually

from raycore.checkpoint import stored_model
from raycore.config import EngineConfig, resolve
from raycore.demo import DEMO_MODEL_DIR, demo_model_path
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.messages import NewRequest, StepPlan, StepResult, StepTokens
from raycore.node import resources as host
from raycore.node.listeners import offer
from raycore.parallel import peer_memory
from raycore.parts.constraints.grammar import native
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import StructuredOutputsParams
from raycore.worker.rank import WorkerRank
from raycore.worker.worker import Worker

ALONE = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return str(tmp_path)


PROMPT = NewRequest(
    0, np.arange(3, 8, dtype=np.int32).tobytes(), 5, 0, np.int32(2).tobytes(), SamplingParams(temperature=0.0), 0
)


def first_token(worker: Worker) -> int:
    result = worker.execute_model(StepPlan(0, np.int32(0).tobytes(), np.int32(5).tobytes(), new_requests=[PROMPT]))
    assert result is not None
    worker.execute_model(StepPlan(1, freed_slots=[0]))
    return int(np.frombuffer(result.token_ids, np.int32)[0])


def start(checkpoint: str, **options: object) -> Worker:
    options = {"load_format": "dummy", "num_threads": 1} | options
    worker = Worker(resolve(checkpoint, **options), ALONE)  # pyright: ignore
    worker.init_device()
    worker.load_model()
    return worker


def test_weights_that_have_changed_are_read_again_while_the_cache_sleeps(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, checkpoint)
    worker = Worker(resolve(str(checkpoint), num_threads=1), ALONE)
    worker.init_device()
    worker.load_model()
    worker.initialize_cache(cache_of(worker, 4))
    before = first_token(worker)
    with pytest.raises(InvalidConfig, match=r"reload_weights\(\) is for a KV cache that sleeps: call sleep\(level=2\)"):
        worker.reload_weights()
    worker.sleep(1)
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    embeddings = "model.embed_tokens.weight"  # also the head
    other = (before + 1) % len(weights[embeddings])
    changed = weights[embeddings].clone()
    changed[[before, other]] = changed[[other, before]]
    save_file({**weights, embeddings: changed}, file, {"format": "pt"})
    worker.wake_up(["weights"])
    worker.reload_weights()
    worker.initialize_cache(cache_of(worker, 4))
    assert first_token(worker) == other
    worker.shutdown()


def test_a_worker_warns_of_a_torch_that_is_not_tested(checkpoint: str, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    start(checkpoint)
    assert "torch 2.99.0 is installed here" in caplog.text


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_sleeping_worker_frees_its_memory_and_computes_the_same_when_awake(
    checkpoint: str, backend: str, level: int
) -> None:
    worker = start(checkpoint, batch_invariant=True, attention_backend=backend)
    worker.initialize_cache(cache_of(worker, 4))
    worker.warm_up()
    expected = first_token(worker)
    gone = [weakref.ref(worker._core.runner), *([weakref.ref(worker._core.model.network)] if level == 2 else [])]
    worker.sleep(level)
    assert [each() for each in gone] == [None] * len(gone)
    worker.sleep(level)
    worker.wake_up(["weights"])
    worker.initialize_cache(cache_of(worker, 4))
    worker.warm_up()
    assert first_token(worker) == expected
    worker.sleep(2)
    worker.shutdown()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
@pytest.mark.parametrize("cache", ["auto", pytest.param("int8_per_token_head", marks=needs_kernels)])
def test_a_drafter_sleeps_and_wakes_with_its_worker(tmp_path: Path, cache: str, kind: str, level: int) -> None:
    for name, config in (
        ("target", SHAPE | {"num_hidden_layers": 4}),
        ("draft", SHAPE if kind == "draft_model" else head_config(SHAPE["hidden_size"], SHAPE["vocab_size"])),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    speculative = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 4}
    worker = start(str(tmp_path / "target"), speculative_config=speculative, kv_cache_dtype=cache)
    alone = start(str(tmp_path / "target"), kv_cache_dtype=cache)
    own, drafts = (4, 8), (SHAPE["num_hidden_layers"], 8) if kind == "draft_model" else (1, 4)
    in_target, in_drafts = (
        num_layers * 2 * 2 * 16 * (head_dim * 4 if cache == "auto" else head_dim + 4)
        for num_layers, head_dim in (own, drafts)
    )
    assert (alone._core.sizes.block, worker._core.sizes.block) == (in_target, in_target + in_drafts)
    assert worker._core.sizes.step > alone._core.sizes.step
    guesses: list[list[list[int]]] = []
    gone: list[weakref.ref[object]] = []
    for _ in range(2):
        worker.initialize_cache(cache_of(worker, 4))
        worker.warm_up()
        worker.execute_model(StepPlan(0, np.int32(0).tobytes(), np.int32(5).tobytes(), new_requests=[PROMPT]))
        guesses.append(worker.take_draft_token_ids([0], [4]))
        if not gone:
            gone = [
                weakref.ref(worker._core.model.drafting.network),
                weakref.ref(worker._core.runner._drafting.network),
            ]
            worker.sleep(level)
            assert [each() is None for each in gone] == [level == 2, True]
            worker.wake_up(["weights"])
    assert guesses[0] == guesses[1]
    assert len(guesses[0][0]) == 4
    for each in (worker, alone):
        each.shutdown()


@needs_kernels
@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_a_drafter_guesses_with_the_integers_of_a_gguf_file_what_it_does_with_their_numbers(tmp_path, kind) -> None:
    """An EAGLE-3 head without an embedding looks tokens up in the target's head."""
    gguf_files = pytest.importorskip("gguf_files", reason="needs the extra gguf")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    target, plain = make_checkpoint("llama3", tmp_path, **sizes), tmp_path / "plain"
    file = gguf_files.write_gguf(target, "llama3", tmp_path / "model.gguf", "Q8_0", plain=plain)
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    config = head_config(256, vocab_size)
    head = write_checkpoint(tmp_path / "head", config, random_head(config))
    guesses: list[list[list[int]]] = []
    for path in (file, plain):
        speculative = {"model": str(head if kind == "eagle3" else path), "num_speculative_tokens": 4}
        options = {"load_format": "auto", "dtype": "float32", "skip_tokenizer_init": True}
        worker = start(str(path), speculative_config=speculative, **options)
        worker.initialize_cache(cache_of(worker, 4))
        worker.warm_up()
        worker.execute_model(StepPlan(0, np.int32(0).tobytes(), np.int32(5).tobytes(), new_requests=[PROMPT]))
        guesses.append(worker.take_draft_token_ids([0], [4]))
        worker.shutdown()
    assert guesses[0] == guesses[1]
    assert len(guesses[0][0]) == 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_worker_returns_memory_to_the_operating_system(tmp_path: Path, level: int, dtype: str) -> None:
    shape = SHAPE | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"head_dim": 32, "num_key_value_heads": 16}))
    with host.freed_memory_returned():
        worker = start(str(tmp_path), dtype=dtype)
    num_weight_bytes = (
        2 * worker._core.model.network.num_weights
    )  # the native kernels pack float32 in 16 bits if that is exact
    num_cache_bytes = 48 << 20
    loaded = resident_bytes()
    worker.initialize_cache(cache_of(worker, num_cache_bytes // worker._core.sizes.block))
    worker.warm_up()
    for block in worker._core.runner._attention._kv.blocks:
        block.fill_(0.5)
    del block
    full = resident_bytes()
    assert full - loaded > 0.9 * num_cache_bytes
    worker.sleep(level)
    to_go = num_cache_bytes + (num_weight_bytes if level == 2 else 0)
    assert full - resident_bytes() >= 0.9 * to_go
    worker.shutdown()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_worker_starts_computes_a_token_and_shuts_down(checkpoint: str, batch_invariant: bool) -> None:
    worker = start(checkpoint, batch_invariant=batch_invariant)
    assert worker.dtype_name() == "float32"
    assert worker._core.sizes.block == 2 * 2 * 2 * 16 * 8 * 4
    assert worker.determine_available_memory() >= worker._core.sizes.block
    worker.initialize_cache(cache_of(worker, 4))
    worker.warm_up()
    prompt = np.arange(3, 8, dtype=np.int32)
    request = NewRequest(0, prompt.tobytes(), 5, 0, np.int32(2).tobytes(), SamplingParams(temperature=0.0), 0)
    plan = StepPlan(0, np.int32(0).tobytes(), np.int32(5).tobytes(), new_requests=[request])
    result = worker.execute_model(plan)
    assert result is not None
    assert 0 <= np.frombuffer(result.token_ids, np.int32)[0] < 64
    worker.check_health()
    worker.shutdown()
    worker.shutdown()


def test_a_worker_compares_the_config_with_files_that_the_driver_lacks(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    hidden = file.rename(tmp_path / "hidden")
    config = resolve(str(tmp_path / "model"), num_threads=1)
    tensors = load_file(hidden)
    assert config.model.spec.tie_word_embeddings
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    worker = Worker(config, ALONE)
    worker.init_device()
    assert not worker.config.model.spec.tie_word_embeddings
    worker.shutdown()


@pytest.mark.parametrize("is_drafter", [False, True])
def test_a_worker_does_not_compare_files_again_that_the_driver_has_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_drafter: bool
) -> None:
    for name in ("model", "drafter"):
        shutil.copytree(DEMO_MODEL_DIR, tmp_path / name)
    drafting = {"method": "draft_model", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 2}
    config = resolve(str(tmp_path / "model"), num_threads=1, speculative_config=drafting)
    config = EngineConfig.decode(config.encode())
    with monkeypatch.context() as patch:
        patch.setattr(stored_model, "_check", None)  # the comparison
        worker = Worker(config, ALONE)
        worker.init_device()
    assert worker.config == config
    worker.shutdown()
    # on another node, there may be other files
    file = tmp_path / ("drafter" if is_drafter else "model") / "model.safetensors"
    bias = {"model.layers.0.self_attn.o_proj.bias": torch.zeros(1)}
    save_file(load_file(file) | bias, file)
    worker = Worker(config, ALONE)
    with pytest.raises(InvalidCheckpoint, match=r"o_proj\.bias"):
        worker.init_device()
    worker.shutdown()
    file.unlink()
    worker = Worker(config, ALONE)
    worker.init_device()
    with pytest.raises(InvalidCheckpoint, match="no weights at all"):
        worker.load_model()
    worker.shutdown()


def test_the_log_names_dtype_device_and_backend(checkpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "raycore"):
        start(checkpoint, attention_backend="torch")
    (line,) = [each for each in caplog.messages if each.startswith("computes in")]
    assert line.startswith("computes in float32 on ")
    assert line.endswith(f"torch {torch.__version__}, backend torch, up to 1 threads")


def test_grammars_are_compiled_before_their_requests_come(checkpoint: str) -> None:
    worker = start(checkpoint, tokenizer=demo_model_path())
    asked = {1: StructuredOutputsParams(regex="[0-9]{3}"), 2: StructuredOutputsParams(regex="(")}
    assert set(worker.prepare_grammars(asked)) <= {1, 2}
    eventually(lambda: not worker.prepare_grammars({}))
    assert worker.prepare_grammars({3: asked[1]}) == [], "it is known"
    worker.initialize_cache(cache_of(worker, 4))
    params = [SamplingParams(temperature=0.0, structured_outputs=each) for each in asked.values()]
    new = [NewRequest(slot, bytes(4), 1, 0, np.int32(slot).tobytes(), params[slot], 0) for slot in range(2)]
    result = worker.execute_model(StepPlan(0, np.arange(2, dtype=np.int32).tobytes(), new_requests=new))
    assert result is not None
    assert result.failed[0][0] == 1
    assert "unclosed group" in result.failed[0][1]
    worker.shutdown()


def test_prepare_structured_outputs_loads_the_tokenizer_at_the_start(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    original = native.read_tokenizer_text
    monkeypatch.setattr(native, "read_tokenizer_text", lambda path: read.append(path) or original(path))  # pyright: ignore
    follows = {"scheduler_cls": "raycore.scheduler.scheduler.Scheduler"}
    for asked in (False, True):
        worker = start(checkpoint, tokenizer=demo_model_path(), prepare_structured_outputs=asked, **follows)
        worker.initialize_cache(cache_of(worker, 4))
        worker.warm_up()
        assert read == [Path(demo_model_path())] * asked
    monkeypatch.setitem(sys.modules, "llguidance", None)
    worker = start(checkpoint, prepare_structured_outputs=True, **follows)
    worker.initialize_cache(cache_of(worker, 4))
    with pytest.raises(InvalidConfig, match=r'prepare_structured_outputs=True: .*pip install "raycore\[structured\]"'):
        worker.warm_up()


def test_only_the_first_tensor_parallel_rank_returns_a_steps_result(checkpoint: str) -> None:
    worker = start(checkpoint)
    worker.initialize_cache(cache_of(worker, 1))
    worker.rank = WorkerRank(dp_rank=0, tp_rank=1, tp_size=2, local_rank=1, num_local_workers=2)
    assert worker.execute_model(StepPlan(0)) is None


def test_kv_cache_memory_bytes_is_the_available_memory(checkpoint: str) -> None:
    assert start(checkpoint, kv_cache_memory_bytes=12345).determine_available_memory() == 12345


@pytest.mark.parametrize("asked", [{"kv_cache_memory_bytes": 501}, {"num_gpu_blocks_override": 2}])
def test_more_cache_than_the_machine_has_memory_is_refused_before_the_weights_are_read(
    checkpoint: str, asked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "total_memory_bytes", lambda: 1000)
    config = resolve(checkpoint, load_format="dummy", num_threads=1, **asked)  # pyright: ignore
    rank = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=2)
    with pytest.raises(
        InvalidConfig, match=rf"{next(iter(asked))}=.* for each of 2 workers .* has: 1000 bytes.*Lower it"
    ):
        Worker(config, rank).init_device()
    monkeypatch.setattr(host, "total_memory_bytes", lambda: 10**6)
    Worker(config, rank).init_device()


def run_together(workers: list[Worker], plans: list[list[StepPlan]]) -> list[list[StepResult | None]]:
    """Start workers that need each other, each in a thread, run their plans, and stop them. Returns their results."""
    all_done = Barrier(len(workers))

    def run(worker: Worker, plans: list[StepPlan]) -> list[StepResult | None]:
        worker.init_device()
        worker.load_model()
        worker.initialize_cache(cache_of(worker, 4))
        worker.warm_up()
        results = [worker.execute_model(plan) for plan in plans]
        all_done.wait(LONG_S)
        worker.shutdown()
        return results

    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(run, workers, plans))


def a_request_and_its_plans(known: list[int], num_prompt: int) -> list[StepPlan]:
    """The plans of one request: its prompt in two chunks, then a token at a time. `known`: all tokens but the last."""
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
    prompt = np.array(known[:num_prompt], np.int32).tobytes()
    request = NewRequest(0, prompt, num_prompt, 0, bytes(4), params, 0)
    plans: list[StepPlan] = []
    ends = [2, *range(num_prompt, len(known) + 1)]
    for step, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        numbers = [np.array(each, np.int32).tobytes() for each in ([start], [end >= num_prompt], known[start:end])]
        count = b"" if end - start == 1 else np.int32(end - start).tobytes()
        new = [request] if step == 0 else []
        plans.append(StepPlan(step, np.int32(0).tobytes(), count, new_requests=new, tokens=StepTokens(*numbers)))
    return plans


@pytest.mark.parametrize(
    ("kind", "tp_size", "pp_size"),
    [("dense", 1, 2), ("dense", 1, 3), ("dense", 2, 2), ("sparse", 1, 3), ("on several nodes", 1, 3)],
)
def test_workers_of_pipeline_stages_give_the_results_of_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tp_size: int, pp_size: int
) -> None:
    if kind == "on several nodes":
        monkeypatch.setattr(peer_memory, "_open", lambda store, num_bytes: None)
    shape = SHAPE | {"num_hidden_layers": 5} | (MOE | {"mlp_only_layers": [1]} if kind == "sparse" else {})
    (tmp_path / "config.json").write_text(json.dumps(shape | {"tie_word_embeddings": True}))
    options = {"load_format": "dummy", "num_threads": 1, "attention_backend": "torch"}

    def make(tp: int, pp: int) -> list[Worker]:
        config = resolve(str(tmp_path), tensor_parallel_size=tp, pipeline_parallel_size=pp, **options)
        meeting = offer("127.0.0.1")
        coordinates = [divmod(number, tp) for number in range(tp * pp)]
        ranks = [WorkerRank(0, tp_rank, tp, 0, 4, meeting, pp_rank=stage, pp_size=pp) for stage, tp_rank in coordinates]
        return [Worker(config, rank) for rank in ranks]

    known = [3, 9, 27, 17, 51]
    for _ in range(4):  # what one worker samples is what the next plan tells
        (results,) = run_together(make(1, 1), [a_request_and_its_plans(known, 5)])
        known.append(int(np.frombuffer(results[-1].token_ids, np.int32)[0]))
    plans = a_request_and_its_plans(known[:-1], 5)
    found = run_together(make(tp_size, pp_size), [plans] * (tp_size * pp_size))
    reporting = found.pop((pp_size - 1) * tp_size)  # the first worker of the last stage
    assert found == [[None] * len(plans)] * len(found)
    if tp_size == 1:
        assert reporting == results, "with the same bits"
    else:
        assert [each.token_ids for each in reporting] == [each.token_ids for each in results]


def test_workers_of_engines_that_share_experts_give_the_results_of_one_engine(tmp_path: Path) -> None:
    """One has a prompt, then a token to go on from, then nothing; the other has nothing at all."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | MOE))
    options = {"load_format": "dummy", "num_threads": 1}
    request = NewRequest(0, np.arange(5, dtype=np.int32).tobytes(), 5, 0, bytes(4), SamplingParams(temperature=0.0), 0)
    slot = np.int32(0).tobytes()
    plans = [StepPlan(0, slot, np.int32(5).tobytes(), new_requests=[request]), StepPlan(1, slot), StepPlan(2)]
    alone = Worker(resolve(str(tmp_path), **options), ALONE)
    config = resolve(str(tmp_path), enable_expert_parallel=True, data_parallel_size=2, **options)
    meeting = offer("127.0.0.1")
    ranks = [msgspec.structs.replace(ALONE, dp_rank=rank).with_experts(config.parallel, meeting) for rank in range(2)]
    busy, idle = (Worker(config, rank) for rank in ranks)
    of_busy, of_idle = run_together([busy, idle], [plans, [StepPlan(-1)] * 3])
    (of_alone,) = run_together([alone], [plans])
    assert [each.token_ids for each in of_busy] == [each.token_ids for each in of_alone]
    assert [each.token_ids for each in of_idle] == [b""] * 3
    assert [each.is_anyone_busy for each in of_busy + of_idle] == [True, True, False] * 2


def test_pipeline_stages_of_engines_that_share_experts_give_the_results_of_one_engine(tmp_path: Path) -> None:
    """Each stage has its own experts. An engine without a token runs them in all of its stages."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | MOE | {"num_hidden_layers": 3}))
    options = {"load_format": "dummy", "num_threads": 1}
    plans = [*a_request_and_its_plans([3, 9, 27, 17, 51], 5), StepPlan(9)]
    (alone,) = run_together([Worker(resolve(str(tmp_path), **options), ALONE)], [plans])
    config = resolve(
        str(tmp_path), enable_expert_parallel=True, data_parallel_size=2, pipeline_parallel_size=2, **options
    )
    addresses = [offer("127.0.0.1") for _ in range(3)]
    workers = [
        Worker(
            config,
            WorkerRank(dp_rank, 0, 1, 0, 4, addresses[dp_rank], pp_rank=stage, pp_size=2).with_experts(
                config.parallel, addresses[2]
            ),
        )
        for dp_rank, stage in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    idle = [StepPlan(-1)] * len(plans)
    found = run_together(workers, [plans, plans, idle, idle])
    assert found[0] == found[2] == [None] * len(plans)
    assert [each.token_ids for each in found[1]] == [each.token_ids for each in alone]
    assert [each.is_anyone_busy for each in found[1] + found[3]] == [True, True, False] * 2


def test_a_worker_may_be_shut_down_before_its_start(checkpoint: str) -> None:
    Worker(resolve(checkpoint), ALONE).shutdown()
