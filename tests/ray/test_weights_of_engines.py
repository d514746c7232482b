"""The weights of engines change while requests run, on all ranks, also on those that are lost meanwhile."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_probe import wait_until_reachable
from safetensors.torch import load_file, save_file
from waiting import eventually

from raycore import LLM, RequestOutput, SamplingParams, WeightVersionChanged
from raycore.control.remote import RemoteEngine
from raycore.demo import demo_model_path
from raycore.errors import InvalidCheckpoint, InvalidInput

pytestmark = pytest.mark.timeout(400)
USES_CONTROL = True
PROMPT = [20, 31, 42, 53]
TIMEOUT_S = 60.0
Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def llm(ray_cluster: Any) -> Iterator[LLM]:
    engine = LLM(
        demo_model_path(),
        dtype="float32",
        batch_invariant=True,
        max_model_len=512,
        num_threads=1,
        data_parallel_size=2,
        standby_delay_s=None,
        restart_backoff_s=0.05,
    )
    yield engine
    engine.shutdown()


def tensors(seed: int) -> Tensors:
    """All tensors of the demo model, with other numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (name, each * (1 + 0.05 * torch.randn(each.shape, generator=generator)).to(each.dtype))
        for file in sorted(Path(demo_model_path()).glob("*.safetensors"))
        for name, each in load_file(file).items()
    ]


def bring(llm: LLM, given: Tensors) -> None:
    llm.collective_rpc("load_weights", args=(given,))


