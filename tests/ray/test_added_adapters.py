"""LoRA adapters that are added to a running engine: every rank holds them, also one that joins later."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from families import make_checkpoint
from peft_adapters import save_demo_adapter

from raycore import LLM, InvalidRequest, RequestFailed, SamplingParams
from raycore.demo import demo_model_path
from raycore.engine.rank_events import RankEvent, RankUp
from raycore.errors import InvalidAdapter, InvalidInput
from raycore.lora.request import LoRARequest
from raycore.ray_api import get

PROMPT = [20, 31, 42, 53]
LIMITS = {
    "dtype": "float32",
    "max_model_len": 128,
    "num_threads": 1,
    "standby_delay_s": None,
    "enable_lora": True,
    "worker_cls": "adapter_workers.ProbedWorker",
}
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The directories of three adapters of the demo model."""
    directory = tmp_path_factory.mktemp("adapters")
    return [save_demo_adapter(directory, seed)[0] for seed in (1, 2, 3)]


@pytest.fixture
def adapters(saved: list[Path], tmp_path: Path) -> list[LoRARequest]:
    """Copies of them, which a test may change."""
    paths = [Path(shutil.copytree(path, tmp_path / path.name)) for path in saved]
    return [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, start=1)]


def tokens(llm: LLM, adapter: LoRARequest | None = None, num_tokens: int = 12) -> list[int]:
    params = SamplingParams(temperature=1, seed=1, max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False, lora_request=adapter)
    return output.outputs[0].token_ids


def replace_files(adapter: LoRARequest, source: Path) -> LoRARequest:
    """Write other files into an adapter's directory. Returns what has them read."""
    shutil.copytree(source, adapter.lora_path, dirs_exist_ok=True)
    return anew(adapter)


def anew(adapter: LoRARequest) -> LoRARequest:
    return msgspec.structs.replace(adapter, load_inplace=True)


@contextmanager
def held_when_up(llm: LLM) -> Iterator[list[tuple[int, list[int]]]]:
    """(dp_rank, number of adapters that each of its workers holds) of ranks, at the time when they begin to serve."""
    found: list[tuple[int, list[int]]] = []
    pass_on = llm.clients.on_rank_event

    def on_rank_event(event: RankEvent) -> None:
        if isinstance(event, RankUp):
            asked = event.actor.utility.remote("collective_rpc", ("num_adapters",), {}, TIMEOUT_S)
            found.append((event.dp_rank, get(asked, timeout_s=TIMEOUT_S)))
        pass_on(event)

    llm.clients.on_rank_event = on_rank_event  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield found
    finally:
        llm.clients.on_rank_event = pass_on  # pyright: ignore[reportAttributeAccessIssue]


def test_adapters_are_added_pinned_replaced_and_removed(ray_cluster, saved, adapters, tmp_path: Path) -> None:
    first, second, third = adapters
    with LLM(demo_model_path(), max_cpu_loras=2, **LIMITS) as llm:
        plain, *expected = [tokens(llm, adapter) for adapter in (None, *adapters)]
        assert len({tuple(each) for each in (plain, *expected)}) == 4
        assert llm.list_loras() == set()
        assert llm.add_lora(first)
        assert not llm.add_lora(first)
        assert llm.list_loras() == {1}
        assert llm.collective_rpc("num_adapters") == [2]

        # a paused engine reads adapters, too
        llm.pause_generation()
        assert llm.add_lora(second)
        assert llm.pin_lora(1)
        llm.resume_generation()
        assert llm.list_loras() == {1, 2}
        assert tokens(llm, third) == expected[2]
        assert tokens(llm, second) == expected[1]

        # everything is pinned
        assert llm.pin_lora(2)
        with pytest.raises(InvalidInput, match=r"add_lora\('adapter 3'\): dp_rank 0: all max_cpu_loras=2 slots"):
            llm.add_lora(third)
        with pytest.raises(RequestFailed, match="all max_cpu_loras=2 slots for adapters are taken: 2 are pinned"):
            tokens(llm, third)

        # what is wrong is said at once, and changes nothing
        for call, message in (
            (
                lambda: llm.add_lora(LoRARequest("new", 1, first.lora_path)),
                "lora_int_id=1 is the number of 'adapter 1'",
            ),
            (lambda: llm.add_lora(LoRARequest("adapter 1", 4, first.lora_path)), "was added with lora_int_id=1"),
            (lambda: llm.add_lora(LoRARequest("adapter 1", 1, third.lora_path)), "load_inplace=True to replace it"),
            (lambda: llm.add_lora("adapter"), "isn't a LoRARequest"),
            (lambda: llm.add_lora(LoRARequest("none", 9, str(tmp_path))), "adapter_config"),
            (lambda: llm.pin_lora(9), "lora_id=9 isn't an adapter that was added; these are: 1, 2"),
            (lambda: llm.remove_lora("1"), "lora_id='1' isn't an integer"),
            (lambda: tokens(llm, LoRARequest("new", 1, first.lora_path)), "which was added: give another number"),
        ):
            with pytest.raises(InvalidInput, match=message):
                call()
        assert llm.list_loras() == {1, 2}

        assert llm.remove_lora(2)
        assert not llm.remove_lora(2)
        assert llm.list_loras() == {1}
        assert llm.collective_rpc("num_adapters") == [1]
        assert tokens(llm, second) == expected[1], "it is read again"

        # requests that have begun end with what they began with
        stream = llm.stream(
            {"prompt_token_ids": PROMPT},
            SamplingParams(temperature=1, seed=1, max_tokens=100, ignore_eos=True),
            0,
            first,
        )
        whole = tokens(llm, first, 100)
        next(stream)
        assert llm.add_lora(replace_files(first, saved[2]))
        assert tokens(llm, first) == expected[2]
        assert [*stream][-1].outputs[0].token_ids == whole
        with pytest.raises(InvalidRequest, match=r"load_inplace=True is for add_lora\(\)"):
            tokens(llm, replace_files(first, saved[2]))

        # a damaged file changes nothing
        (Path(first.lora_path) / "adapter_model.safetensors").write_bytes(b"damaged")
        with pytest.raises(InvalidAdapter):
            llm.add_lora(anew(first))
        assert tokens(llm, first) == expected[2]


