"""The simulated worker's model: what an engine makes of it, and that one wrong number gives other tokens."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from raycore.engine.core import EngineCore
from raycore.errors import InvalidCheckpoint, InvalidInput
from raycore.executor.inline import InlineExecutor
from raycore.lora.request import LoRARequest
from raycore.messages import EngineRequest, Feature, FeatureData, StepPlan
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import StructuredOutputsParams
from raycore.worker.rank import RankIdentity
from simulation.engine import options
from simulation.engine.options import CHECKPOINT, EOS, MAX_MODEL_LEN
from simulation.worker import expected, meeting, model
from simulation.worker.chance import Chance
from simulation.worker.experts import held_by
from simulation.worker.runner import Runner
from simulation.worker.weights import FIRST_DAMAGED, Weights
from simulation.world import threads
from simulation.world.kernel import World

ORIGINAL = model.weights_of(CHECKPOINT)


class Engine:
    """An engine of drawn options, without a world: nothing takes time."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        drawn = options.drawn(self.draw)
        parallel = msgspec.structs.replace(drawn.config.parallel, data_parallel_size=1)
        self.config = msgspec.structs.replace(drawn.config, parallel=parallel)
        self.core = EngineCore(self.config, InlineExecutor(self.config, RankIdentity(0, 1)))
        spec = self.config.model.spec
        self.shape = model.Shape(spec.vocab_size, tuple(self.core.cache.layout.windows), spec.state is not None)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.reasons: dict[int, str] = {}

    def request(self, seq_id: int, prompt: list[int], **params: object) -> EngineRequest:
        return EngineRequest(
            seq_id,
            f"r{seq_id}",
            prompt,
            SamplingParams(**params),  # type: ignore[arg-type]
            self.draw.getrandbits(40),
            [EOS],
        )

    def prompt(self, longest: int) -> list[int]:
        return [self.draw.randrange(self.shape.vocab_size) for _ in range(self.draw.randrange(1, longest))]

    def step(self) -> None:
        outputs = self.core.step()
        if outputs is not None:
            for seq_id, token in zip(outputs.seq_ids.tolist(), outputs.token_ids.tolist(), strict=True):
                self.tokens[seq_id].append(token)
            self.reasons |= {end.seq_id: end.finish_reason for end in outputs.finished}

    def run(self) -> None:
        while self.core.has_work():
            self.step()


@pytest.mark.parametrize("seed", range(24))
def test_an_engine_gives_the_tokens_that_follow_from_the_request_alone(seed: int):
    engine = Engine(seed)
    shared = engine.prompt(30)
    requests = [
        engine.request(
            seq_id,
            shared[: engine.draw.randrange(30)] + engine.prompt(30),
            temperature=float(engine.draw.randrange(2)),
            max_tokens=engine.draw.randrange(1, 30),
        )
        for seq_id in range(10)
    ]
    for request in requests:
        engine.core.submit(request)
    engine.run()
    for request in requests:
        right = expected.expected(engine.shape, request, MAX_MODEL_LEN, lambda _: ORIGINAL)
        assert (engine.tokens[request.seq_id], engine.reasons[request.seq_id]) == right


def test_rules_are_followed():
    engine = Engine(0)
    vocab_size = engine.shape.vocab_size
    requests = [
        engine.request(0, [1], structured_outputs=StructuredOutputsParams(choice=["3 5 7", "3 4"])),
        engine.request(1, [1], allowed_token_ids=[4, 6], max_tokens=9),
        engine.request(2, [1], min_tokens=20, max_tokens=40),
        engine.request(3, [1], trace_decode_token_ids=[5, 5, 6], max_tokens=3),
    ]
    requests[1].bad_words_token_ids = [[4, 4]]
    for request in requests:
        rules = expected.sampling.Rules(request.params, request.eos_token_ids, request.bad_words_token_ids, vocab_size)
        output: list[int] = []
        while expected.finish_reason(request, output or [-1], MAX_MODEL_LEN) is None:
            output += expected.next_tokens(engine.shape, request, [1, *output], ORIGINAL, len(output), len(output) + 1)
            assert rules.allowed(output[:-1])[output[-1]]
        if request.seq_id == 0:
            assert output in ([3, 5, 7, EOS], [3, 4, EOS])
        elif request.seq_id == 1:
            assert set(output) == {4, 6}
            assert not any(output[at : at + 2] == [4, 4] for at in range(8))
        elif request.seq_id == 2:
            assert EOS not in output[:19]
        else:
            assert output == [5, 5, 6]