def tokens_after(llm: LLM, known: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": known}, params, use_tqdm=False)
    return output.outputs[0].token_ids


def checksums(llm: LLM) -> set[str]:
    return set(llm.collective_rpc("weights_checksum"))


def version_of(output: RequestOutput) -> str:
    (span,) = output.outputs[0].weight_versions or []
    return span.version


def wait_for_states(llm: LLM, *states: str) -> None:
    eventually(lambda: [rank.state for rank in llm.ranks] == [*states], lambda: llm.ranks)


def wait_until_all_serve(llm: LLM) -> None:
    wait_for_states(llm, "serving", "serving")


def test_requests_go_on_with_new_weights_and_say_from_which_token_on(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    stream = llm.stream({"prompt_token_ids": PROMPT}, params)
    next(stream)
    llm.start_weight_update()
    bring(llm, tensors(1))
    assert llm.is_paused()
    llm.finish_weight_update("one")
    *_, last = stream
    (completion,) = last.outputs
    first, second = completion.weight_versions or []
    assert (first.version, first.start, second.version, second.end) == ("default", 0, "one", 300)
    assert first.end == second.start > 0
    known = [*PROMPT, *completion.token_ids[: second.start]]
    assert completion.token_ids[second.start :] == tokens_after(llm, known, 300 - second.start)
    assert len(checksums(llm)) == 1
    assert llm.get_weight_version() == "one"


def test_a_request_may_fail_instead(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, on_version_change="fail")
    stream = llm.stream({"prompt_token_ids": PROMPT}, params)
    next(stream)
    llm.start_weight_update()
    bring(llm, tensors(2))
    llm.finish_weight_update("two")
    with pytest.raises(WeightVersionChanged, match="to 'two'"):
        list(stream)


def test_a_checkpoint_is_taken_in_place_and_another_model_is_refused(llm: LLM, tmp_path: Path) -> None:
    for file in Path(demo_model_path()).iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(dict(tensors(3)), tmp_path / "model.safetensors", {"format": "pt"})
    llm.reload_weights(tmp_path, "three")
    own = checksums(llm)
    assert len(own) == 1
    llm.start_weight_update()
    bring(llm, tensors(3))
    llm.finish_weight_update("three again")
    assert checksums(llm) == own
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    with pytest.raises(InvalidCheckpoint, match=r"another model: its .*norm.* is 0.25"):
        llm.reload_weights(tmp_path)
    with pytest.raises(InvalidCheckpoint, match="missing"):
        llm.reload_weights(tmp_path / "missing")
    assert checksums(llm) == own
    llm.reload_weights(demo_model_path(), "default")
    assert llm.get_weight_version() == "default"


def test_a_rank_that_is_lost_in_an_update_gets_the_weights_of_the_others(llm: LLM) -> None:
    llm.start_weight_update()
    bring(llm, tensors(4))
    os.kill(llm.engine_infos[1].pid, signal.SIGKILL)
    llm.finish_weight_update("four")
    wait_until_all_serve(llm)
    assert len(checksums(llm)) == 1
    outputs = llm.generate([{"prompt_token_ids": [each]} for each in range(16)], use_tqdm=False)
    assert set(map(version_of, outputs)) == {"four"}


def test_a_cancelled_update_goes_back_to_the_checkpoint(llm: LLM) -> None:
    llm.reload_weights(demo_model_path(), "default")
    before = checksums(llm)
    llm.start_weight_update()
    with pytest.raises(InvalidInput, match="under way"):
        llm.reload_weights()
    bring(llm, tensors(5))
    llm.cancel_weight_update()
    assert checksums(llm) == before
    assert not llm.is_paused()


def test_updates_wait_for_ranks_that_are_being_replaced(llm: LLM) -> None:
    for info in llm.engine_infos:
        os.kill(info.pid, signal.SIGKILL)
    llm.reload_weights(demo_model_path(), "again")
    wait_until_all_serve(llm)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, use_tqdm=False)
    assert version_of(output) == "again"


def test_a_trainer_fills_an_engine_that_has_woken_up_without_weights(llm: LLM) -> None:
    llm.reload_weights(demo_model_path(), "default")
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    stream = llm.stream({"prompt_token_ids": PROMPT}, params)
    next(stream)
    llm.sleep(level=2, mode="keep")
    assert not llm.wake_up(["weights"], reads_weights=False)
    wait_for_states(llm, "stale", "stale")
    os.kill(llm.engine_infos[0].pid, signal.SIGKILL)  # its replacement reads the checkpoint, which isn't wanted
    eventually(lambda: llm.ranks[0].num_restarts and llm.ranks[0].state == "stale", lambda: llm.ranks)
    llm.start_weight_update()
    given = tensors(6)
    bring(llm, given[2:])
    with pytest.raises(InvalidInput, match="the update lacks 2 tensors"):
        llm.finish_weight_update("filled")
    bring(llm, given[:2])
    llm.finish_weight_update("filled")
    assert llm.is_sleeping(), "the cache is"
    assert llm.wake_up(["kv_cache"])
    wait_until_all_serve(llm)
    *_, last = stream
    (completion,) = last.outputs
    first, second = completion.weight_versions or []
    assert (first.version, second.version, second.end) == ("default", "filled", 300)
    known = [*PROMPT, *completion.token_ids[: second.start]]
    assert completion.token_ids[second.start :] == tokens_after(llm, known, 300 - second.start)
    assert len(checksums(llm)) == 1


def test_requests_wait_while_an_engine_that_is_awake_has_no_weights(llm: LLM) -> None:
    llm.sleep(level=2)
    assert llm.wake_up(reads_weights=False)
    wait_for_states(llm, "stale", "stale")
    prompts = [{"prompt_token_ids": [each]} for each in range(8)]
    outputs = ThreadPoolExecutor(1).submit(llm.generate, prompts, use_tqdm=False)
    eventually(lambda: llm._client.num_unfinished_requests >= len(prompts))
    llm.start_weight_update()
    bring(llm, tensors(7))
    assert not outputs.done()
    llm.finish_weight_update("filled again")
    assert {version_of(output) for output in outputs.result(TIMEOUT_S)} == {"filled again"}


def test_ranks_whose_update_was_given_up_serve_again_after_the_next(llm: LLM) -> None:
    llm.start_weight_update()
    bring(llm, tensors(8))
    llm.cancel_weight_update()  # the weights from before came from no checkpoint
    wait_for_states(llm, "stale", "stale")
    llm.start_weight_update()
    bring(llm, tensors(9))
    llm.finish_weight_update("nine")
    prompts = [{"prompt_token_ids": [each]} for each in range(16)]
    for _ in range(3):
        assert set(map(version_of, llm.generate(prompts, use_tqdm=False))) == {"nine"}
        llm.pause_generation()
        llm.resume_generation()


def test_other_processes_can_make_the_calls(llm: LLM) -> None:
    wait_until_reachable(llm)
    RemoteEngine(llm.name).call("update_weight_version", new_version="renamed")
    assert llm.get_weight_version() == "renamed"
