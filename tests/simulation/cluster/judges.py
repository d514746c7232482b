"""What must be true of a run, whatever the seed has done to it."""

from __future__ import annotations

import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from placement.errors import PlacementShortage
from raycore.config import EngineConfig
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from simulation.cluster import kinds
from simulation.cluster.deployments.lost_blocks import may_lack_blocks
from simulation.cluster.kinds.kind import Asked, Seen
from simulation.cluster.operations import adapters, deeds, weights
from simulation.cluster.operations.catalogue import CAPABILITY_OF
from simulation.cluster.operations.contract import History, end_of
from simulation.cluster.records import Record, Recorder
from simulation.cluster.records import Sequence as Output
from simulation.ray.actors import Actor
from simulation.ray.cluster import Cluster
from simulation.ray.errors import Unexpected
from simulation.scenario import Scenario
from simulation.worker import complaints, expected
from simulation.worker.cache import layout_of
from simulation.worker.model import Shape
from simulation.worker.steps import Step
from simulation.world.kernel import World

REQUEST_S = 900.0
"""Virtual seconds within which a request ends: its rank may be lost and replaced several times meanwhile, and a
replacement may wait for a node that is silent for 16 s and for a start of 30 s."""
_GROUPS_S = 8.0
"""Virtual seconds that Ray may take to create groups, in the slowest clusters: two steps of 3 s, and messages."""
_ENDS_S = 2.0
"""Virtual seconds within which a process ends that was killed: with the slowest messages, and with SIGKILL at once."""
_TOO_MANY_LOSSES = "ranks failed while they had it"


def raised(world: World) -> Iterator[str]:
    """What was raised in threads, and not caught."""
    for thread, error in world.failures:
        yield f"{thread} raised:\n{''.join(traceback.format_exception(error))}"


def of_workers(world: World, first_s: float) -> Iterator[str]:
    """What workers have seen that none may see. `first_s`: when something was broken first."""
    yield from complaints.disagreements(world)
    yield from complaints.failures(world, first_s)


def judged(
    recorder: Recorder, scenario: Scenario, config: EngineConfig, steps: Sequence[Step], struck_s: Sequence[float]
) -> Iterator[str]:
    """What is wrong with what the callers and operators of an engine have seen.

    Args:
        steps: that its workers computed.
        struck_s: when faults have struck.
    """
    if recorder.start_error is not None or scenario.start_error:  # nothing has broken yet
        if not _may_lack_time(recorder.start_error, config):
            yield from _of_start(recorder.start_error, scenario.start_error)
        return
    if not recorder.has_shut_down:
        yield "the driver ended before the engine was shut down"
    num_breaks = len(scenario.faults) + sum(each.kind == "break_worker" for each in scenario.operations)
    broken_s = [*struck_s, *(each.began_s for each in recorder.deeds if each.operation.kind == "break_worker")]
    history = History(recorder.deeds, broken_s, scenario.options)
    names = weights.WeightNames(history, config)
    for record in recorder.records:
        for problem in _of_request(record, recorder, config, names, num_breaks):
            yield f"{record.name}: {problem}"
    yield from deeds.problems(history, names, recorder, steps)


def _may_lack_time(error: BaseException | None, config: EngineConfig) -> bool:
    """Whether Ray may not have created the ranks' groups in time, though there is room."""
    return isinstance(error, PlacementShortage) and config.recovery.placement_timeout_s < _GROUPS_S


def _of_start(error: BaseException | None, wanted: str) -> Iterator[str]:
    """What is wrong with how the start has failed, or hasn't. `wanted`: by an error of which type it has to."""
    if error is None:
        yield f"the start should have failed by {wanted}"
    elif type(error).__name__ != wanted:
        should = f"should have failed by {wanted}, and has" if wanted else "failed"
        yield f"the start {should} by {type(error).__name__}: {error}"


def replaced(cluster: Cluster, scenario: Scenario) -> Iterator[str]:
    """Ranks that were lost though nothing was broken."""
    # the ranks of servers that share experts begin anew when one of the servers ends
    shares = scenario.servers and scenario.options.get("enable_expert_parallel")
    if shares or scenario.faults or any(each.kind in ("scale", "break_worker") for each in scenario.operations):
        return
    names = [actor.name for actor in cluster.gcs.actors.values()]
    started = Counter(re.sub(r"(?<=_dp\d)_\d+$", "", name) for name in names if re.search(r"_dp\d(_\d+)?$", name))
    for name, count in started.items():
        if count > 1:
            yield f"{name} was started {count} times, though nothing has broken"