def decoding() -> tuple[Engine, Runner, EngineRequest]:
    """An engine in the middle of a request: 4 blocks are full."""
    engine = next(
        each for each in map(Engine, range(100)) if each.shape.windows == (None,) and not each.shape.has_states
    )
    request = engine.request(0, [1] * (4 * engine.config.cache.block_size), max_tokens=30, ignore_eos=True)
    engine.core.submit(request)
    engine.step()
    return engine, engine.core.executor._worker._runner, request  # type: ignore[attr-defined]


def wrong_token(engine: Engine, request: EngineRequest) -> int | None:
    engine.run()
    output = engine.tokens[0]
    return expected.first_wrong(engine.shape, request, output, [ORIGINAL] * len(output))


def test_nothing_is_wrong_without_a_fault():
    engine, _, request = decoding()
    assert wrong_token(engine, request) is None


def overwrite_one_place(runner: Runner) -> None:
    runner.cache.block(int(runner._batch.block_tables[0, 1]))[0, 1] += np.uint64(1)


def swap_two_blocks(runner: Runner) -> None:
    runner._batch.block_tables[0, [0, 1]] = runner._batch.block_tables[0, [1, 0]]


def forget_a_token(runner: Runner) -> None:
    runner._batch.num_computed[0] -= 1
    runner._batch.num_known[0] -= 1


@pytest.mark.parametrize("fault", [overwrite_one_place, swap_two_blocks, forget_a_token])
def test_one_wrong_number_gives_another_token(fault: Callable[[Runner], None]):
    engine, runner, request = decoding()
    fault(runner)
    assert wrong_token(engine, request) is not None


def test_half_an_update_gives_another_token():
    engine, _, request = decoding()
    worker = engine.core.executor._worker  # type: ignore[attr-defined]
    worker.load_weights([("second", 7)])
    assert wrong_token(engine, request) is not None


def test_all_that_a_request_depends_on_changes_its_tokens():
    shape, prompt = model.Shape(64, (None, 4)), [3, 1, 4, 1, 5]

    def output(request: EngineRequest, checkpoint: str = CHECKPOINT, shape: model.Shape = shape) -> list[int]:
        weights = model.weights_of(checkpoint)
        return expected.expected(shape, request, 60, lambda _: weights)[0]

    def request(prompt: list[int] = prompt, seed: int = 5, salt: str | None = None, **own: object) -> EngineRequest:
        params = SamplingParams(max_tokens=8, ignore_eos=True, extra_args={"salt": salt})
        return EngineRequest(0, "r", prompt, params, seed, **own)  # type: ignore[arg-type]

    def with_feature(data: bytes, position: int) -> EngineRequest:
        return request(features=[Feature("i", position, 2)], feature_data=[FeatureData(data, [len(data)], "uint8")])

    outputs = [
        output(request()),
        output(request([3, 1, 4, 1, 6])),
        output(request([1, 3, 4, 1, 5])),
        output(request(seed=6)),
        output(request(salt="s")),
        output(request(lora=LoRARequest("a", 1, "there"))),
        output(request(lora=LoRARequest("a", 1, "elsewhere"))),
        output(with_feature(b"x", 1)),
        output(with_feature(b"y", 1)),
        output(with_feature(b"x", 2)),
        output(request(), "other"),
        output(request(), shape=model.Shape(64, (None,))),
        output(request(), shape=model.Shape(64, (None, 4), has_states=True)),
    ]
    assert len({tuple(each) for each in outputs}) == len(outputs)
    assert output(request()) == outputs[0]
    at_the_end = with_feature(b"x", 3)
    assert expected.next_tokens(shape, at_the_end, at_the_end.prompt_token_ids, ORIGINAL, 0, 0) == []


