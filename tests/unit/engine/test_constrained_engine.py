"""A whole engine, without Ray, whose outputs have to be JSON of random schemas."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import jsonschema
import msgspec
import pytest
from mixed_requests import run as run_mixed
from number_formats import REPEATABLE

from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.engine.core import EngineCore
from raycore.executor import inline
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest, FinishedRequest
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer import Tokenizer
from raycore.worker.rank import RankIdentity
from raycore.worker.worker import Worker

TOKENS = Tokenizer.from_dir(demo_model_path())
NUM_REQUESTS = 16


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """What follows it is short, so that it ends."""
    kinds = ["integer", "number", "string", "pattern", "enum", "boolean"] + ["object", "array", "anyOf"] * (depth > 0)
    kind = rng.choice(kinds)
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
    if kind == "number":
        return {"enum": [round(rng.random(), 9), 1e9, -2.5]}
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": 6}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f]{2,5}$", "^(ab|cd)+x{3}$", r"^\+?[0-9]{3,6}$"])}
    if kind == "enum":
        return {"enum": rng.sample(["red", "grün", 'a "quote"', None, 4, True, [1], {"a": 2}], 3)}
    if kind == "object":
        properties = {f"{rng.choice(['key', 'é', 'two words'])} {i}": random_schema(rng, depth - 1) for i in range(3)}
        required = [name for name in properties if rng.random() < 0.6]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": 1, "maxItems": 3}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return {"type": "boolean"}


def requests(seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    constraints = [{"json": random_schema(rng), "disable_any_whitespace": True} for _ in range(NUM_REQUESTS)]
    return [request(seq_id, seed, **constraint) for seq_id, constraint in enumerate(constraints)]


def request(seq_id: int, seed: int, **constraint: Any) -> EngineRequest:
    asked = StructuredOutputsParams(**constraint)
    params = SamplingParams(temperature=1.5, max_tokens=400, structured_outputs=asked)
    prompt = TOKENS.encode(f"{seq_id} + {seed} =")
    return EngineRequest(seq_id, str(seq_id), prompt, params, seed=seq_id + 100 * seed, eos_token_ids=[0, 3])


def make_core(**options: Any) -> EngineCore:
    config = resolve(
        demo_model_path(), num_threads=1, max_model_len=512, max_num_batched_tokens=64,
        max_num_seqs=NUM_REQUESTS, **options,
    )  # fmt: skip
    return EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))


def run(core: EngineCore, made: list[EngineRequest]) -> tuple[dict[int, list[int]], dict[int, FinishedRequest]]:
    outputs: dict[int, list[int]] = {request.seq_id: [] for request in made}
    ends: dict[int, FinishedRequest] = {}
    for request in made:
        core.submit(request)
    while core.has_work() or core.load().num_waiting:
        core.release_prepared()
        step = core.step()
        if step is None:
            time.sleep(core.idle_wait_s())
            continue
        for seq_id, token_id in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
            outputs[seq_id].append(token_id)
        ends |= {end.seq_id: end for end in step.finished}
    return outputs, ends


@pytest.fixture(scope="module", params=REPEATABLE)
def mode(request) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def core(mode):
    core = make_core(num_gpu_blocks_override=500, **mode)
    yield core
    core.shutdown()


@pytest.mark.parametrize("seed", range(4))
def test_every_constrained_output_is_valid(core, seed):
    made = requests(seed)
    outputs, ends = run(core, made)
    assert {end.finish_reason for end in ends.values()} == {"stop"}
    for request in made:
        asked = request.params.structured_outputs
        assert asked is not None
        text = TOKENS.decode(outputs[request.seq_id])
        jsonschema.validate(json.loads(text), json.loads(str(asked.json)))


def test_preempted_constrained_requests_give_the_same_outputs(core, mode):
    made = [request(seq_id, seed=7, regex="([a-z]{3,9} ){12}") for seq_id in range(NUM_REQUESTS)]
    tight = make_core(num_gpu_blocks_override=33, **mode)
    outputs, _ = run(tight, made)
    assert tight.load().num_preemptions > 0
    assert outputs == run(core, made)[0]
    tight.shutdown()


def test_a_constraint_begins_after_the_reasoning_also_after_preemptions_and_moves(core, mode):
    """The thought is whatever the model writes up to a 1."""
    made = [request(seq_id, seed=8, regex="([a-z]{3,9} ){15}", after="1") for seq_id in range(NUM_REQUESTS)]
    for each in made:
        each.params.min_tokens = 60  # so that few end before it
    tight = make_core(num_gpu_blocks_override=33, **mode)
    outputs, _ = run(tight, made)
    assert tight.load().num_preemptions > 0
    tight.shutdown()
    assert outputs == run(core, made)[0]
    texts = [TOKENS.decode(outputs[each.seq_id]) for each in made]
    assert sum("1" in text for text in texts) > NUM_REQUESTS // 4
    for each, text in zip(made[:6], texts, strict=False):
        thought, one, said = text.partition("1")
        assert not one or re.fullmatch("([a-z]{3,9} ){15}", said)
        for length in (len(TOKENS.encode(thought)) - 1, len(TOKENS.encode(thought + one)) + 3):
            if 0 < length < len(outputs[each.seq_id]):
                each.output_token_ids = outputs[each.seq_id][:length]
                assert run(core, [each])[0][each.seq_id] == outputs[each.seq_id][length:]


def test_a_constrained_request_continues_on_another_engine(core):
    (request, *_) = sorted(requests(5), key=lambda request: -len(str(request.params.structured_outputs)))
    whole = run(core, [request])[0][request.seq_id]
    half = len(whole) // 2
    request.output_token_ids = whole[:half]
    assert half > 0
    assert run(core, [request])[0][request.seq_id] == whole[half:]


def test_a_request_whose_tokens_break_its_constraint_fails_alone(core):
    made = requests(6)
    made[4].output_token_ids = TOKENS.encode("no JSON")
    _, ends = run(core, made)
    assert ends.pop(4).finish_reason == "failed"
    assert {end.finish_reason for end in ends.values()} == {"stop"}
    core.scheduler.check_integrity()
    assert core.load().num_running == 0


@pytest.mark.parametrize("stop", [[], ["x"]])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_complete_constrained_output_ends_before_min_tokens(core, stop, ignore_eos):
    """With `ignore_eos` only a stop token can end it."""
    if ignore_eos and not stop:
        pytest.skip("nothing would end it")
    stop_ids = [TOKENS.encode(text)[0] for text in stop]
    made = [request(seq_id, seed=9, regex="[a-c]{3}") for seq_id in range(NUM_REQUESTS)]
    for each in made:
        each.params = msgspec.structs.replace(
            each.params, min_tokens=30, max_tokens=60, stop_token_ids=stop_ids, ignore_eos=ignore_eos
        )
    outputs, ends = run(core, made)
    for each in made:
        assert re.fullmatch("[a-c]{3}x?", TOKENS.decode(outputs[each.seq_id]))
        assert len(outputs[each.seq_id]) == 4
        assert ends[each.seq_id].finish_reason == "stop"


def test_min_tokens_delays_the_end_of_a_constrained_output_that_can_go_on(core):
    made = [request(seq_id, seed=10, regex="[a-c]*") for seq_id in range(4)]
    for each in made:
        each.params.min_tokens = 30
    outputs, _ = run(core, made)
    assert all(len(tokens) > 30 for tokens in outputs.values())


class Apart(Worker):
    """A worker of a user's that never samples in `execute_model`, as vLLM's."""

    def execute_model(self, plan):
        assert super().execute_model(msgspec.structs.replace(plan, masked=True)) is None
        self.waits = plan.masked

    def sample_tokens(self, grammar):
        assert (grammar is not None) == self.waits
        return super().sample_tokens(grammar)


class Together(Worker):
    """One that does something with the result of every step."""

    num_tokens = 0

    def execute_model(self, plan):
        result = super().execute_model(plan)
        self.num_tokens += len(result.token_ids) // 4
        return result


LIMITS: dict[str, Any] = {
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 200,
    "block_size": 8,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
WAYS: dict[str, dict[str, Any]] = {
    "one step at a time": {},
    "two steps": {"max_concurrent_batches": 2},
    "three steps": {"max_concurrent_batches": 3},
    "chunks": {"max_num_batched_tokens": 16},
    "preemptions": {"num_gpu_blocks_override": 12, "max_concurrent_batches": 2},
    "drafts": {"speculative_config": NGRAM},
    "drafts of workers": {"speculative_config": NGRAM, "max_concurrent_batches": 2},
    "a worker that samples apart": {"worker_cls": f"{__name__}.Apart"},
    "a worker that samples in execute_model": {"worker_cls": f"{__name__}.Together"},
}


@pytest.fixture(scope="module")
def followed_by_workers() -> dict[int, Any]:
    """Outputs of an engine that makes no masks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inline, "takes_masks", lambda worker: False)
        return run_mixed({}, **LIMITS)[0]