def test_adapters_are_dropped_and_restored_with_the_weights_in_a_sleep(ray_cluster, adapters) -> None:
    first, second, third = adapters
    with LLM(demo_model_path(), max_loras=2, max_cpu_loras=3, tensor_parallel_size=2, **LIMITS) as llm:
        expected = [tokens(llm, adapter) for adapter in adapters]
        for adapter in (first, second):
            llm.add_lora(adapter)
        for level, num in ((1, 3), (2, 0)):
            llm.sleep(level=level)
            assert llm.collective_rpc("num_adapters") == [num] * 2
            assert (llm.collective_rpc("num_layers_known") == [0, 0]) == (level == 2), "layers have weights"
            with pytest.raises(InvalidInput, match=r"the engine is asleep.*call wake_up\(\) first"):
                llm.add_lora(third)
            assert not llm.add_lora(first)
            if level == 2:
                shutil.rmtree(second.lora_path)
            llm.wake_up(["weights"])
            assert llm.collective_rpc("num_adapters") == [3 if level == 1 else 2] * 2
            llm.wake_up()
            assert tokens(llm, first) == expected[0]
        # its files have gone while the engine slept
        with pytest.raises(RequestFailed, match="isn't a directory"):
            tokens(llm, second)
        assert tokens(llm, third) == expected[2]


@pytest.mark.timeout(120)
def test_ranks_that_join_hold_adapters_before_they_serve(ray_cluster, adapters) -> None:
    """Reading takes so long that a rank that served at once wouldn't hold any."""
    first, second, _ = adapters
    options = LIMITS | {"worker_cls": "adapter_workers.SlowReader"}
    with LLM(demo_model_path(), max_cpu_loras=2, **options) as llm, held_when_up(llm) as held:
        expected = tokens(llm, first)
        assert llm.add_lora(first)
        assert llm.add_lora(second)
        assert llm.pin_lora(1)
        llm.scale(2)
        assert held == [(1, [2])]
        # one that can't be read any more keeps no rank from serving
        shutil.rmtree(second.lora_path)
        os.kill(llm.engine_infos[0].pid, signal.SIGKILL)
        llm.scale(1)
        assert tokens(llm, first) == expected
        assert held[1:] == [(0, [1])]
        with pytest.raises(RequestFailed, match="isn't a directory"):
            tokens(llm, second)
        assert llm.list_loras() == {1, 2}


def test_a_rank_that_joins_an_expert_group_holds_adapters_before_it_serves(ray_cluster, tmp_path: Path) -> None:
    model = str(make_checkpoint("qwen3_moe", tmp_path))
    path, _ = save_demo_adapter(tmp_path, 1, model, target_modules=["q_proj", "v_proj"], lora_alpha=64)
    adapter = LoRARequest("experts", 1, str(path))
    options = LIMITS | {"batch_invariant": True, "worker_cls": "adapter_workers.SlowReader"}
    with LLM(model, enable_expert_parallel=True, **options) as llm, held_when_up(llm) as held:
        assert llm.add_lora(adapter)
        expected = tokens(llm, adapter)
        assert expected != tokens(llm)
        llm.scale(2)
        assert held == [(1, [1])]
        assert {rank.num_restarts for rank in llm.ranks} == {0}
        assert [tokens(llm, adapter) for _ in range(4)] == [expected] * 4


def test_an_engine_without_enable_lora_refuses_to_add_remove_and_pin_adapters(ray_cluster, adapters) -> None:
    with LLM(demo_model_path(), **(LIMITS | {"enable_lora": False})) as llm:
        for call in (lambda: llm.add_lora(adapters[0]), lambda: llm.remove_lora(1), lambda: llm.pin_lora(1)):
            with pytest.raises(InvalidInput, match="needs an engine with enable_lora=True"):
                call()
        assert llm.list_loras() == set()