def test_weights_change_in_all_ways_and_count_it():
    weights = Weights(Chance("w"))
    weights.read("a")
    before, counted = weights.checksum(), weights.num_changes
    assert (weights.parts == model.weights_of("a")).all()
    weights.start_update(needs_all=True)
    assert not weights.cancel_update()
    weights.start_update(needs_all=True)
    weights.receive({"checkpoint": "b", "names": ["first"]})
    assert weights.num_changes == counted + 1
    with pytest.raises(InvalidInput, match="lacks 3 tensors: encoder, second, head"):
        weights.finish_update()
    with pytest.raises(InvalidInput, match="an update of weights has begun"):
        weights.reload_from("c")
    assert weights.cancel_update()
    assert weights.checksum() != before
    weights.take_exported(Weights.exported(_with("a")))
    assert weights.checksum() == before
    with pytest.raises(InvalidInput, match="the model has no tensor 'lm_head'"):
        weights.load([("first", 1), ("lm_head", 1)])
    assert weights.checksum() == before


def test_a_checkpoint_turns_out_to_be_damaged_when_some_of_it_has_been_read():
    weights = _with("a")
    path = "b" + "/../b" * (FIRST_DAMAGED + 2)
    with pytest.raises(InvalidCheckpoint, match="the tensors of 'second' are cut off"):
        weights.reload_from(path)
    assert weights.parts.tolist() == [*model.weights_of(path)[:2], *model.weights_of("a")[2:]]


def _with(checkpoint: str) -> Weights:
    weights = Weights(Chance("w"))
    weights.read(checkpoint)
    return weights


def test_a_step_takes_the_experts_of_all_ranks_and_shows_those_that_an_update_has_missed():
    first, second, joining = (Weights(Chance("w")) for _ in range(3))
    for dp_rank, each in enumerate((first, second)):
        each.hold(held_by(dp_rank, 2))
        each.read("a")
        each.start_update(needs_all=False)
    ranks = [first, second]
    assert (first.with_experts(each.experts for each in ranks) == model.weights_of("a")).all()
    joining.hold(())
    joining.join(first.exported())
    shares = [each.experts for each in ranks]
    ranks.append(joining)
    for dp_rank, each in enumerate(ranks):
        each.take_experts(held_by(dp_rank, 3), shares)
    assert (joining.with_experts(each.experts for each in ranks) == model.weights_of("a")).all()
    for each in (first, second):
        each.receive({"checkpoint": "b"})
    is_new = first.with_experts(each.experts for each in ranks) == model.weights_of("b")
    assert is_new.tolist() == [unit != "second" for unit in model.UNITS]


@pytest.mark.parametrize(("level", "reads"), [(1, True), (2, True), (2, False)])
def test_sleep_drops_weights_by_level(level: int, reads: bool):
    weights = _with("a")
    weights.load([("first", 3)])
    kept = weights.checksum()
    weights.sleep(level)
    assert weights.checksum() != kept
    weights.wake("a" if reads else None)
    assert (weights.checksum() == kept) == (level == 1)
    assert (weights.parts == model.weights_of("a")).all() == (level == 2 and reads)
    assert weights.lacks_any == (not reads)


def test_a_step_without_tokens_is_a_step():
    _, runner, _ = decoding()
    result, _ = runner.sample(runner.compute(StepPlan(-1), ORIGINAL), None)
    assert (result.step, result.token_ids) == (-1, b"")


def test_ranks_that_share_experts_meet_in_each_round():
    def main() -> list[list[int]]:
        room, met = meeting.Room("there", 3), list[list[int]]()

        def member(number: int) -> None:
            for brought in range(5):
                found = room.meet(number, brought, 10.0)
                met.append([found[each] for each in range(3)])

        workers = [threads.Thread(target=member, args=[number]) for number in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return met

    for seed in range(20):
        assert sorted(World(seed).run(main)) == [[each] * 3 for each in range(5) for _ in range(3)]


def test_a_rank_that_does_not_come_is_missed():
    def main() -> None:
        meeting.Room("there", 2).meet(1, None, 10.0)

    with pytest.raises(TimeoutError, match=r"only \[1\] of 2 workers came to there within 10 s"):
        World(1).run(main)