def outlived(cluster: Cluster) -> Iterator[str]:
    """Ranks that ran on though Ray was asked to start others in their places: these may wait for what they hold."""
    starts: dict[str, list[Actor]] = defaultdict(list)
    for actor in cluster.gcs.actors.values():
        if (name := re.match(r"(.*_dp\d+)(_\d+)?$", actor.name)) is not None:
            starts[name[1]].append(actor)
    for actors in starts.values():
        for old, new in pairwise(sorted(actors, key=lambda each: each.asked_s)):
            start = old.incarnation
            if start is None or start.node.is_lost or start.node.raylet.has_ended or start.process.is_stopped:
                continue
            ended_s = start.worker.ended_s
            if ended_s is None or ended_s > new.asked_s + _ENDS_S:
                told = "runs on" if ended_s is None else f"ended at {ended_s:.2f} s"
                yield f"{new} was started at {new.asked_s:.2f} s in the place of {old}, which {told}"


def left_by_driver(cluster: Cluster) -> Iterator[str]:
    """What there is of an engine after its driver has ended, and some time has passed."""
    for actor in cluster.gcs.actors.values():
        if not actor.is_dead:
            yield f"the actor {actor} is left"
        incarnation = actor.incarnation
        if incarnation is not None and not incarnation.process.has_ended:
            yield f"the process of {actor} is left"
    for group in cluster.gcs.groups.values():
        if group.state != "REMOVED":
            yield f"the group {group.name} is left, {group.state}"


def _of_request(
    record: Record, recorder: Recorder, config: EngineConfig, names: weights.WeightNames, num_breaks: int
) -> Iterator[str]:
    """`num_breaks`: how often something may have broken."""
    yield from record.problems
    if record.submitted_s is None:
        yield "was never submitted"
        return
    if record.ended_s is None:
        yield "never ended"
        return
    if record.ended_s - record.submitted_s > REQUEST_S + kinds.waits_s(record.request):
        yield f"took {record.ended_s - record.submitted_s:.0f} s"
    asked, may_be_aborted = kinds.asked(record.request), _may_be_aborted(record, recorder)
    if recorder.unavailable is None:
        may_fail = record.error is not None and _may_fail(record, record.error, names.history)
        # each loss may have taken the rank that the request was on
        is_often_lost = num_breaks > config.recovery.max_request_replays and _TOO_MANY_LOSSES in str(record.error)
        yield from _of_error(record, asked, may_be_aborted, may_fail=may_fail or is_often_lost)
    if asked.error is not None:
        if any(sequence.tokens for sequence in record.sequences):
            yield "has tokens, and should have failed"
        return
    yield from _unasked(record)
    for index, sequence in enumerate(record.sequences):
        for problem in _of_sequence(record, asked, index, sequence, config, may_be_aborted, names):
            yield f"sequence {index}: {problem}"
    if record.error is None and not record.is_aborted and not may_be_aborted:
        for kind, value in kinds.of(record.request):
            yield from kind.problems_at_end(value, record, names.history)


def _unasked(record: Record) -> Iterator[str]:
    """What the caller has got besides, and hasn't asked for."""
    seen = {
        "prompt logprobs": record.prompt_logprobs is not None,
        "logprobs": any(sequence.logprobs for sequence in record.sequences),
        "hidden states": record.prompt_states is not None or any(each.hidden_states for each in record.sequences),
    }
    yield from (
        f"has {what}, and hasn't asked for any"
        for what, is_so in seen.items()
        if is_so and what not in record.request.wants
    )


