"""`LLM` and `AsyncLLM` as a user meets them: the bundled model, real actors, things that go wrong."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import shared_memory
import tool_templates
from number_formats import DTYPE, REPEATABLE
from waiting import LONG_S, eventually

from placement.reserve import groups_named
from raycore import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineDeadError,
    InvalidConfig,
    InvalidRequest,
    PlacementShortage,
    RequestFailed,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from raycore.cluster.supervisor import Supervisor
from raycore.demo import demo_model_path, held_out_problems
from raycore.errors import InitializationError, InvalidCheckpoint, InvalidInput, RequestTooLarge
from raycore.node.processes import is_running, wait_until_gone

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
LIMITS = {"num_threads": 1, "max_model_len": 1000, "dtype": DTYPE}


# without standbys, which would come up while other tests look at what is left
@pytest.fixture(scope="module")
def llm(ray_cluster):
    num_frozen = gc.get_freeze_count()
    with LLM(demo_model_path(), data_parallel_size=2, standby_delay_s=None, **LIMITS) as llm:
        assert gc.get_freeze_count() <= num_frozen, "this process is the caller's"
        yield llm


@pytest.fixture(scope="module", params=REPEATABLE)
def repeatable(request, ray_cluster):
    with LLM(demo_model_path(), data_parallel_size=2, standby_delay_s=None, **LIMITS | request.param) as llm:
        yield llm


def texts(llm: LLM, prompts, params=GREEDY) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]


def test_the_demo_model_generates_correct_sums(llm):
    problems = list(held_out_problems(2, 50))
    answers = texts(llm, [prompt for prompt, _ in problems])
    right = sum(got == answer for got, (_, answer) in zip(answers, problems, strict=True))
    assert right >= 0.98 * len(problems)


def test_a_prompt_may_be_text_or_ids(llm):
    ids = llm.get_tokenizer().encode("27 + 58 =")
    forms = ["27 + 58 =", ids, {"prompt_token_ids": ids}, {"prompt": "27 + 58 ="}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} == {" 85"}
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].stop_reason) == ("stop", None)
    (alone,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert alone.outputs[0].text == " 85"


def test_chat_answers_a_question(llm):
    (output,) = llm.chat([{"role": "user", "content": "What is 27 + 58?"}], GREEDY, use_tqdm=False)
    assert "85" in output.outputs[0].text


def test_chat_normalizes_messages(llm):
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Ulm"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Late?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]

    def prompt(template):
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
        return llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)

    assert prompt(tool_templates.QWEN2_5).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "get_time", "arguments": {"city": "Ulm"}}' in prompt(
        tool_templates.HERMES
    )


def test_generate_applies_a_list_of_sampling_parameters_prompt_by_prompt(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 3, 7)]
    outputs = llm.generate(["1 + 2 ="] * 3, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3, 7]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_generate_ends_texts_before_stop_strings(llm):
    params = SamplingParams(temperature=0, max_tokens=50, stop=["5"], ignore_eos=True)
    (output,) = llm.generate("27 + 58 =", params, use_tqdm=False)
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (" 8", "stop", "5")


def test_a_seeded_request_repeats_its_tokens_whatever_else_runs(repeatable):
    params = SamplingParams(temperature=2.0, max_tokens=40, seed=11, ignore_eos=True, n=2)
    (alone,) = repeatable.generate("27 + 58 =", params, use_tqdm=False)
    crowd = [SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)] * 20
    among = repeatable.generate(["3 + 4 ="] * 20 + ["27 + 58 ="], [*crowd, params], use_tqdm=False)[-1]
    first, second = (completion.token_ids for completion in alone.outputs)
    assert first != second
    assert [completion.token_ids for completion in among.outputs] == [first, second]


def test_logprobs_come_with_text_and_rank(llm):
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("27 + 58 =", params, use_tqdm=False)
    completion = output.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids)
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert position[token_id].rank == 1
        assert len(position) in (2, 3)
    total = sum(p[t].logprob for t, p in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    assert all(i in p for i, p in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True))


def constrained(**constraint) -> SamplingParams:
    return SamplingParams(temperature=1.5, max_tokens=200, structured_outputs=StructuredOutputsParams(**constraint))


def test_outputs_follow_their_json_schema_regex_and_choices(llm):
    properties = {"sum": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": ["sum"], "additionalProperties": False}
    asked = [constrained(json=schema, disable_any_whitespace=True), constrained(regex="[a-z]{40}[0-9]")]
    outputs = texts(llm, ["27 + 58 ="] * 20, asked * 10)
    assert all(json.loads(text)["sum"] <= 99 for text in outputs[::2])
    assert all(re.fullmatch("[a-z]{40}[0-9]", text) for text in outputs[1::2])
    assert len(set(outputs)) > 10
    likely = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=[" 84", " 85", " 86"]))
    assert texts(llm, "27 + 58 =", likely) == [" 85"]


def test_a_constraint_that_cannot_be_followed_is_refused(llm):
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex='\(': (?s:.*)unclosed group"):
        texts(llm, ["1", "2"], [constrained(regex="a"), constrained(regex="(")])
    assert texts(llm, "27 + 58 =") == [" 85"]


NUMBERS = '{"type":"integer","minimum":-100000000000000000000,"maximum":-10000000000000000000}'


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": NUMBERS},
        {"json": '{"type":"integer","minimum":-9223372036854775808,"maximum":-9223372036854775808}'},
        {"grammar": f"start: %json {NUMBERS}"},
    ],
)
def test_a_constraint_that_crashes_the_compiler_is_refused(llm, constraint):
    with pytest.raises(InvalidRequest, match="can't be held exactly"):
        texts(llm, ["1", "2"], [constrained(regex="a"), constrained(**constraint)])
    assert texts(llm, "27 + 58 =") == [" 85"]


def test_a_chain_of_references_is_followed(llm):
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {"const": 85}}}
    assert texts(llm, "27 + 58 =", constrained(json=schema)) == ["85"]


def test_a_constraint_that_gets_too_complex_fails_only_its_own_request(llm):
    """The parser holds 2,000 items in a row at most. The check looks less far than these."""
    names = [f"r{i}" for i in range(3000)]
    start = " | ".join(f'"a" {name}' for name in names)
    grammar = "\n".join(["start: /[qz]{100}/ rest", f"rest: {start}", *(f'{name}: "{name}"' for name in names)])
    params = [GREEDY, constrained(grammar=grammar), GREEDY]
    with pytest.raises(
        RequestFailed, match=r"structured_outputs can't be enforced at token \d+: .* max is 2000"
    ) as failure:
        texts(llm, ["27 + 58 ="] * 3, params)
    outputs = failure.value.outputs
    assert [output and output.outputs[0].text for output in outputs] == [" 85", None, " 85"]
    assert texts(llm, "27 + 58 =") == [" 85"]


def test_repeated_prefixes_are_cached(repeatable):
    prompt = "".join(f"{i} + {i} = {2 * i}\n" for i in range(20)) + "27 + 58 ="
    params = SamplingParams(temperature=1.5, max_tokens=20, seed=3, ignore_eos=True)
    first, second = (repeatable.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > 100
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    salted = [{"prompt": prompt, "cache_salt": salt} for salt in ("a", "b", "a")]
    cached = [repeatable.generate(each, params, use_tqdm=False)[0].num_cached_tokens for each in salted]
    assert cached == [0, 0, second.num_cached_tokens]
    assert repeatable.reset_prefix_cache()
    assert repeatable.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ("", InvalidRequest, "empty"),
        ([], InvalidRequest, "no prompt|empty"),
        ([1, 2, 10**6], InvalidRequest, "1000000"),
        ([1, -1], InvalidRequest, "-1"),
        ([5] * 1000, RequestTooLarge, "1000 tokens.*max_model_len=1000"),
        ({"text": "?"}, InvalidRequest, "text"),
        ("a\ud83d", InvalidRequest, "half of a surrogate pair"),
        ({"prompt": "1", "multi_modal_data": {"image": 1}}, InvalidRequest, "has images, but .*takes only texts"),
    ],
)
def test_bad_prompts_are_refused_and_the_engine_serves_on(llm, prompt, error, match):
    if prompt == []:
        prompt = [[]]
        match = "empty"
    with pytest.raises(error, match=match):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert texts(llm, "27 + 58 =") == [" 85"]


@pytest.mark.parametrize(("priority", "match"), [("high", "'high'"), (["high"], "'high'")])
def test_bad_priorities_are_refused(llm, priority, match):
    with pytest.raises(InvalidRequest, match=match):
        llm.generate(["27 + 58 ="], GREEDY, use_tqdm=False, priority=priority)
    assert llm.generate(["27 + 58 ="], GREEDY, use_tqdm=False, priority=[3])[0].outputs[0].text == " 85"


def test_a_request_larger_than_the_cache_is_refused_with_the_numbers(ray_cluster):
    with LLM(demo_model_path(), num_gpu_blocks_override=4, **LIMITS) as llm:
        with pytest.raises(RequestTooLarge, match=r"64 \(4 blocks of 16\)"):
            llm.generate([5] * 60, SamplingParams(max_tokens=100), use_tqdm=False)
        assert texts(llm, "27 + 58 =") == [" 85"]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"model": "/nowhere"}, InvalidCheckpoint, "/nowhere"),
        ({"max_num_seqs": 0}, InvalidConfig, "max_num_seqs=0"),
        ({"block_size": -1}, InvalidConfig, "block_size=-1"),
        ({"tensor_parallel_size": 3}, InvalidConfig, "tensor_parallel_size=3.*num_attention_heads=4"),
        ({"max_model_len": 10**6}, InvalidConfig, "max_model_len=1000000"),
        ({"colour": "red"}, InvalidConfig, "colour"),
        ({"kv_cache_memory_bytes": 10}, InvalidConfig, "max_model_len"),
    ],
)
def test_bad_options_are_refused(ray_cluster, options, error, match):
    with pytest.raises(error, match=match):
        LLM(**{"model": demo_model_path(), **options})


def test_a_start_logs_versions_and_what_is_not_default(ray_cluster, caplog):
    with caplog.at_level("INFO", "raycore"), LLM(demo_model_path(), seed=0, data_parallel_size=2, **LIMITS):
        pass
    (line,) = [each for each in caplog.messages if each.startswith("raycore ")]
    assert re.match(r"raycore \d\S+, ray \d\S+, torch \d\S+, Python \d\S+, on \S.*: model='.*'", line)
    assert "data_parallel_size=2, num_threads=1, max_model_len=1000" in line
    assert "seed" not in line


def test_a_custom_scheduler_decides_the_order_of_requests(ray_cluster):
    ended: list[int] = []

    async def run(engine: AsyncLLM) -> None:
        runs = asyncio.Event()

        async def generate(number: int) -> None:
            if number:
                await runs.wait()  # the others come while the first one runs
            async for output in engine.generate("27 + 58 =", GREEDY if number else ENDLESS):
                runs.set()
                if output.finished:
                    ended.append(number)

        await asyncio.gather(*map(generate, range(4)))

    with pytest.raises(InvalidConfig, match=r"scheduler_cls='newest_first\.Nobody' can't be imported"):
        LLM(demo_model_path(), scheduler_cls="newest_first.Nobody", **LIMITS)
    engine = AsyncLLM(demo_model_path(), scheduler_cls="newest_first.NewestFirst", max_num_seqs=1, **LIMITS)
    try:
        asyncio.run(run(engine))
    finally:
        engine.shutdown()
    assert ended == [0, 3, 2, 1]


def test_a_truncated_checkpoint_is_named(ray_cluster, tmp_path):
    for source in Path(demo_model_path()).iterdir():
        content = source.read_bytes()
        cut = content[: len(content) // 2] if source.name.endswith("safetensors") else content
        (tmp_path / source.name).write_bytes(cut)
    with pytest.raises((InvalidCheckpoint, InitializationError), match=r"model\.safetensors"):
        LLM(str(tmp_path))


def test_a_shape_that_does_not_fit_is_refused_with_the_table(ray_cluster):
    with pytest.raises(PlacementShortage) as refusal:
        LLM(demo_model_path(), tensor_parallel_size=4, data_parallel_size=8, placement_timeout_s=1e6)
    assert "CPU" in str(refusal.value)


def test_beam_search_gives_the_best_sequences_of_each_prompt(llm):
    prompts = ["1 + 2 =", {"prompt": "27 + 58 =", "cache_salt": "x"}]
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    both = llm.beam_search(prompts, params, use_tqdm=False)
    assert llm.beam_search(prompts, params, concurrency_limit=1) == both
    for prompt, output in zip(["1 + 2 =", "27 + 58 ="], both, strict=True):
        assert len(output.sequences) == 3
        assert all(each.text.startswith(prompt) for each in output.sequences)
    (one,) = llm.beam_search("1 + 2 =", BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))
    (greedy,) = llm.generate("1 + 2 =", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert one.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="concurrency_limit=0"):
        llm.beam_search("1", params, concurrency_limit=0)
    with pytest.raises(InvalidRequest, match="max_model_len"):
        llm.beam_search("1" * 5000, params)


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also in a process that was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_leaves_the_engine_usable(llm):
    def interrupt() -> None:
        eventually(lambda: llm.num_unfinished_requests)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["1 + 2 ="] * 32, ENDLESS, use_tqdm=False)
    thread.join()
    assert texts(llm, "27 + 58 =") == [" 85"]
    eventually(llm.reset_prefix_cache, "aborted requests still run")


def test_a_start_interrupted_when_the_ranks_are_up_leaves_no_process_or_group(ray_cluster, monkeypatch):
    start, infos = Supervisor.start, []

    def start_and_interrupt(supervisor):
        start(supervisor)
        infos.extend(supervisor._manager.infos)
        raise KeyboardInterrupt

    monkeypatch.setattr(Supervisor, "start", start_and_interrupt)
    groups_before = {group.id for group in groups_named("")}
    with pytest.raises(KeyboardInterrupt):
        LLM(demo_model_path(), **LIMITS)
    (info,) = infos
    assert wait_until_gone([info.pid, *info.worker_pids], 5.0) == []
    assert {group.id for group in groups_named("")} <= groups_before


def test_an_engines_loaded_objects_are_frozen_out_of_garbage_collection(llm):
    assert min(llm.collective_rpc(lambda worker: __import__("gc").get_freeze_count())) > 10_000


def test_collective_rpc_reaches_every_worker(llm):
    assert llm.collective_rpc("dtype_name") == [DTYPE, DTYPE]
    pids = llm.collective_rpc(lambda worker: __import__("os").getpid())
    assert sorted(pids) == sorted(pid for info in llm.engine_infos for pid in info.worker_pids)


def leftovers(ray) -> tuple[list[str], list[str]]:
    groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    names = [group["name"] for group in groups if group["name"].startswith("raycore")]
    return sorted(names), sorted(ray.util.list_named_actors())


@pytest.mark.parametrize("shape", [{}, {"tensor_parallel_size": 2, "data_parallel_size": 2}])
def test_an_engines_shutdown_leaves_no_process_group_or_shared_memory(ray_cluster, shape):
    before, shared_before = leftovers(ray_cluster), shared_memory.files()
    llm = LLM(demo_model_path(), **shape, **LIMITS)
    assert texts(llm, "27 + 58 =") == [" 85"]
    pids = [pid for info in llm.engine_infos for pid in (info.pid, *info.worker_pids)]
    llm.shutdown()
    llm.shutdown()
    assert not [pid for pid in pids if is_running(pid)]
    # Ray's tables lag behind its processes
    eventually(lambda: leftovers(ray_cluster) == before, lambda: leftovers(ray_cluster))
    assert shared_memory.abandoned_since(shared_before) == []
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("1 + 2 =", GREEDY, use_tqdm=False)


def test_an_engine_uses_the_callers_placement_groups_and_does_not_remove_them(ray_cluster):
    ray = ray_cluster
    groups = [ray.util.placement_group([{"CPU": 1}] * 2) for _ in range(2)]
    with LLM(demo_model_path(), data_parallel_size=2, placement_groups=groups, **LIMITS) as llm:
        assert texts(llm, "27 + 58 =") == [" 85"]
    states = [ray.util.placement_group_table(group)["state"] for group in groups]
    for group in groups:
        ray.util.remove_placement_group(group)
    assert states == ["CREATED", "CREATED"]


def test_ranks_with_worker_actors_share_a_group(ray_cluster):
    group = ray_cluster.util.placement_group([{"CPU": 1}] * 4)
    options = LIMITS | {"data_parallel_size": 2, "executor_backend": "ray", "placement_groups": [group, group]}
    with LLM(demo_model_path(), **options) as llm:
        assert texts(llm, "27 + 58 =") == [" 85"]
        assert len(llm.ranks) == 2
    ray_cluster.util.remove_placement_group(group)


def test_placement_groups_that_do_not_fit_the_ranks_are_refused(ray_cluster):
    group = ray_cluster.util.placement_group([{"CPU": 1}])
    assert group.wait(LONG_S)
    try:
        with pytest.raises(InvalidConfig, match="placement_groups"):
            LLM(demo_model_path(), tensor_parallel_size=2, placement_groups=[group])
        with pytest.raises(InvalidConfig, match="1 placement_groups for data_parallel_size=2"):
            LLM(demo_model_path(), data_parallel_size=2, placement_groups=[group])
    finally:
        ray_cluster.util.remove_placement_group(group)


def test_async_llm_streams_aborts_and_refuses_requests(ray_cluster):
    async def scenario():
        async with AsyncLLM(demo_model_path(), **LIMITS) as llm:
            seen = [output.outputs[0].text async for output in llm.generate("27 + 58 =", GREEDY, request_id="a")]
            assert seen[-1] == " 85"
            assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))

            both = await asyncio.gather(*(_last(llm, f"{i} + 0 =") for i in range(10, 30)))
            assert len(both) == 20

            last = None
            async for output in llm.generate("1 + 2 =", ENDLESS, request_id="b"):
                last = output
                if len(output.outputs[0].token_ids) >= 3:  # a slow reader sees only the newest
                    await llm.abort("b")
            assert last.outputs[0].finish_reason == "abort"

            async for _ in llm.generate("1 + 2 =", ENDLESS, request_id="c"):
                break  # leaving early aborts
            with pytest.raises(InvalidRequest, match="empty"):
                await _last(llm, "")
            with pytest.raises(InvalidRequest, match="already in use"):
                await asyncio.gather(_last(llm, "1 + 2 =", ENDLESS, "d"), _last(llm, "1 + 2 =", ENDLESS, "d"))
            assert (await _last(llm, "27 + 58 =")).outputs[0].text == " 85"

            assert await llm.collective_rpc("dtype_name") == [DTYPE]
            await llm.check_health()
            await llm.sleep(level=2)
            assert (await llm.is_paused(), await llm.is_sleeping()) == (True, True)
            waiting = asyncio.ensure_future(_last(llm, "27 + 58 ="))
            assert not await asyncio.wait_for(llm.wake_up(["kv_cache"]), 60)
            assert await llm.wake_up()
            assert (await waiting).outputs[0].text == " 85"
            assert await llm.reset_prefix_cache()

            # a paused engine can finish nothing while it drains
            await llm.pause_generation()
            waiting = asyncio.ensure_future(_last(llm, "27 + 58 ="))
            await asyncio.sleep(0.01)
            await asyncio.to_thread(llm.shutdown, 0.2)
            assert (await waiting).outputs[0].finish_reason == "abort"
            with pytest.raises(EngineDeadError):
                await llm.resume_generation()

    asyncio.run(scenario())


async def _last(llm: AsyncLLM, prompt, params=GREEDY, request_id=None):
    last = None
    async for output in llm.generate(prompt, params, request_id):
        last = output
    return last


def test_an_engine_is_stepped_through_its_requests(llm):
    engine = llm.llm_engine
    deltas = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
    engine.add_request("whole", "12 + 13 =", GREEDY)
    engine.add_request("deltas", "12 + 13 =", deltas)
    engine.add_request("aborted", "12 + 13 =", ENDLESS)
    engine.abort_request("aborted")
    last, pieces = {}, ""
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
            pieces += output.outputs[0].text if output.request_id == "deltas" else ""
    [text] = texts(llm, ["12 + 13 ="])
    assert last.keys() == {"whole", "deltas"}
    assert last["whole"].outputs[0].text == pieces == text
    metrics = last["whole"].metrics
    assert metrics.arrival_s < metrics.first_token_s <= metrics.last_token_s <= metrics.finished_s
    assert metrics.num_generation_tokens == len(last["whole"].outputs[0].token_ids)
    assert (engine.vllm_config.model_config.max_model_len, engine.model_config) == (1000, llm.config.model)


def test_requests_can_be_queued_and_waited_for_later(llm):
    prompts = [f"{number} + 7 =" for number in range(6)]
    ids = llm.enqueue(prompts, GREEDY)
    assert texts(llm, ["12 + 13 ="])
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs[0].text for output in outputs] == texts(llm, prompts)
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_metrics_are_objects_and_functions_are_called_on_models(llm):
    before = {(each.name, *each.labels.values()): each for each in llm.get_metrics()}
    texts(llm, ["12 + 13 ="])
    after = {(each.name, *each.labels.values()): each for each in llm.get_metrics()}
    grown = sum(
        after[name].value - metric.value for name, metric in before.items() if name[0] == "vllm:generation_tokens"
    )
    assert grown > 0
    kinds = llm.apply_model(lambda model: type(model).__name__)
    assert kinds == ["Decoder"] * 2


def test_async_outputs_are_deltas_if_asked_for(ray_cluster):
    """Whatever the reader's pace."""

    async def run(engine) -> tuple[list[int], list[int]]:
        whole = [output async for output in engine.generate("12 + 13 =", GREEDY, "whole")][-1].outputs[0].token_ids
        deltas = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
        pieces: list[int] = []
        async for output in engine.generate("12 + 13 =", deltas, "deltas"):
            pieces += output.outputs[0].token_ids
            await asyncio.sleep(0.02)
        return whole, pieces

    args = AsyncEngineArgs(demo_model_path(), standby_delay_s=None, **LIMITS)
    engine = AsyncLLM.from_engine_args(args)
    try:
        whole, pieces = asyncio.run(run(engine))
        assert whole == pieces
        with pytest.raises(InvalidInput, match="timeout=-1 isn't between 0"):
            engine.shutdown(timeout=-1)
        assert engine.is_running
    finally:
        engine.shutdown(timeout=20)
    assert engine.errored
    assert "shut down" in str(engine.dead_error)