@pytest.mark.parametrize("way", WAYS)
def test_outputs_with_masks_are_those_of_workers_that_follow_grammars(
    way: str, followed_by_workers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constrained requests, others, and both in one step."""
    masked: list[bool] = []
    execute = InlineExecutor.execute
    monkeypatch.setattr(InlineExecutor, "execute", lambda self, plan: masked.append(plan.masked) or execute(self, plan))
    found, load = run_mixed({}, **LIMITS | WAYS[way])
    assert any(masked) == (way != "drafts of workers"), "then workers follow grammars"
    assert (load.num_preemptions > 0) == (way == "preemptions")
    for seq_id, output in found.items():
        for name in ("tokens", "logprobs", "end"):
            assert output[name] == followed_by_workers[seq_id][name], (seq_id, name)


def test_constrained_requests_take_part_in_each_step_in_flight():
    """A step of the same requests is in flight whenever a result arrives: its masks follow the tokens of that."""
    made = [request(seq_id, seed=3, regex="[a-z]{20}") for seq_id in range(4)]
    one_by_one = make_core(num_gpu_blocks_override=500)
    overlapping = make_core(num_gpu_blocks_override=500, max_concurrent_batches=2)
    step, num_left = overlapping.step, []

    def noting():
        outputs = step()
        if outputs is not None:
            num_left.append(overlapping.num_in_flight)
        return outputs

    overlapping.step = noting
    expected, _ = run(one_by_one, made)
    assert run(overlapping, made)[0] == expected
    assert all(re.fullmatch("[a-z]{20}", TOKENS.decode(tokens)) for tokens in expected.values())
    assert num_left[:10] == [1] * 10
    one_by_one.shutdown()
    overlapping.shutdown()


def test_a_request_that_is_aborted_between_plan_and_masks_leaves_the_others_alone():
    made = [request(seq_id, seed=4, regex="[a-z]{30}") for seq_id in range(4)]
    core = make_core(num_gpu_blocks_override=500, max_concurrent_batches=2)
    expected, _ = run(core, made)
    execute, num_steps = core.executor.execute, 0

    def abort_during(plan):
        nonlocal num_steps
        pending, num_steps = execute(plan), num_steps + 1
        if num_steps == 5:
            assert plan.masked
            core.abort([1])
        return pending

    core.executor.execute = abort_during
    found, ends = run(core, made)
    assert found.pop(1) == expected.pop(1)[:3], "the fourth was in flight"
    assert found == expected
    assert ends.keys() == {0, 2, 3}
    core.scheduler.check_integrity()
    core.shutdown()