def _of_error(record: Record, asked: Asked, may_be_aborted: bool, *, may_fail: bool) -> Iterator[str]:
    """What is wrong with how a request has failed, or hasn't, while the engine went on."""
    error = record.error
    said = f"{type(error).__name__}: {error}"
    if may_fail:
        return
    if asked.error is None:
        if error is not None and not (asked.can_fail and may_be_aborted and str(error).endswith("was aborted")):
            yield f"failed, though the engine didn't: {said}"
        return
    wanted, part = asked.error
    if error is None:
        if not record.is_aborted and not may_be_aborted:
            yield f"should have failed by {wanted.__name__}: {part}"
    elif not isinstance(error, wanted) or part not in str(error):
        yield f"should have failed by {wanted.__name__} with {part!r}, and has by {said}"


def _may_fail(record: Record, error: BaseException, history: History) -> bool:
    """Whether what the request is of, what operators have done, or what has broken explains how it has failed."""
    assert record.ended_s is not None
    return (
        isinstance(error, Unexpected)
        or any(kind.excuses(value, record, error, history) for kind, value in kinds.of(record.request))
        or any(
            deed.began_s <= record.ended_s and CAPABILITY_OF[deed.operation.kind].fails(deed, record, error)
            for deed in history.deeds
        )
        or may_lack_blocks(error, history.options, has_broken=history.has_broken)
    )


def _may_be_aborted(record: Record, recorder: Recorder) -> bool:
    """Whether an operator has aborted requests while this one ran."""
    assert record.submitted_s is not None
    assert record.ended_s is not None
    return any(
        deed.began_s <= record.ended_s
        and end_of(deed) >= record.came_s
        and CAPABILITY_OF[deed.operation.kind].aborts(deed.operation, record.name)
        for deed in recorder.deeds
    )


def _of_sequence(
    record: Record,
    asked: Asked,
    index: int,
    sequence: Output,
    config: EngineConfig,
    may_be_aborted: bool,
    names: weights.WeightNames,
) -> Iterator[str]:
    shape = shape_of(config)
    requests = adapters.variants(engine_request(record, asked, index, config), record, names.history)
    judged_as = [(list(weights.problems(record, sequence, each, shape, names)), each) for each in requests]
    possible = [each for wrong, each in judged_as if not wrong]
    if not possible:
        yield from min((wrong for wrong, _ in judged_as), key=len)
        return
    was_aborted = sequence.finish_reason == "abort" and may_be_aborted
    is_whole = record.error is None and not record.is_aborted and not was_aborted
    contents = names.during(record)
    if len(contents) == 1 or not asked.has_tokens:
        # what is said of prompts may come from any weights that there were meanwhile
        seen = [
            Seen(record, index, sequence, request, shape, [each] * (len(sequence.tokens) + 1), is_whole)
            for each in contents
            for request in possible
        ]
        for kind, value in kinds.of(record.request):
            found = [list(kind.problems(value, each)) for each in seen]
            yield from min(found, key=len)
    if is_whole and asked.has_tokens:
        yield from _of_end(sequence, possible[0], config)


def _of_end(sequence: Output, request: EngineRequest, config: EngineConfig) -> Iterator[str]:
    """What is wrong with how a sequence has ended."""
    if not sequence.tokens:
        yield "has no tokens"
        return
    for count in range(1, len(sequence.tokens)):
        reason = expected.finish_reason(request, sequence.tokens[:count], config.model.max_model_len)
        if reason is not None:
            yield f"should have ended by {reason} after {count} tokens"
    reason = expected.finish_reason(request, sequence.tokens, config.model.max_model_len)
    if reason != sequence.finish_reason:
        yield f"ended by {sequence.finish_reason} after {len(sequence.tokens)} tokens, not by {reason}"


def shape_of(config: EngineConfig) -> Shape:
    spec = config.model.spec
    return Shape(spec.vocab_size, tuple(layout_of(config).windows), spec.state is not None)


def engine_request(record: Record, asked: Asked, index: int, config: EngineConfig) -> EngineRequest:
    """The request of one sequence, as it follows from the scenario, and from earlier sequences if it continues them."""
    request = EngineRequest(
        seq_id=0,
        request_id=record.name,
        prompt_token_ids=asked.prompt["prompt_token_ids"],
        params=msgspec.structs.replace(SamplingParams(**asked.params), n=1),
        seed=0 if record.request.seed is None else record.request.seed + index,
        eos_token_ids=config.model.spec.eos_token_ids,
        **asked.engine,
    )
    for kind, value in kinds.of(record.request):
        request = kind.sequence(value, record, index, request)
    return request
